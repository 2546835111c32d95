"""Multiply a GGUF's matrix with vectors, and compare with its floats: multiply.py MODEL.gguf TENSOR"""

import sys

import numpy as np

import bridge

path, name = sys.argv[1:]
w = bridge.open_gguf(path)[name].prepare()
X = np.random.default_rng(0).standard_normal((4, w.shape[1]), dtype=np.float32)
Y = w.matmul(X)
exact = X @ w.dequantize().T
print(f"{name}: {w.type} {w.shape}, relative error {np.linalg.norm(Y - exact) / np.linalg.norm(exact):.2%}")

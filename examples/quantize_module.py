"""Quantize the layers of any torch module with GPTQ, and compare its outputs: quantize_module.py [BITS]"""

import copy
import sys

import torch

import bridge

bits = int(sys.argv[1]) if len(sys.argv) > 1 else 4
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
batches = [torch.randn(256, 64) for _ in range(4)]
quantized = copy.deepcopy(module)
for name, layer in bridge.quantize.gptq(quantized, batches, bits=bits, group_size=32).items():
    print(f"layer {name}: error {layer.error:.1e}")
x = torch.randn(256, 64)
print(f"outputs differ by {((quantized(x) - module(x)).norm() / module(x).norm()).item():.1%}")

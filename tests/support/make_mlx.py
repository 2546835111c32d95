"""Makes tests/data/mlx with Apple's own code (pip install "mlx[cpu]"; 0.32.4): quantized layers and their values."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

folder = Path(__file__).parent.parent / "data" / "mlx"
rng = np.random.default_rng(0)
tensors, expected, quantization = {}, {}, {"group_size": 64, "bits": 4, "mode": "affine"}
for bits in (2, 3, 4, 5, 6, 8):
    for dtype, size in ((mx.float16, 32), (mx.bfloat16, 64), (mx.float32, 128)):
        weight = rng.normal(0.003, 0.05, (6, 128)).astype(np.float32)
        weight[3] = 0
        weight[4] = 0.25
        weight[5] = np.abs(weight[5])
        name = f"bits{bits}.group{size}"
        q, scales, biases = mx.quantize(mx.array(weight).astype(dtype), group_size=size, bits=bits)
        tensors |= {f"{name}.weight": q, f"{name}.scales": scales, f"{name}.biases": biases}
        if (bits, size) != (4, 64):
            quantization[name] = {"group_size": size, "bits": bits}
        values = mx.dequantize(q, scales.astype(mx.float32), biases.astype(mx.float32), group_size=size, bits=bits)
        expected[name] = np.array(values)
mx.save_safetensors(str(folder / "model.safetensors"), tensors)
np.savez_compressed(folder / "expected.npz", **expected)
(folder / "config.json").write_text(json.dumps({"quantization": quantization, "quantization_config": quantization}))

"""Makes tests/data/mlx and mlx-mxfp8 with Apple's own code (pip install "mlx[cpu]"; 0.32.4): layers and values."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

data = Path(__file__).parent.parent / "data"


def save(folder: Path, tensors: dict, expected: dict, quantization: dict) -> None:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    np.savez_compressed(folder / "expected.npz", **expected)
    (folder / "config.json").write_text(json.dumps({"quantization": quantization, "quantization_config": quantization}))


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
save(data / "mlx", tensors, expected, quantization)

tensors, expected = {}, {}
for name, shape in (("plain", (6, 128)), ("mlp.switch_mlp.up_proj", (3, 4, 96))):
    weight = rng.normal(0.003, 0.05, shape).astype(np.float32)
    weight[1, ..., :32] = 0
    weight[2, ..., 32:64] *= 1e-20
    weight[2, ..., :32] *= 1e20
    q, scales = mx.quantize(mx.array(weight), mode="mxfp8")
    tensors |= {f"{name}.weight": q, f"{name}.scales": scales}
    expected[name] = np.array(mx.dequantize(q, scales, mode="mxfp8", dtype=mx.float32))
q, scales, biases = mx.quantize(mx.array(rng.normal(0, 0.05, (4, 128)).astype(np.float32)), group_size=64, bits=4)
tensors |= {"affine.weight": q, "affine.scales": scales, "affine.biases": biases}
expected["affine"] = np.array(mx.dequantize(q, scales, biases, group_size=64, bits=4))
own = {"group_size": 64, "bits": 4, "mode": "affine"}
save(data / "mlx-mxfp8", tensors, expected, {"group_size": 32, "bits": 8, "mode": "mxfp8", "affine": own})

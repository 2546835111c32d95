"""Makes tests/data/hqq with hqq itself (0.2.8.post1, torch 2.13): quantized layers and their values."""

import json
from pathlib import Path

import numpy as np
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from safetensors.torch import save_file

folder = Path(__file__).parent.parent / "data" / "hqq"
torch.manual_seed(0)
tensors, nested, expected = {}, {}, {}
for bits in (8, 6, 5, 4, 3, 2, 1.58, 1):
    for dtype, size in ((torch.float16, 32), (torch.bfloat16, 64), (torch.float16, None)):
        layer = torch.nn.Linear(128, 8, bias=bits == 4, dtype=torch.float32)
        as_float = size == 64 and bits in (4, 3)
        config = BaseQuantizeConfig(nbits=bits, group_size=size, axis=1, view_as_float=as_float)
        module = HQQLinear(layer, config, compute_dtype=dtype, device="cpu", del_orig=False)
        name = f"bits{bits}.group{size}"
        name = name.replace(".58", "point58")
        meta = {**module.meta, "compute_dtype": torch.float32}
        meta |= {"zero": meta["zero"].float(), "scale": meta["scale"].float()}
        expected[name] = Quantizer.dequantize(module.W_q, meta).numpy()
        if size is not None:  # transformers' form has no way to say None
            tensors |= {f"{name}.{k}": v.detach() for k, v in module.state_dict().items()}
        module.encoded_state_dict = False
        nested[name] = dict(module.state_dict())
weight_params = {"nbits": 4, "channel_wise": True, "group_size": 64, "optimize": True, "round_zero": False, "axis": 1}
one_pair = {"nbits": 8, "channel_wise": False, "group_size": None, "optimize": False}  # hqq's zero_quant_params
grouped = {"nbits": 8, "channel_wise": True, "group_size": 16, "optimize": False}  # its scale_quant_params, axis 0
quantized, meant = {}, {}
for name, scales, zeros in (
    ("zeros", None, one_pair),
    ("scales", grouped, None),
    ("both", grouped, one_pair),
    ("narrow", grouped | {"axis": 1, "nbits": 4, "group_size": 8}, grouped | {"nbits": 3, "group_size": 4}),
):
    module = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu", initialize=False)
    module.offload_meta = False
    layer = torch.nn.Linear(256, 16, bias=False)
    module.quantize(layer.weight.data, weight_params, scales, zeros)  # what the constructor has stopped to offer
    meant[name] = module.dequantize().numpy()
    quantized[name] = {"W_q": module.W_q.detach(), "bias": None, "meta": module.meta}
nested["norm"] = {"weight": torch.ones(4)}
tensors["norm.weight"] = torch.ones(4)
(folder / "pt").mkdir(parents=True, exist_ok=True)
save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
torch.save(nested, folder / "pt" / "qmodel.pt")
(folder / "meta").mkdir(exist_ok=True)
torch.save(quantized, folder / "meta" / "qmodel.pt")
np.savez_compressed(folder / "meta" / "expected.npz", **meant)
(folder / "meta" / "config.json").write_text("{}")
np.savez_compressed(folder / "expected.npz", **expected)
config = {"quant_method": "hqq", "quant_config": BaseQuantizeConfig(nbits=4, group_size=64, axis=1)}
(folder / "config.json").write_text(json.dumps({"quantization_config": {**config, "skip_modules": ["lm_head"]}}))
(folder / "pt" / "config.json").write_text("{}")

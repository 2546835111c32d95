"""The scales of whole matrices, tensors of their own, that llama.cpp multiplies by after products with NVFP4."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from gguf.gguf_writer import GGUFValue

from bridge.blocks import MATRIX_SCALED
from bridge.checkpoint import Checkpoint
from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.errors import BridgeError
from bridge.models.outline import ModelTensor

# tensors whose scale llama.cpp's graph multiplies by (build 11549); it loads the others' scales without using them
_MULTIPLIED = {
    "llama": ("attn_", "ffn_", "output"), "qwen3": ("attn_", "ffn_", "output"), "qwen3moe": ("attn_", "ffn_", "output"),
    "qwen2": ("attn_", "output"), "qwen2moe": ("attn_", "output"),
}  # fmt: skip
# of floats that are rounded: scales of 16 weights have 4 bits from 2^-14 on, and reach 1.75, so weights 10.5. The usual
# scale, of the largest weight, gives the same 4 bits, but takes a look at all weights before the file is planned
_ROUNDED = 2.0**-8
_ROUNDED_WAYS = {"rounded", "calibrated"}


def is_multiplied(metadata: Mapping[str, GGUFValue], tensor: ModelTensor) -> bool:
    """Whether llama.cpp computes with the scale of a tensor of the model that has this metadata."""
    return tensor.kind.startswith(_MULTIPLIED.get(str(metadata["general.architecture"].value), ()))


def rounded_scale(metadata: Mapping[str, GGUFValue], tensor: PlannedTensor) -> float:
    """What multiplies the matrices of a tensor that came as floats; 1 where llama.cpp does not multiply."""
    return _ROUNDED if tensor.type in MATRIX_SCALED and is_multiplied(metadata, tensor) else 1.0


def with_scales(ckpt: Checkpoint, plan: Plan) -> Plan:
    """The plan with the scales that llama.cpp multiplies by after each NVFP4 tensor: of the tensor and of its input,
    "blk.0.attn_q.scale", one number or one an expert. A scale of 1 is left out."""
    names = {t.name for t in plan.tensors}
    tensors = []
    for tensor in plan.tensors:
        tensors.append(tensor)
        if tensor.type not in MATRIX_SCALED:
            continue
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        scales = [_scales(ckpt, plan, tensor, i) for i in range(len(tensor.parts))]
        if tensor.how and set(tensor.how) <= _ROUNDED_WAYS:  # whatever number of matrices a part has
            scales = scales * count
        scales = scales[:count]
        for key in ("scale", "input_scale"):
            values = np.array([s[key] for s in scales if key in s], np.float32)
            if len(values) == count and (key != "scale" or (values != 1).any()):
                name = f"{tensor.name.removesuffix('.weight')}.{key}"
                if name in names:
                    raise BridgeError(f"{name}: is in the plan, but made when {tensor.name} is; take it out")
                scale = PlannedTensor(name, (count,), data=values, origin="scale", type="F32", quantizable=False)
                tensors.append(scale)
    return replace(plan, tensors=tensors)


def _scales(ckpt: Checkpoint, plan: Plan, tensor: PlannedTensor, number: int) -> dict[str, float]:
    """The scales of a part, `scale` and `input_scale`."""
    if tensor.how and tensor.how[number] in _ROUNDED_WAYS:
        return {"scale": rounded_scale(plan.metadata, tensor)}
    return ckpt.tensor_scales(tensor.parts[number].module)

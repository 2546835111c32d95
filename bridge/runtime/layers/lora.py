"""Adds a low-rank adapter (LoRA), a GGUF of its own, to the matrices of a model's.

    general.type          "adapter"            general.architecture     the model's
    adapter.type          "lora"               adapter.lora.alpha       float32
    NAME.lora_a           [r, in]              NAME.lora_b              [out, r]       y += scale * b (a x)
    token_embd.weight.lora_a  [vocab, r]       token_embd.weight.lora_b [hidden, r]    x += scale * b a[token]
    of experts [experts, r, in]                [experts, out, r]                       for each expert

scale = alpha / r, or 1 if alpha is 0, as in llama.cpp. The products are of float32, also where the model's own round
activations to 8 bits. A token costs the model's time and 2 r (in + out) operations a matrix; a layer's table of calls
ends at each of these matrices.
"""

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile

_EMBEDDINGS = "token_embd.weight"


def add_adapter(file: GGUFFile, adapter: GGUFFile) -> None:
    """Set `change` of the tensors that an adapter changes.

    Raises BridgeError for a file that is not a LoRA, one of another model, and for changes that cannot be applied: of
    vectors, and of embeddings that are also the head.
    """
    alpha = _checked_alpha(file, adapter)
    names: dict[str, None] = {}
    for name in adapter:
        stem, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b"):
            raise BridgeError(f"{adapter.path}: {name} is not a tensor of a LoRA; convert the adapter again")
        names[stem] = None
    for name in names:
        if name not in file:
            raise _of_another(file, adapter, f"it changes {name}, which the model does not have")
        pair = [adapter.tensors.get(f"{name}.lora_{part}") for part in "ab"]
        if pair[0] is None or pair[1] is None:
            missing = "a" if pair[0] is None else "b"
            raise BridgeError(f"{adapter.path}: {name} has no lora_{missing}; convert the adapter again")
        _check_changeable(file, adapter, file[name])
        a, b = pair[0].dequantize(), pair[1].dequantize()
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise BridgeError(f"{adapter.path}: {name} has values that are not finite; convert the adapter again")
        stack = len(file[name].shape) == 3
        if not a.ndim == b.ndim == 2 + stack or a.shape[-1 if name == _EMBEDDINGS else -2] != b.shape[-1]:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise BridgeError(f"{adapter.path}: {name} has matrices of {shapes}, which do not multiply")
        scale = np.float32(alpha / b.shape[-1] if alpha else 1.0)
        if name == _EMBEDDINGS:
            a, b = b.T, a
        change, shape = [*b.shape[:-1], a.shape[-1]], list(file[name].shape)
        if change != shape or a.shape[:-2] != b.shape[:-2]:
            raise _of_another(file, adapter, f"{name} is a change of shape {change}, the model has {shape}")
        file[name].change = np.ascontiguousarray(a), scale * b


def _checked_alpha(file: GGUFFile, adapter: GGUFFile) -> float:
    """adapter.lora.alpha of a LoRA for this model."""
    read = adapter.metadata.get
    if read("general.type") != "adapter" or read("adapter.type") != "lora":
        raise BridgeError(f"{adapter.path}: is not an adapter (LoRA); convert-lora makes one of a PEFT folder")
    if "adapter.alora.invocation_tokens" in adapter.metadata:
        raise BridgeError(f"{adapter.path}: is switched on by tokens of the prompt (activated LoRA); it cannot be used")
    if adapter.arch != file.arch:
        raise _of_another(file, adapter, f"it is for {adapter.arch}, the model is {file.arch}")
    alpha = read("adapter.lora.alpha")
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise BridgeError(f"{adapter.path}: adapter.lora.alpha is {alpha!r}, not a number; convert the adapter again")
    return alpha


def _check_changeable(file: GGUFFile, adapter: GGUFFile, tensor: QuantTensor) -> None:
    """BridgeError for a tensor of the model that cannot be changed here."""
    if len(tensor.shape) not in (2, 3):
        why = "is not a matrix"
    elif tensor.name == _EMBEDDINGS and "output.weight" not in file:
        why = "is also the model's head"
    else:
        return
    raise BridgeError(
        f"{adapter.path}: changes {tensor.name}, which {why}; this cannot be applied: convert the base checkpoint with "
        f"{parameter('merge')} set to the PEFT adapter"
    )


def _of_another(file: GGUFFile, adapter: GGUFFile, why: str) -> BridgeError:
    return BridgeError(
        f"{adapter.path}: does not fit {file.path}: {why}; give the GGUF of the model that the adapter was trained on"
    )

"""A checkpoint's trellis-coded layers in place of a torch model's Linears."""

from pathlib import Path

import torch
from torch import nn

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.errors import BridgeError
from bridge.nn.quant_linear import QuantLinear
from bridge.system.options import checked
from bridge.trellis.layer import TrellisLayer

_PADDED = 128  # EXL3's sides may be padded to multiples of it


@checked
def replace_trellis(
    model: nn.Module, checkpoint: str | Path | Checkpoint, device: str | torch.device = "cpu"
) -> nn.Module:
    """Put the trellis-coded linears of a checkpoint into a transformers model of its architecture.

    model       the model
    checkpoint  a folder of QTIP or EXL3, or an open checkpoint
    device      where the codes go, "cpu" or "cuda"; model.to(device) moves everything there

    Embeddings, norms and linears that the checkpoint stores as floats are put in too.

    Returns the same model. Raises BridgeError where the model has no such module or another shape, or the checkpoint no
    trellis codes.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint) as opened:
            return replace_trellis(model, opened, device)
    place_layers(model, checkpoint, device)
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name in checkpoint.tensors.keys() - {f"{module}.bias" for module in checkpoint.modules}:
            stored = checkpoint.read_float(name)
            if name not in parameters or parameters[name].shape != stored.shape:
                raise BridgeError(
                    f"{name}: is {list(stored.shape)} in {checkpoint.path}, but "
                    f"{list(parameters[name].shape) if name in parameters else 'missing'} in {type(model).__name__}; "
                    "make the model from the checkpoint's own config"
                )
            parameters[name].copy_(torch.from_numpy(stored))
    return model


def place_layers(model: nn.Module, checkpoint: Checkpoint, device: str | None = None) -> None:
    """The trellis-coded linears alone, with their biases; without a device, `settle` does the rest.

    Raises BridgeError as `replace_trellis` does.
    """
    for name in checkpoint.modules:
        try:
            old = model.get_submodule(name)
        except AttributeError:
            raise BridgeError(
                f"{name}: {checkpoint.path} has it, but {type(model).__name__} does not; make the model from the "
                "checkpoint's own config"
            ) from None
        parent, _, child = name.rpartition(".")
        shape = int(old.out_features), int(old.in_features)  # type: ignore[arg-type]
        linear = trellis_linear(checkpoint.read_trellis(name), name, shape, checkpoint.path, device)
        setattr(model.get_submodule(parent), child, linear)


def trellis_linear(
    layer: TrellisLayer, name: str, shape: tuple[int, int], source: object, device: str | None = "cpu"
) -> QuantLinear:
    """A module of a layer that a model has as (out, in), ready to multiply on a device if one is named.

    Raises BridgeError where `source` has another shape.
    """
    if any(not 0 <= a - b < _PADDED for a, b in zip(layer.shape, shape, strict=True)):
        raise BridgeError(
            f"{name}: is {list(layer.shape)} in {source}, {list(shape)} in the model; "
            "make the model from the checkpoint's own config"
        )
    layer = layer.cropped(*shape)
    placed = layer if device is None else layer.prepare() if device == "cpu" else layer.to(device)
    return QuantLinear(placed, _bias(layer, shape[0]), precision="f32")


def settle(model: nn.Module) -> None:
    """Move trellis codes to where their modules' buffers were made anew, and restore the biases, which are empty there.

    Raises BridgeError where a module was put neither on the CPU nor on a GPU.
    """
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear) or not isinstance(module.tensor, TrellisLayer):
            continue
        device, bias = module.place.device, _bias(module.tensor, module.out_features)
        if device.type not in ("cpu", "cuda"):
            raise BridgeError(
                f"{name}: trellis codes are on the CPU or on a GPU, and cannot be offloaded ({device}); "
                'pass device_map={"": "cuda"} or none'
            )
        module.register_buffer("bias", None if bias is None else bias.to(device), persistent=False)
        if device.type == "cpu":
            module.tensor.prepare()
        module.follow()


def _bias(layer: TrellisLayer, out: int) -> torch.Tensor | None:
    return None if layer.bias is None else torch.from_numpy(layer.bias[:out])

"""The layers that can be quantized, seen as a matrix [out, columns] and its inputs as vectors [tokens, columns].

torch.nn.Linear       weight as it is
transformers' Conv1D  weight [in, out], so transposed
torch.nn.Conv2d       weight [out, in * kernel], inputs are the patches under the kernel; one group
"""

from __future__ import annotations

import torch
from torch import nn


def is_layer(module: nn.Module) -> bool:
    """Whether `matrix`, `set_matrix` and `vectors` know this kind of module."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix(module: nn.Module) -> torch.Tensor:
    """The weights as float32 [out, columns], a copy."""
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
    weight = weight.T if _is_conv1d(module) else weight.flatten(1)
    return weight.to(torch.float32, copy=True).contiguous()


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """(out, columns) of `matrix`."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
    return (columns, rows) if _is_conv1d(module) else (rows, columns)


def set_matrix(module: nn.Module, values: torch.Tensor) -> None:
    """Put float [out, columns] in the place of the weights."""
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
    weight.copy_((values.T if _is_conv1d(module) else values).reshape(weight.shape))


def vectors(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A module's input as the vectors its matrix is multiplied with: [tokens, columns]."""
    if isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str)
        images = x if x.ndim == 4 else x[None]
        patches = nn.functional.unfold(images, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return x.reshape(-1, x.shape[-1])

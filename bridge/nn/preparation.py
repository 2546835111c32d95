"""What a model's quantized modules need before their first products: done at once, with a progress bar on a GPU."""

import torch
from torch import nn

from bridge.nn.quant_experts import QuantExperts
from bridge.nn.quant_linear import Placed, QuantEmbedding, QuantLinear
from bridge.system.devices import cuda
from bridge.system.options import checked


@checked
def prepare(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Get the quantized modules of a model ready to multiply.

    model  a model with modules of `bridge.nn`
    dtype  torch's dtype of the modules' inputs; None: that of the model's own parameters

    On a GPU the kernels are compiled in several processes; otherwise the first use of each shape takes seconds. On the
    CPU the weights are repacked, and the mapped pages of the file released.

    Returns the same model. Raises BridgeError where a scale is not finite.
    """
    modules = [module for module in model.modules() if isinstance(module, Placed)]
    on_gpu = [module for module in modules if module.place.is_cuda]
    for module in modules:
        if module.place.device.type == "cpu" and isinstance(module, QuantLinear | QuantExperts):
            if hasattr(module.tensor, "release_raw"):
                module.tensor.prepare(release=True)
            else:  # trellis codes
                module.tensor.prepare()
    if on_gpu:
        x_dtype = dtype or next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
        cuda("first_products").compile_products(
            [(m.tensor, m.precision, m.adds_bias) for m in on_gpu if isinstance(m, QuantLinear)],
            [m.tensor for m in on_gpu if isinstance(m, QuantEmbedding)],
            x_dtype,
            [(m.tensor, m.precision) for m in on_gpu if isinstance(m, QuantExperts)],
        )
    return model

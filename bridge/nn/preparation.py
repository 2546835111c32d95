"""What a model's quantized modules need before their first products: done at once, with a progress bar on a GPU."""

import torch
from torch import nn

from bridge.nn.quant_experts import QuantExperts
from bridge.nn.quant_linear import Placed, QuantEmbedding, QuantLinear
from bridge.system.devices import cuda
from bridge.system.options import checked


@checked
def prepare(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Get a model's quantized modules ready to multiply, and return it.

    On a GPU their kernels are compiled, in several processes; otherwise each first use of a shape takes seconds. On the
    CPU the weights are repacked, as `QuantTensor.prepare` does, and the mapped pages of the file released.

    dtype  torch's, of what the modules will be given; that of the model's own parameters unless it is named
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

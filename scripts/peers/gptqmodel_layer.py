"""GPTQModel's GPTQ of one linear layer, a peer to our solver; runs in any Python that has it:

    PYTHON scripts/peers/gptqmodel_layer.py ROWS COLUMNS

4 bits, symmetric groups of 128, the Hessian given. Prints CPU seconds and tr(E H E^T) over tr(W H W^T).
"""

import sys
import time

import torch


def layer(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights float32 [rows, columns], and H of `inputs`."""
    random = torch.Generator().manual_seed(0)
    x = inputs(columns, random)
    return 0.02 * torch.randn(rows, columns, generator=random), x.T @ x * (2 / len(x))


def inputs(columns: int, random: torch.Generator) -> torch.Tensor:
    """Inputs float32 [tokens, columns] of uneven size, large in 64 directions."""
    x = torch.randn(columns + 512, columns, generator=random)
    x += 0.3 * torch.randn(columns + 512, 64, generator=random) @ torch.randn(64, columns, generator=random)
    x *= torch.exp(0.5 * torch.randn(columns, generator=random))
    return x


def quantized(weight: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The rounded weights, and the CPU seconds that rounding took."""
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    solver = GPTQ(linear, QuantizeConfig(bits=4, group_size=128, sym=True))
    solver.quantizer.configure(perchannel=True)
    solver.H, solver.nsamples = hessian.clone(), 2 * len(hessian)
    solver.finalize_hessian = lambda target_device=None: solver.H  # otherwise it is summed from batches
    begun = time.process_time()
    values = solver.quantize()[0]
    return values.float(), time.process_time() - begun


if __name__ == "__main__":
    quantized(*layer(64, 512))
    w, h = layer(int(sys.argv[1]), int(sys.argv[2]))
    values, seconds = quantized(w, h)
    lost = w - values
    print(seconds, float(((lost @ h) * lost).sum() / ((w @ h) * w).sum()))

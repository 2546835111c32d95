"""All jobs by name: "correct/..." may run in parallel, "time/..." one after the other."""

from typing import Any

import torch
from bridge.cuda.product import mma_int8
from bridge.cuda.toolchain.device import require

from bridge.blocks import ROUNDED
from gpu_checks import contexts, costs, experts, linears, mmvq, model, products, timing, tokens, torchs, trellis

LARGE, SMALL = "8192x28672", "4096x14336"
OTHERS = ("4096x4096", "1024x4096", "14336x4096")  # q, k and gate of an 8B model
TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q5_K", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "NVFP4", "Q2_0",
         *reversed(ROUNDED))  # fmt: skip
OTHERWISE = ("MXFP4", "NVFP4", "Q2_0")  # not on tensor cores
TOKENS = ("Q4_K", "Q6_K", "Q8_0")  # timed with many tokens
LINEARS = ("Q4_K", "Q8_0")
EXPERTS = ("Q4_K", "Q6_K")
CACHES = ("f16", "q8_0", "f32")
LENGTHS = tuple(map(str, contexts.LENGTHS))
MIXTURE = "Q4_K_M"
PROMPTED = ("Q4_K", "Q6_K")
MANY = (OTHERS[-1], SMALL)  # gate and down of an 8B model, multiplied with many tokens
BARRED = TYPES[:8]  # have a bar, see report.py
UPLOADED = ("Q4_K", "Q6_K")

FIRST = "correct/one"  # a product, and if that is wrong nothing else is tried
# one of each kind, tried at the same time: a run that ends there has said what else is wrong
EARLY = ["correct/products/Q4_K/int8", "correct/graphs", "correct/attention/f16", "correct/mma_int8/Q4_K",
         "correct/tokens/Q4_K"]  # fmt: skip

# the longest first
CORRECT = ["correct/mmvq", "correct/model", "correct/inductor", "correct/tensors", "correct/threads", "correct/graphs"]
CORRECT += [f"correct/{part}/{kind}" for part in ("attention", "layers") for kind in CACHES]
CORRECT += [f"correct/configurations/{type}" for type in products.TRIED]
CORRECT += [f"correct/tokens/{type}" for type in TYPES if type not in OTHERWISE]
CORRECT += [f"correct/mma_int8/{type}" for type in mma_int8.TYPES]
CORRECT += [f"correct/products/{type}/{precision}" for precision in ("int8", "f32") for type in TYPES]
CORRECT += [f"correct/model/{name}" for name in model.others()]
CORRECT += ["correct/copies", "correct/second", "correct/load", *(f"correct/linears/{type}" for type in LINEARS)]
CORRECT += [f"correct/trellis/{mode}" for mode in trellis.WAYS] + [f"correct/experts/{type}" for type in EXPERTS]

# under compute-sanitizer, in the time that is left
SANITIZED = ["correct/products/Q4_K/int8", "correct/tokens/Q4_K", "correct/mma_int8/Q4_K", "correct/model"]

# what has a bar, or is part of one
TIMES = ["time/reading", f"time/torch_product/{LARGE}", *(f"time/product/{LARGE}/{type}" for type in BARRED)]
TIMES += [f"time/product/{SMALL}/Q4_K", "time/decode", *(f"time/tokens/{LARGE}/{type}" for type in TOKENS)]
# what docs/measurements/cuda.md has only by a model
TIMES += [f"time/mma_int8/{shape}/{type}" for type in mma_int8.TYPES for shape in MANY]
TIMES += ["time/launches", "time/clocks", *(f"time/attention/{n}/{kind}" for n in LENGTHS for kind in CACHES)]
TIMES += [f"time/experts/{type}" for type in EXPERTS]
# the other matrices of an 8B model, and its prompts
TIMES += [f"time/prompt/{shape}/{type}" for type in PROMPTED for shape in MANY] + [f"time/decode/{MIXTURE}"]
TIMES += [f"time/product/{shape}/{type}" for shape in OTHERS for type in ("Q4_K", "Q6_K", "Q8_0")]
TIMES += [f"time/product/{SMALL}/{type}" for type in ("Q6_K", "Q8_0")]
TIMES += [f"time/torch_product/{shape}" for shape in (*OTHERS, SMALL)]
# the other types, and what is of use to choose by
TIMES += [f"time/product/{LARGE}/{type}" for type in TYPES if type not in BARRED]
TIMES += [f"time/upload/{type}" for type in UPLOADED]
TIMES += [f"time/product/{SMALL}/{type}" for type in TYPES if type not in ("Q4_K", "Q6_K", "Q8_0")]
TIMES += [
    f"time/configurations/{shape}/{type}/{n}"
    for type, columns in products.TRIED.items()
    for shape in (LARGE, SMALL)
    for n in columns
]

EVERY = [FIRST, *CORRECT, *TIMES]

_KNOWN = {
    "correct": {
        "model": model.check, "products": products.check, "tokens": tokens.check, "mma_int8": tokens.check_int8,
        "linears": linears.check, "experts": experts.check, "load": linears.check_load, "trellis": trellis.check,
        "tensors": products.check_tensors, "one": products.check_one, "threads": products.check_threads,
        "configurations": products.check_configurations, "mmvq": mmvq.check, "attention": contexts.check,
        "graphs": torchs.check_graphs, "copies": torchs.check_copies, "inductor": torchs.check_inductor,
        "second": torchs.check_second, "layers": contexts.check_layers,
    },
    "time": {
        "reading": timing.reading, "torch_product": timing.torch_product, "product": timing.product,
        "tokens": timing.tokens, "mma_int8": timing.mma_int8, "configurations": timing.configurations,
        "prompt": timing.prompt, "attention": contexts.time, "experts": experts.time, "launches": costs.launches,
        "upload": costs.upload, "clocks": costs.clocks, "decode": timing.decode,
    },
}  # fmt: skip


def run(job: str) -> dict[str, Any]:
    """The result of a job: {"wrong": [...], "notes": "..."} or times in seconds."""
    part, name, *arguments = job.split("/")
    device = require("cuda")
    with device.active(), torch.cuda.device(device.index):
        result: dict[str, Any] = _KNOWN[part][name](*arguments)  # type: ignore[operator]
        torch.cuda.empty_cache()
    return result

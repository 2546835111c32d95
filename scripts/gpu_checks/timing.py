"""Times: read bandwidth, products, torch's f16 product, prompts, other configurations, tokens of an 8B model.

All times except those of whole tokens are of replays of CUDA graphs whose weights rotate beyond the L2 cache: see
cuda/bench.py.
"""

import time
from typing import Any

import torch
from bridge.cuda import bench
from bridge.cuda.bench import Bench, read_bandwidth
from bridge.cuda.decoder import WIDEST, Decoder
from bridge.cuda.product import matvec_shape, mma
from bridge.cuda.toolchain.device import require

from bridge.runtime.bench import random_tensor
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.sampling import Sampler, Sampling
from gpu_checks import mmvq
from gpu_checks.synthetic import SyntheticFile

DECODED = 96  # tokens
CONTEXT = 4096
PROMPTS = (16, 3000)  # tokens: short and long
BATCHES = (128, 512, 2048)  # tokens of a prompt that are multiplied together
INT8 = (16, 24, 96, 128, 512, 2048)  # tokens that are multiplied as int8


def shape_of(text: str) -> tuple[int, int]:
    """(8192, 28672) of "8192x28672"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def reading() -> dict[str, Any]:
    """Bytes a second of a kernel that only reads."""
    return {"bandwidth": read_bandwidth(require("cuda"))}


def torch_product(shape: str) -> dict[str, Any]:
    """Seconds of torch's f16 product with one vector."""
    return {"seconds": bench.torch_product(shape_of(shape), require("cuda"))}


def product(shape: str, type: str) -> dict[str, Any]:
    """Bytes of the weights on the device, and seconds of a product by columns and precision; and of llama.cpp's, where
    it is compiled."""
    ours = _bench(shape, type)
    ways = {"int8": (1, "int8"), "int8_4": (4, "int8"), "int8_8": (8, "int8"), "f32": (1, "f32")}
    figures = {"nbytes": ours.matrix.nbytes} | {name: ours.product(*way) for name, way in ways.items()}
    peer = mmvq.time(shape_of(shape), type)
    return figures if peer is None else figures | {"mmvq": peer}


def tokens(shape: str, type: str) -> dict[str, Any]:
    """Seconds of a product with 16 and 64 tokens: on tensor cores, and with the weights dequantized for torch."""
    ours = _bench(shape, type)
    return {f"{way}_{n}": ours.tokens(n, way) for n in (16, 64) for way in ("cores", "torch")}


def mma_int8(shape: str, type: str) -> dict[str, Any]:
    """Seconds of a product with 16 to 2,048 tokens: as int8, as halves in the way that is taken otherwise, and of
    torch's with weights that are bfloat16."""
    ours, figures = _bench(shape, type), {}
    for n in INT8:
        figures[f"int8_{n}"] = ours.tokens(n, "int8")
        figures[f"halves_{n}"] = ours.tokens(n, "cores" if n <= mma.TOKENS else "torch")
        figures[f"bfloat16_{n}"] = bench.torch_product(shape_of(shape), require("cuda"), n, "bfloat16")
    return figures


def prompt(shape: str, type: str) -> dict[str, Any]:
    """Seconds of a product with many tokens of halves, and of torch's with weights that are halves or bfloat16."""
    ours, figures = _bench(shape, type), {}
    for n in BATCHES:
        figures[f"own_{n}"] = ours.tokens(n, "torch")
        for dtype in ("float16", "bfloat16"):
            figures[f"{dtype}_{n}"] = bench.torch_product(shape_of(shape), require("cuda"), n, dtype)
    return figures


def configurations(shape: str, type: str, columns: str) -> dict[str, Any]:
    """Seconds of every way to share the work; the first is the one in use."""
    ours, n = _bench(shape, type), int(columns)
    tried = matvec_shape.shapes_to_try(ours.matrix, n)
    return {"tried": [[list(chosen), ours.product(n, shape=chosen)] for chosen in tried]}


def _bench(shape: str, type: str) -> Any:
    return Bench(random_tensor(type, *shape_of(shape)), require("cuda"))


def decode(preset: str = "Q4_K") -> dict[str, Any]:
    """Tokens a second of a synthetic Llama 3 8B in a type or mixture, with the host reading each, and seconds of the
    captured step alone, of one token and of four."""
    file: Any = SyntheticFile(preset)
    begun = time.perf_counter()
    decoder = Decoder(file, read_config(file.metadata, file.path), CONTEXT, "f16", "int8", str(require("cuda")))
    decoder.prepare()
    figures: dict[str, Any] = {"file": file.nbytes, "upload": time.perf_counter() - begun}
    short, long = PROMPTS
    for name, prompt, how in (
        ("greedy", short, Sampling(0)),
        ("sampled", short, Sampling(0.8, seed=1)),
        ("greedy, long prompt", long, Sampling(0)),
    ):
        stream = decoder.draw([i * 7919 % file.VOCAB for i in range(prompt)], Sampler(how))
        start = time.perf_counter()
        next(stream)
        first = time.perf_counter()
        for _ in range(DECODED):
            next(stream)
        figures[name] = {"tokens_per_second": DECODED / (time.perf_counter() - first), "prompt_seconds": first - start}
        stream.close()
    figures["step_seconds"] = _step(decoder, decoder.step, decoder._captured[None], short)
    together, graph = decoder._step_of(WIDEST)
    figures["step_seconds, four tokens"] = _step(decoder, together, graph, short)
    if decoder.dependent:
        decoder.dependent = False
        decoder.build()
        figures["step_seconds, one after the other"] = _step(decoder, decoder.step, decoder._captured[None], short)
    return figures


def _step(decoder: Any, step: Any, graph: Any, position: int) -> float:
    """Seconds of a captured step."""
    torch.cuda.synchronize()
    decoder._set_state(step, [1] * step.n, position)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(DECODED):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / DECODED

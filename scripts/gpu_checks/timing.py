"""Times: read bandwidth, products, torch's f16 product, other configurations, attention, tokens of an 8B model.

All times except those of whole tokens are of replays of CUDA graphs whose weights rotate beyond the L2 cache: see
cuda/bench.py.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bridge.cuda import attention as attn
from bridge.cuda import bench, matvec
from bridge.cuda.activations import Records
from bridge.cuda.attention_shape import shape, spans
from bridge.cuda.bench import Bench, read_bandwidth, seconds_from_memory
from bridge.cuda.decoder import Decoder
from bridge.cuda.device import require, torch_device, view, zeros
from bridge.cuda.kv_cache import KVForm

from bridge.runtime.bench import random_tensor
from bridge.runtime.decoder_config import read_config
from bridge.runtime.sampling import Sampler, Sampling
from gpu_checks.synthetic import SyntheticFile

DECODED = 96  # tokens
CONTEXT = 4096
PROMPTS = (16, 3000)  # tokens: short and long
ATTENDED = (8192, 32, 8, 128)  # positions, heads, KV heads and their size: Llama 3 8B in its whole context


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
    """Bytes of the weights on the device, and seconds of a product by columns and precision."""
    own = _bench(shape, type)
    ways = {"int8": (1, "int8"), "int8_4": (4, "int8"), "int8_8": (8, "int8"), "f32": (1, "f32")}
    return {"nbytes": own.matrix.nbytes} | {name: own.product(*way) for name, way in ways.items()}


def tokens(shape: str, type: str) -> dict[str, Any]:
    """Seconds of a product with 16 and 64 tokens: on tensor cores, and with the weights dequantized for torch."""
    own = _bench(shape, type)
    return {f"{way}_{n}": own.tokens(n, way == "torch") for n in (16, 64) for way in ("cores", "torch")}


def configurations(shape: str, type: str, columns: str) -> dict[str, Any]:
    """Seconds of every way to share the work; the first is the one in use."""
    own, n = _bench(shape, type), int(columns)
    tried = matvec.shapes_to_try(own.matrix, n)
    return {"tried": [[list(chosen), own.product(n, shape=chosen)] for chosen in tried]}


def _bench(shape: str, type: str) -> Any:
    return Bench(random_tensor(type, *shape_of(shape)), require("cuda"))


def attention(kind: str) -> dict[str, Any]:
    """Bytes of a layer's keys and values at the end of a long context, and seconds of a token's attention: ours, and
    torch's where it has the form, f16."""
    device = require("cuda")
    length, heads, kv_heads, head_dim = ATTENDED
    form, count = KVForm(kind, head_dim), spans(device.multiprocessors, kv_heads, length)
    kernel = attn.kernel(head_dim, heads // kv_heads, head_dim, True, False, False, kind, False, device.capability)
    threads = shape(form, heads // kv_heads, device.capability).threads
    state = zeros(device, attn.STATE, torch.int32)
    state[attn.POSITION] = length - 1
    qkv = torch.randn((heads + 2 * kv_heads) * head_dim, device=torch_device(device))
    angles = zeros(device, length * head_dim // 2)
    work = zeros(device, heads * count * head_dim), zeros(device, 2 * heads * count)
    counters, out = zeros(device, kv_heads, torch.int32), zeros(device, heads * head_dim)
    records = Records(heads * head_dim, 1, device).buffer
    numbers = np.int32(length), np.float32(1e-5), np.float32(head_dim**-0.5)

    def launch(i: int) -> Callable[[], None]:
        cache = [zeros(device, form.words(kv_heads * length), torch.int32) for _ in range(2)]
        for part in cache:  # zeros would take less power, and clocks would be higher
            form.store(part, 0, torch.randn((length, kv_heads, head_dim), device=part.device))
        arrays = [qkv, qkv, qkv, angles, angles, *cache, state, *work, counters, out]
        arguments = [*(view(array) for array in arrays), records, *numbers]
        return lambda: kernel.launch((kv_heads, count), threads, device.stream(), *arguments)

    nbytes = 8 * form.words(kv_heads * length)
    found = {"nbytes": nbytes, "seconds": seconds_from_memory(launch, nbytes)}
    return found | ({"torch": _torch_attention(nbytes)} if kind == "f16" else {})


def _torch_attention(nbytes: int) -> float:
    """Seconds of torch's attention of one token over as many keys and values, which it finds stored."""
    length, heads, kv_heads, head_dim = ATTENDED
    options: dict[str, Any] = {"dtype": torch.float16, "device": torch_device(require("cuda"))}
    query = torch.randn((1, heads, 1, head_dim), **options)

    def launch(i: int) -> Callable[[], object]:
        keys, values = (torch.randn((1, kv_heads, length, head_dim), **options) for _ in range(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, keys, values, enable_gqa=True)

    return seconds_from_memory(launch, nbytes)


def decode() -> dict[str, Any]:
    """Tokens a second of a synthetic Llama 3 8B in Q4_K, with the host reading each, and of the captured step alone."""
    file: Any = SyntheticFile()
    begun = time.perf_counter()
    decoder = Decoder(file, read_config(file.metadata, file.path), CONTEXT, "f16", "int8", str(require("cuda")))
    decoder.prepare()
    found: dict[str, Any] = {"file": file.nbytes, "upload": time.perf_counter() - begun}
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
        found[name] = {"tokens_per_second": DECODED / (time.perf_counter() - first), "prompt_seconds": first - start}
        stream.close()
    found["step_seconds"] = _step(decoder, short)
    if decoder.dependent:
        decoder.dependent = False
        decoder.build()
        found["step_seconds, one after the other"] = _step(decoder, short)
    return found


def _step(decoder: Any, position: int) -> float:
    """Seconds of the captured step."""
    torch.cuda.synchronize()
    decoder._set_state(position, 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(DECODED):
        decoder._captured[None].replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / DECODED

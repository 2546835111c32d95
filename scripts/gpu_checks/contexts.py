"""Attention of one token at the end of a long context: right, and how long it takes, beside torch's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bridge.cuda.attention import attention as attn
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.attention_shape import shape, spans
from bridge.cuda.attention.kv_cache import KVCache, KVForm
from bridge.cuda.attention.prompt_attention import PromptAttention
from bridge.cuda.attention.step_attention import StepAttention
from bridge.cuda.bench import seconds_from_memory
from bridge.cuda.positions import Positions
from bridge.cuda.product.activations import Records
from bridge.cuda.product.products import Vector
from bridge.cuda.toolchain.device import require, view, zeros

from bridge.gguf_file.architectures import Graph
from bridge.runtime.config.decoder_config import DecoderConfig, Heads
from gpu_checks.products import Judge

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama 3 8B
LENGTHS = (8192, 32768)  # positions: its whole context, and beyond
_LIMIT = 1e-4  # relative
CONTEXT, TOKENS = 2500, 100  # positions, and the last ones, which are a prompt
_OF_HALVES = 1e-2  # relative
_OF_KEYS = {"f16": 1e-3, "q8_0": 1e-2, "f32": 1e-6}  # relative, of the new key


class Attention:
    """The attention of the last token of a context of `length`, over random keys and values kept as `kind`."""

    def __init__(self, kind: str, length: int):
        device = self.device = require("cuda")
        self.form, self.length, self.place = KVForm(kind, HEAD_DIM), length, device.place
        group, self.count = HEADS // KV_HEADS, spans(device.multiprocessors, KV_HEADS, length)
        self.kernel = attn.kernel(
            AttentionKind(HEAD_DIM, group, HEAD_DIM, neighbours=True), False, kind, False, device.capability
        )
        self.threads = shape(self.form, group, device.capability).threads
        self.state = zeros(device, attn.STATE, torch.int32)
        self.state[attn.POSITION] = length - 1
        self.qkv = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, device=self.place)
        angles = 6 * torch.rand((length, HEAD_DIM // 2), device=self.place)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.work = zeros(device, HEADS * self.count * HEAD_DIM), zeros(device, 2 * HEADS * self.count)
        self.counters, self.out = zeros(device, KV_HEADS, torch.int32), zeros(device, HEADS * HEAD_DIM)
        self.records = Records(HEADS * HEAD_DIM, 1, device).buffer

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 8 * self.form.words(KV_HEADS * self.length)

    def cache(self) -> list[Any]:
        """Keys and values of all positions; zeros would take less power, and clocks would be higher."""
        parts = [zeros(self.device, self.form.words(KV_HEADS * self.length), torch.int32) for _ in range(2)]
        for part in parts:
            self.form.store(part, 0, torch.randn((self.length, KV_HEADS, HEAD_DIM), device=self.place))
        return parts

    def launcher(self, cache: list[Any]) -> Callable[[], None]:
        """A function that queues the attention over a cache."""
        angles = self.cos.reshape(-1), self.sin.reshape(-1)
        arrays = [*[self.qkv] * 3, *angles, *[self.qkv] * 2, *cache, self.state, *self.work, self.counters, self.out]
        numbers = np.int32(self.length), np.int32(0), *map(np.float32, (1e-5, HEAD_DIM**-0.5, 0))
        arguments = [*(view(array) for array in arrays), self.records, *numbers]
        grid = KV_HEADS, self.count
        return lambda: self.kernel.launch(grid, self.threads, self.device.stream(), *arguments)

    def expected(self, cache: list[Any]) -> tuple[Any, Any]:
        """The result float64 [heads, head_dim] from what the cache holds now; and the new key [kv_heads, head_dim]."""
        q, k, _ = self.qkv.double().reshape(-1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS])
        cos, sin = self.cos[-1].double(), self.sin[-1].double()
        q, k = (
            torch.stack([x[:, ::2] * cos - x[:, 1::2] * sin, x[:, ::2] * sin + x[:, 1::2] * cos], -1).reshape(x.shape)
            for x in (q, k)
        )
        keys, values = (self.form.load(part, self.length, KV_HEADS, torch.float64) for part in cache)
        scores = q.reshape(KV_HEADS, -1, HEAD_DIM) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        return (scores.softmax(-1) @ values).reshape(HEADS, HEAD_DIM), k


def check(kind: str) -> dict[str, Any]:
    """The result at each length, twice as blocks count themselves, and the key that it stores."""
    judge = Judge()
    for length in LENGTHS:
        attention = Attention(kind, length)
        cache = attention.cache()
        launch = attention.launcher(cache)
        for _ in range(2):
            attention.out.fill_(float("nan"))
            launch()
            expected, key = attention.expected(cache)
            what = f"attention over {length} positions in {kind}"
            judge(what, attention.out.reshape(HEADS, -1), expected.cpu().numpy(), _LIMIT)
            stored = attention.form.load(cache[0], length, KV_HEADS, torch.float64)[:, -1]
            judge(f"{what}, its key", stored, key.cpu().numpy(), _OF_KEYS[kind])
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def time(length: str, kind: str) -> dict[str, Any]:
    """Bytes of a layer's keys and values, and seconds of a token's attention: ours, and torch's where it has the form,
    f16, without rotation and storing."""
    attention = Attention(kind, int(length))
    figures = {
        "nbytes": attention.nbytes,
        "seconds": seconds_from_memory(lambda i: attention.launcher(attention.cache()), attention.nbytes),
    }
    return figures | ({"torch": _torch(int(length), attention.nbytes)} if kind == "f16" else {})


def _torch(length: int, nbytes: int) -> float:
    options: dict[str, Any] = {"dtype": torch.float16, "device": require("cuda").place}
    query = torch.randn((1, HEADS, 1, HEAD_DIM), **options)

    def launch(i: int) -> Callable[[], object]:
        keys, values = (torch.randn((1, KV_HEADS, length, HEAD_DIM), **options) for _ in range(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, keys, values, enable_gqa=True)

    return seconds_from_memory(launch, nbytes)


def config(heads: int, kv_heads: int, head_dim: int, windows: str = "", **more: Any) -> DecoderConfig:
    """A model; `windows` has a letter for each layer, w for those with a window."""
    given: dict[str, Any] = {"rotated": head_dim, "graph": Graph(), "windows": tuple(one == "w" for one in windows)}
    return DecoderConfig(
        arch="check", layers=len(windows) or 1, hidden=64, inner=64, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        context=CONTEXT, norm_eps=1e-6, attention_scale=head_dim**-0.5, rope_base=1e4, rope_scaling="none",
        rope_factor=1.0, rope_original_context=CONTEXT, rope_attention_factor=1.0, **given | more,
    )  # fmt: skip


MODELS = {
    "a cap": config(8, 4, 256, "w-", window=500, score_cap=5.0),
    "sinks": config(16, 2, 64, "w-", window=128, graph=Graph(sinks=True)),
    "heads of 512, shared keys": config(
        16, 2, 512, "w-w-", window=512, local_heads=Heads(16, 4, 256, 256), shared_kv=2, graph=Graph(normed=True)
    ),
    "chunks": config(
        10, 2, 128, "w-", window=1024, temperature=0.1, temperature_length=500,
        graph=Graph(neighbours=True, normed=True, norms_rotated=True, chunked=True, unrotated_every=2),
    ),
    "20 heads a key": config(20, 1, 128, rotated=64),
}  # fmt: skip


def check_layers(kv: str) -> dict[str, Any]:
    """Layers that do more than Llama's: a token and a prompt in halves beside a prompt in float32.

    What all do to queries and keys first is one function, which tests prove without a GPU.
    """
    judge, device = Judge(), require("cuda")
    place = device.place
    for name, c in MODELS.items():
        cache = KVCache(c, CONTEXT, kv)
        cache.reserve(device)
        for slot in cache.slots:
            for part in (slot.keys, slot.values):
                slot.form.store(part, 0, torch.randn((CONTEXT, slot.heads, slot.form.head_dim), device=place))
        positions, state = Positions(c, cache.rows, None, device), zeros(device, (1, attn.STATE), torch.int32)
        state[0, attn.POSITION] = CONTEXT - 1
        step = StepAttention(c, cache, positions, state, False, False, device)
        for layer in c.stored:
            heads, own, what = c.heads_of(layer), c.makes_keys(layer), f"{name}, layer {layer}, in {kv}"
            qkv = torch.randn((TOKENS, (c.heads + 2 * heads.kv * own) * heads.dim), device=place)
            norms = [torch.rand(heads.dim, device=place) + 0.5 if c.graph.normed else None for _ in range(1 + own)]
            given = (*norms, None)[:2], torch.randn(c.heads, device=place) if c.graph.sinks else None

            def prompt(exact: bool, n: int, layer: int = layer, qkv: Any = qkv, given: Any = given) -> Any:
                made = PromptAttention(c, cache, positions, exact, device, CONTEXT - n, n)  # noqa: B023  # called here
                return made.attend(layer, qkv[-n:], *given)

            out = Vector(c.heads * heads.dim, device, "int8")
            step.attend(layer, qkv[-1:], out, *given)
            judge(f"a token, {what}", out.floats, prompt(True, 1)[0].cpu().numpy(), _LIMIT)
            judge(f"a prompt, {what}", prompt(False, TOKENS), prompt(True, TOKENS).cpu().numpy(), _OF_HALVES)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}

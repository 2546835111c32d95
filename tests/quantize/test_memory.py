"""The memory that calibrating a decoder layer takes: its weights four times, its largest Hessian three times, and the
activations."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.checkpoint import open_checkpoint
from bridge.quantize import Method, quantize_model, superblocks
from bridge.quantize.model import forward_passes
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.forward_passes import output_hessians
from bridge.quantize.quantizer import LayerHooks
from bridge.quantize.run import needs
from tests.support.tiny_models import save_model

HIDDEN, INNER, TOKENS, HEAD = 256, 1536, 256, 16384


class Live(TorchDispatchMode):
    """The most bytes that torch's tensors (not files' pages) and numpy's arrays have held since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __enter__(self) -> Live:
        tracemalloc.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        tracemalloc.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known | arguments and storage.filename is None:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now + tracemalloc.get_traced_memory()[0])
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def decoder(inner: int, blocks: int = 1) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=inner, num_hidden_layers=blocks, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def calibrate(model: Any) -> int:
    method = Method(superblocks("Q4_K"), sweeps=1)
    tokens = torch.randint(0, 64, (2, TOKENS // 2))
    return len([n for n, _ in quantize_model(model, tokens, lambda x: (method.layer(x)[0], None), cross=True)])


def test_calibrating_a_layer_takes_its_weights_four_times_and_its_hessian_three_times() -> None:
    calibrate(decoder(256))  # the kernels are compiled
    model = decoder(INNER)
    weights = 4 * sum(p.numel() for p in model.model.layers.parameters())
    activations = 4 * TOKENS * (2 * HIDDEN + 4 * INNER)
    with Live() as live:
        assert calibrate(model) == 7
    assert live.now < weights / 4
    assert weights + live.most < 1.2 * (4 * weights + 3 * 4 * INNER**2 + activations)


def test_no_float_block_stays_while_the_next_one_or_the_head_is_quantized() -> None:
    def held(blocks: int) -> list[int]:
        """Bytes that are held when a block's first layer is quantized, and the head."""
        found: list[int] = []
        with Live() as live:

            def quantizer(layer: Any) -> tuple[torch.Tensor, None]:
                if "q_proj" in layer.name or layer.name == "lm_head":
                    found.append(live.now)
                return layer.weight, None

            model = decoder(INNER, blocks)
            found.append(live.now)
            for _ in quantize_model(model, torch.randint(0, 64, (2, TOKENS // 2)), quantizer, cross=True, head=True):
                pass
        return [size - found[0] for size in found[1:]]

    first, second, head = held(2)
    block = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert max(second, head) < first + block / 4


def test_a_head_in_spans_of_rows_takes_the_memory_of_a_span() -> None:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, vocab_size=HEAD
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    method = Method(superblocks("Q4_K"), sweeps=1)
    tokens = torch.randint(0, 64, (2, TOKENS // 2))

    def spans(name: str, rows: int, _step: int) -> list[slice]:
        assert (name, rows) == ("lm_head", HEAD)
        return [slice(at, at + HEAD // 16) for at in range(0, rows, HEAD // 16)]

    def most(count: int, **options: Any) -> int:
        walk = quantize_model(
            model, tokens, lambda x: (method.layer(x)[0], x.rows), cross=True, head=True,
            wanted=lambda name: name == "lm_head", **options,
        )  # fmt: skip
        with Live() as live:
            found = list(walk)
        step = HEAD // 16
        assert found == [("lm_head", None if count == 1 else (i * step, (i + 1) * step, HEAD)) for i in range(count)]
        return live.most

    head = 4 * HEAD * HIDDEN
    others = 16 * 4 * TOKENS * HIDDEN + 16 * 4 * HIDDEN**2
    assert most(1) > 3 * head
    assert most(16, layers=LayerHooks(missing=spans)) < 8 * head / 16 + others


def most_for_gradients(folder: Path, layers: int, on_disk: bool) -> int:
    """The most bytes that gathering A of a model's layers takes."""
    fields = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": layers}
    model = save_model(folder / f"model-{layers}-{on_disk}", "LlamaConfig", vocab_size=64, **fields)
    files = folder / f"files-{layers}-{on_disk}"
    files.mkdir()
    tokens = torch.randint(0, 64, (64, 64), generator=torch.Generator().manual_seed(0))
    with open_checkpoint(model) as checkpoint:
        streamed = FloatModel(checkpoint)
        with Live() as live, ActivationStore(files if on_disk else None) as store:
            found = sum(1 for _ in output_hessians(streamed, tokens, store))
        assert found == 7 * layers + 1  # with the embeddings
        assert all(p.is_meta for p in streamed.model.parameters())
    assert not list(files.iterdir())
    return live.most


def test_gathering_gradients_takes_the_memory_of_one_block_however_many_there_are(tmp_path: Path) -> None:
    two, eight = (most_for_gradients(tmp_path, layers, True) for layers in (2, 8))
    activations = 4 * 64 * 64 * 64  # between two blocks
    assert eight < two + activations
    assert most_for_gradients(tmp_path, 8, False) > eight + 5 * activations


RESIDENT = """
import argparse, os
import numpy as np
from bridge.cli.options import calibration

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

calibration(argparse.Namespace(text="text.txt"), None)
np.ones(31 << 20, np.uint8)  # freed: glibc's own threshold rises
begin = resident()
kept = []
for _ in range(16):
    kept += [np.ones(16 << 20, np.uint8), np.ones(1 << 18, np.uint8)]  # a matrix, and what stands above it on the heap
held = resident() - begin
kept = kept[1::2]
print(held >> 20, resident() - begin >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such threshold")
def test_a_commands_freed_matrices_go_back_to_the_system() -> None:
    def resident(**variables: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        )
        return [int(x) for x in done.stdout.split()]

    held, left = resident()
    assert held >= 60 > 16 > left
    assert resident(MALLOC_MMAP_THRESHOLD_="33554432")[1] > 40  # a threshold that is given stays


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "sequences", "inner", "vocabulary"),
    [
        *(("cross", 8, 1024, 512), ("plain", 8, 1024, 512), ("cross", 1, 2048, 512)),
        *(("head", 1, 256, 16384), ("gradients", 8, 1024, 512), ("gradients", 4, 256, 16384)),
    ],
)
def test_the_peak_is_what_is_counted_before_the_start(
    what: str, sequences: int, inner: int, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(decoder(256))  # the kernels are compiled
    fields = {"hidden_size": 256, "intermediate_size": inner, "head_dim": 64, "num_hidden_layers": 1}
    path = save_model(tmp_path / "model", "LlamaConfig", vocab_size=vocabulary, **fields)
    tokens = torch.randint(0, 300, (sequences, 128), generator=torch.Generator().manual_seed(0))
    for module in (forward_passes, needs):
        monkeypatch.setattr(module, "LOGITS", 1 << 20)
    method = Method(superblocks("Q4_K"), sweeps=0)
    cross = what in ("cross", "head")
    with open_checkpoint(path) as checkpoint:
        model = FloatModel(checkpoint)
        bits = dict.fromkeys([*model.linears(), model.head()[0]], 4.5)
        settings: Any = SimpleNamespace(
            cross=cross, two_sided=what == "gradients", needs_gradients=what == "gradients", sweeps=2
        )
        job = needs.Job(model, (sequences, 128), bits, settings)
        sizes = needs._Sizes(job)
        with Live() as live, ActivationStore(None) as store:
            if what == "gradients":
                expected = sizes.gradients() + sizes.activations_of_gradients()
                for _ in output_hessians(model, tokens, store):
                    pass
            else:
                expected = max(sizes.layers(), sizes.head()) + sizes.activations()
                head = model.head()[0]
                walk = quantize_model(
                    model, tokens, lambda x: (method.layer(x)[0], None), cross=cross, batch=32, head=what == "head",
                    wanted=lambda name: (name == head) == (what == "head"),
                )  # fmt: skip
                for _ in walk:
                    pass
    print(f"{what} {sequences} {inner} {vocabulary}: {live.most / 1e6:.1f} of {expected / 1e6:.1f} MB")
    assert 0.85 < live.most / expected < 1.15

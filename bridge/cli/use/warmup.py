"""`gguf-bridge warmup`: kernels are compiled now, for instance while an image of a container is built."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.cli.options import as_flag, command, further
from bridge.cli.use.run import add_loading, gguf_of, load
from bridge.errors import BridgeError
from bridge.system.kernels import compiling

if TYPE_CHECKING:
    from bridge.blocks.base import BlockType

_WIDTHS = 2, 3, 9, 16  # tokens of prompts that take kernels of all widths


def add_parser(commands: Any) -> None:
    p = command(commands, "warmup", run)
    p.add_argument(
        "model", nargs="?",
        help="GGUF to run, or checkpoint to convert and run; without one, what rounds to each type and multiplies it",
    )  # fmt: skip
    further(p).add_argument(
        "--config", metavar="DIR", type=Path, help="folder with the config.json and tokenizer of a bare .pt"
    )
    add_loading(p)


def run(a: argparse.Namespace) -> int:
    steps, before = compiling.steps(), compiling.seconds()
    if a.model is None:
        _check_unasked(a)
        from bridge.blocks.read import READ

        _types(READ)
    else:
        _model(load(a, gguf_of(a), a.context))
    done = f"compiled in {compiling.seconds() - before:.0f} s" if compiling.steps() > steps else "were compiled before"
    print(f"the kernels for this CPU {done}")
    return 0


def _check_unasked(a: argparse.Namespace) -> None:
    """BridgeError where an option was given that loads a model."""
    loading = argparse.ArgumentParser()
    add_loading(loading)
    for name, default in {**vars(loading.parse_args([])), "config": None}.items():
        if getattr(a, name) != default:
            raise BridgeError(f"{as_flag(name)} is for a model: name one, or leave the option out")


def _model(model: Any) -> None:
    """Prompts and tokens, before and after the weights are repacked."""
    from bridge.runtime.cpu.ops import attention

    for _ in range(2):
        for width in _WIDTHS:
            model.logits([0] * min(width, model.context), last=1)
        list(model.generate_tokens([0], min(3, model.context - 1)))
        model.prepare()
    attention.function("merge", "f16")  # for contexts of more than a span, whatever the kind of cache


def _types(blocks: Mapping[str, "BlockType"]) -> None:
    """Random floats are rounded to each type that floats are rounded to, and every type is multiplied."""
    from bridge.blocks.read import WRITTEN
    from bridge.encode.rounding.round_rows import quantize_rows
    from bridge.runtime.quant_tensor import QuantTensor

    x = np.random.default_rng(0).standard_normal((max(_WIDTHS), 512)).astype(np.float32)
    for name, block in blocks.items():
        rounded = name in WRITTEN and not block.scales
        data = quantize_rows(x, block).data if rounded else np.zeros(x.size // block.size * block.nbytes, np.uint8)
        tensor = QuantTensor(name, name, x.shape, data)
        for _ in range(2):
            for width in (1, *_WIDTHS):
                tensor.matmul(x[:width])
            tensor.rows([0])
            tensor.prepare()

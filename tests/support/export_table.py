"""The table of docs/both-directions.md on what `export` carries: a layer of every block type in every format, made of
floats, of a checkpoint's integers, or of random blocks.

    python -m tests.support.export_table
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bridge.blocks import BLOCKS
from bridge.blocks.read import READ
from bridge.checkpoint.formats.registry import EXPORTED, FORMATS
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.conversion.checkpoints.block_layer import BlockLayer
from bridge.conversion.checkpoints.layer_plan import EXACT
from bridge.conversion.gguf_input.gguf_source import SourceTensor
from bridge.conversion.planning.options import PlanOptions
from bridge.models.outline import Part
from bridge.runtime.bench import random_tensor
from tests.support import convert_table, repack_table
from tests.support.repack_table import COLUMNS, NAME, save, weight

SHOWN = [name for name in EXPORTED if name != "gptq"]  # of which the same becomes as of gptq_v2
HEAD = f"| GGUF type | {' | '.join(f'`{name}`' for name in SHOWN)} |".replace("`gptq_v2`", "`gptq`, `gptq_v2`")
_ROWS = 64


def _of_floats(folder: Path, type: str) -> SourceTensor:
    save(folder, {f"{NAME}.weight": weight()}, None)
    return convert_table.converted(folder, PlanOptions(tensor_types={"ffn_down": type}))[1]


def _of_integers(folder: Path, bits: int) -> SourceTensor:
    convert_table.write_packed(folder, bits, sym=False)
    return convert_table.converted(folder, PlanOptions())[1]


def _ternary(folder: Path) -> SourceTensor:
    repack_table.SOURCES["BitNet"](folder)
    return convert_table.converted(folder, PlanOptions())[1]


def _random(folder: Path, type: str) -> SourceTensor:
    folder.mkdir()
    blocks = random_tensor(type, _ROWS, COLUMNS).raw.reshape(_ROWS, -1)
    return convert_table.in_gguf(folder, Part(f"{NAME}.weight", (_ROWS, COLUMNS)), type, blocks)


SOURCES: dict[str, Callable[[Path], SourceTensor]] = {
    **{f"Q{bits}_K of integers": partial(_of_integers, bits=bits) for bits in (2, 4, 5)},
    **{type: partial(_of_floats, type=type) for type in BLOCKS},
    "TQ2_0": _ternary,
    **{type: partial(_random, type=type) for type in READ if type not in (*BLOCKS, "TQ2_0")},
}


def words(source: SourceTensor, written: WrittenFormat) -> str:
    """What becomes of a layer: a cell of the table."""
    layer = BlockLayer.of(source, written)
    plan = layer.plan()
    if plan is None:
        return "-"
    how = plan.how
    if how == EXACT:
        runs = ((layer.codes(plan, rows, ReusedArrays()), rows) for rows in layer.runs(plan))
        how = "codes" if any(layer.squared_errors(plan, codes, rows)[0] for codes, rows in runs) else EXACT
    return f"{how} {plan.groups.bits}"


def rows() -> list[str]:
    """A row for all types of which the same becomes."""
    names: dict[str, list[str]] = {}
    for name, make in SOURCES.items():
        with tempfile.TemporaryDirectory() as scratch:
            source = make(Path(scratch) / "layer")
            cells = {format: words(source, FORMATS[format]) for format in EXPORTED}
            assert cells["gptq"] == cells["gptq_v2"]
            names.setdefault(" | ".join(cells[format] for format in SHOWN), []).append(name)
    return [f"| {', '.join(alike)} | {cells} |" for cells, alike in names.items()]


if __name__ == "__main__":
    print(HEAD, "|---" * (1 + len(SHOWN)) + "|", *rows(), sep="\n")

"""Popular quantized repositories, by their headers (tests/data/corpus, see `tests.support.corpus`): each is planned, or
refused, as it was.

A new case needs all but "plan" and "refused": the failing test shows what they should be.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.matrix_scales import with_scales
from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.support.corpus import unfold

CASES = sorted((ROOT / "tests/data/corpus").glob("*.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


def plan_lines(plan: Plan) -> list[str]:
    """A line for the tokenizer, one for each kind of tensor, and the notes, with numbers of layers left out."""
    said = plan.metadata
    tokenizer = [str(said[f"tokenizer.ggml.{key}"].value) for key in ("model", "pre")]
    kinds = Counter(tensor_line(t) for t in plan.tensors)
    return [
        f"{plan.arch}, tokens {' '.join(tokenizer)}, stop {' '.join(plan.stop)}",
        *(f"{count} {line}" for line, count in kinds.items()),
        *(f"note: {note}" for note in plan.notes if not note.startswith("the tokenizer has ")),  # it is a small one
    ]


def tensor_line(tensor: PlannedTensor) -> str:
    kind = tensor.kind + (".bias" if tensor.name.endswith(".bias") else "")
    line = f"{kind} {'x'.join(map(str, tensor.shape))} {tensor.type}"
    if tensor.data is not None:
        return f"{line}, made of {len(tensor.data)} values"
    parts = f", of {len(tensor.parts)} parts" if len(tensor.parts) > 1 else ""
    part = tensor.parts[-1]
    matrix = f", matrix {part.matrix}" if part.matrix is not None else ""
    return f"{line}{parts}{matrix}{order('rows', part.rows)}{order('columns', part.columns)}"


def order(what: str, taken: np.ndarray | None) -> str:
    """The first and the last of an order, and a number that another order hardly has."""
    if taken is None:
        return ""
    check = int(taken @ np.arange(len(taken)) % 9973)
    return f", {what} {','.join(map(str, taken[:3]))}..{taken[-1]} ({check})"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_repository_is_planned_as_it_was(case: Path, folder: Path) -> None:
    record: dict[str, Any] = json.loads(case.read_text(encoding="utf-8"))
    unfold(record, folder)
    found: dict[str, Any] = {}
    try:
        plan = plan_checkpoint(folder, type=record.get("type", "auto"))
        with open_checkpoint(folder) as ckpt:
            found["plan"] = plan_lines(with_scales(ckpt, plan))
    except BridgeError as refused:
        found["refused"] = str(refused).replace(str(folder), "model")
    assert found == {key: record[key] for key in ("plan", "refused") if key in record}

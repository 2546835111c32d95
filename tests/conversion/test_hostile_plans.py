"""Plans that somebody wrote or damaged: each is refused in a line or executed, and none asks for much memory."""

from __future__ import annotations

import copy
import json
import random
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.errors import BridgeError
from bridge.runtime.reader import open_gguf
from tests.conftest import CHECKPOINT
from tests.support.encode_fp4 import write_modelopt

Record = dict[str, Any]
KEPT = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight", "token_embd.weight")
HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1.5, float("nan"), float("inf"), "", "x", "\ud800", "\0", "a\nb",
    "é" * 40, "m" * 5000, [], {}, [[]], [1], [-1], [1.5], ["x"], [2**40, 2**40], {"a": 1}, [[[[[[1]]]]]],
]  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A plan of few tensors: codes with rows in an order of their own, floats, and values of no checkpoint."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan_checkpoint(CHECKPOINT, out=path)
    plan: Record = json.loads(path.read_text())
    plan["tensors"] = [t for t in plan["tensors"] if t["name"] in KEPT]
    embeddings, q = (tensor(plan, name) for name in ("token_embd.weight", "blk.0.attn_q.weight"))
    embeddings["parts"][0] |= {"shape": [8, 256], "rows": 1, "stored": embeddings["shape"]}  # a few: it is quick
    embeddings["shape"] = [8, 256]
    q["parts"][0]["rows"] = 0
    plan["orders"] = [list(reversed(range(q["shape"][0]))), list(range(8))]
    values = {"name": "rope_freqs.weight", "type": "F32", "origin": "config", "shape": [4], "values": [1, 2, 3.5, 1e30]}
    plan["tensors"].append(values)
    plan["notes"], plan["curve"] = ["a note"], [[1000, 0.5]]
    for key in ("tokens", "token_type"):
        del plan["metadata"][f"tokenizer.ggml.{key}"][1][9:]
    del plan["metadata"]["tokenizer.ggml.merges"]
    return plan


@contextmanager
def little_memory(more: int = 4 << 30) -> Iterator[None]:
    """Fail what asks for `more` bytes, even if it never touches them."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def execute(plan: Record, folder: Path) -> str | None:
    """What refuses the plan; None where it is executed. Anything but a BridgeError is raised."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    try:
        made = bridge.convert(CHECKPOINT, folder / "m.gguf", plan=path, force=True, modelfile=True).outputs
    except BridgeError as refusal:
        assert not [*folder.glob("*.gguf")]
        return str(refusal)
    open_gguf(made[0]).close()  # which checks all that is in the heads
    for file in made:
        file.unlink()
    return None


def tensor(plan: Record, name: str) -> Record:
    found: Record = next(t for t in plan["tensors"] if t["name"] == name)
    return found


def test_the_plan_that_is_changed_below_is_executed(record: Record, tmp_path: Path) -> None:
    assert execute(record, tmp_path) is None


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value; of a list, to its first and last items."""
    if path:
        yield path
    if isinstance(node, dict):
        for key in node:
            yield from places(node[key], (*path, key))
    elif isinstance(node, list):
        whole = path in ((), ("tensors",)) or len(node) < 5
        for i in range(len(node)) if whole else (0, len(node) - 1):
            yield from places(node[i], (*path, i))


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        node = node[step]
    return node


def changed(plan: Record, rng: random.Random) -> tuple[str, Record]:
    """The plan with one value replaced, removed or repeated, and what was done."""
    plan = copy.deepcopy(plan)
    found = list(places(plan))
    kinds = [[p for p in found if p[0] == part] for part in ("metadata", "tensors", "tensors")]
    path = rng.choice(rng.choice([*kinds, [p for p in found if p[0] not in ("metadata", "tensors")]]))
    holder, last = at(plan, path[:-1]), path[-1]
    how = rng.choice(("replaced", "replaced", "replaced", "made another's", "removed", "repeated"))
    if how == "removed":
        del holder[last]
    elif how == "repeated" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[last]))
    else:
        value = at(plan, rng.choice(kinds[1])) if how == "made another's" else rng.choice(HOSTILE)
        holder[last] = copy.deepcopy(value)
        how += f": {reprlib.repr(value)}"
    return f"{'.'.join(map(str, path))} {how}", plan


def test_no_change_of_one_value_ends_in_anything_but_a_refusal(record: Record, tmp_path: Path) -> None:
    rng = random.Random(16)
    refused = 0
    with little_memory():
        for _ in range(600):
            what, plan = changed(record, rng)
            try:
                refused += execute(plan, tmp_path) is not None
            except Exception as problem:
                pytest.fail(f"{what}: {type(problem).__name__}: {problem}")
    assert 300 < refused < 590


Q, DOWN, NORM, EMBEDDINGS, FREQS = KEPT[0], KEPT[1], KEPT[2], KEPT[3], "rope_freqs.weight"
WRONG: dict[str, tuple[Callable[[Record], Any], str]] = {
    "a name twice": (lambda p: p["tensors"].append(p["tensors"][0]), r"is there twice"),
    "a name that is no text": (lambda p: p["tensors"][0].update(name=5), r"tensor 0: name is 5, must be a text"),
    "a long name": (lambda p: p["tensors"][0].update(name="m" * 64), r"must be printable, of 1 to 63 bytes"),
    "a control character": (lambda p: p["tensors"][0].update(name="\x1b[2J"), r"must be printable"),
    "floats in a shape": (lambda p: tensor(p, Q).update(shape=[512.0, 256]), r"shape's item is 512.0"),
    "texts in a shape": (lambda p: tensor(p, Q).update(shape=["512", 256]), r"shape's item is '512'"),
    "a large shape": (lambda p: tensor(p, Q).update(shape=[10**9, 256]), r"parts do not make up \[1000000000, 256\]"),
    "a large tensor": (lambda p: larger(p, Q), r"q_proj.weight has shape"),
    "rows over and over": (lambda p: repeated(p, Q), r"repeats the rows of .*q_proj.weight"),
    "five dimensions": (lambda p: tensor(p, FREQS).update(shape=[1, 1, 1, 1, 4]), r"at most 4 dimensions"),
    "values of another number": (lambda p: tensor(p, FREQS).update(shape=[10**10]), r"has 4 values for the shape"),
    "values that are texts": (lambda p: tensor(p, FREQS).update(values=["1", "2", "3", "4"]), r"values' item is '1'"),
    "values of another type": (lambda p: tensor(p, FREQS).update(type="F16"), r"values are F32"),
    "no parts": (lambda p: tensor(p, Q).update(parts=[]), r"must be a list that is not empty"),
    "no tensors": (lambda p: p.update(tensors=[]), r"tensors is \[\], must be a list that is not empty"),
    "a vector of blocks": (lambda p: tensor(p, NORM).update(type="Q4_K"), r"a vector cannot be Q4_K"),
    "a module squeezed": (lambda p: part(p, Q).update(change="squeezed"), r"is quantized, it has no 'squeezed'"),
    "a module's exponential": (lambda p: part(p, Q).update(change="-exp"), r"is quantized, it has no '-exp'"),
    "a matrix of a module": (lambda p: part(p, Q).update(matrix=0), r"is quantized, it has no matrix 0"),
    "a matrix beyond": (lambda p: part(p, EMBEDDINGS).update(matrix=5000), r"has no matrix 5000"),
    "a vector transposed": (lambda p: part(p, NORM).update(change="transposed"), r"only a matrix can be transposed"),
    "orders from the end": (lambda p: part(p, Q).update(rows=-1), r"rows of .* is -1, must be a whole number"),
    "floats carried": (lambda p: tensor(p, EMBEDDINGS).update(how="carried"), r"cannot become .* 'carried'; choose ro"),
    "codes rounded": (lambda p: tensor(p, Q).update(how="rounded"), r"'rounded'; choose carried or requantized"),
    "another origin": (lambda p: tensor(p, FREQS).update(origin="scale"), r"unknown origin 'scale'"),
    "no such template": (lambda p: tensor(p, NORM).update(origin="template"), r"the template, which has no such"),
    "an imatrix that is a list": (lambda p: p.update(imatrix=["x"]), r"imatrix is \['x'\], must be a path"),
    "a path too long": (lambda p: p.update(template="m" * 5000), r"cannot be opened|File name too long"),
    "a path with a zero": (lambda p: p.update(imatrix="a\0b"), r"must be a path"),
    "a number too large": (lambda p: p["metadata"].update({"a": ["UINT8", 256]}), r"'a': the value is 256, must be UI"),
    "a text for a number": (lambda p: p["metadata"].update({"a": ["UINT32", "4"]}), r"'a': the value is '4'"),
    "a number for a text": (lambda p: p["metadata"].update({"a": ["STRING", 4]}), r"'a': the value is 4, must be a te"),
    "half a character": (lambda p: p["metadata"].update({"a": ["STRING", "\ud800"]}), r"must be a text"),
    "a mixed array": (lambda p: p["metadata"].update({"a": ["ARRAY", [1, "x"], "INT32"]}), r"value is 'x'"),
    "a text for an array": (lambda p: p["metadata"].update({"a": ["ARRAY", "xy", "STRING"]}), r"must be a list"),
    "another alignment": (lambda p: p["metadata"].update({"general.alignment": ["UINT32", 64]}), r"the file's own"),
    "layers in words": (lambda p: p["metadata"].update({"qwen3.block_count": ["STRING", "4"]}), r"must be a whole nu"),
    "no architecture": (lambda p: p["metadata"].pop("general.architecture"), r"must have general.architecture"),
}  # fmt: skip


def part(plan: Record, name: str) -> Record:
    found: Record = tensor(plan, name)["parts"][0]
    return found


def larger(plan: Record, name: str) -> None:
    """More rows than the checkpoint has."""
    tensor(plan, name)["shape"] = [10**9, 256]
    part(plan, name)["shape"] = [10**9, 256]
    del part(plan, name)["rows"]


def repeated(plan: Record, name: str) -> None:
    """One matrix again and again: a small plan of a file that fills the disk."""
    tensor(plan, name)["shape"] = [256 * 10_000, 256]
    tensor(plan, name)["parts"] *= 10_000


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_plan_is_said(case: str, record: Record, tmp_path: Path) -> None:
    change, message = WRONG[case]
    plan = copy.deepcopy(record)
    change(plan)
    with little_memory():
        refusal = execute(plan, tmp_path)
    assert refusal is not None
    assert re.search(message, refusal), refusal


def test_a_scale_that_conversion_makes_may_not_be_in_the_plan(small_model: Path, tmp_path: Path) -> None:
    write_modelopt(tmp_path / "nvfp4", small_model)
    plan_checkpoint(tmp_path / "nvfp4", out=tmp_path / "plan.json")
    plan: Record = json.loads((tmp_path / "plan.json").read_text())
    scale = {"name": "blk.0.ffn_down.scale", "type": "F32", "origin": "config", "shape": [1], "values": [1]}
    plan["tensors"].append(scale)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(BridgeError, match=r"blk.0.ffn_down.scale: is in the plan, but made when blk.0.ffn_down.weight"):
        bridge.convert(out=tmp_path / "m.gguf", plan=tmp_path / "plan.json")

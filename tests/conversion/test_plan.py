"""Plans: what inspect shows and convert executes, as a file that can be edited and shared out."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.cli import main
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.plan_file import _part_entry
from bridge.conversion.planning.plan_reader import _part, load_plan
from bridge.conversion.writing.report import CARRIED, REQUANTIZED
from bridge.conversion.writing.verify import failures
from bridge.errors import BridgeError
from bridge.models.outline import Part
from bridge.system.fields import FieldError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT, checkpoint_names, shared
from tests.support.encode import write_gptq
from tests.support.tiny_models import save_model

SPLIT = 800_000


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", str(CHECKPOINT), "-o", str(path), "--split-max-size", str(SPLIT)]) == 0
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The shards of a run of the whole, without a plan file."""
    out = tmp_path_factory.mktemp("whole") / "m.gguf"
    return bridge.convert(CHECKPOINT, out, split_max_size=SPLIT).outputs


def edited(plan_file: Path, path: Path, change: Any) -> Path:
    record = json.loads(plan_file.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("name", "type"),
    [("own", "auto"), ("own", "exact"), ("own", "Q3_K_M"), *((name, "auto") for name in checkpoint_names())],
)
def test_convert_makes_what_the_plan_says(name: str, type: str, tmp_path: Path) -> None:
    folder = CHECKPOINT if name == "own" else shared(f"checkpoints/{name}")
    plan = plan_checkpoint(folder, type=type)
    report = bridge.convert(folder, tmp_path / "m.gguf", type=type)
    assert [(t.name, t.type) for t in plan.tensors] == [(t.name, t.type) for t in report.tensors]
    stored = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert [(t.name, t.tensor_type.name, int(t.n_bytes)) for t in stored] == [
        (t.name, t.type, t.nbytes) for t in plan.tensors
    ]


def test_a_plan_says_which_tensors_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(CHECKPOINT)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("ffn_down"))
    assert row.split() == ["ffn_down", "4", "256x768", "Q4_K", "4.50", "codes", "carried"]
    assert "qwen3: 3.7 M weights, 2.3 MB" in said


def test_shards_by_themselves_are_those_of_a_run_of_the_whole(
    plan_file: Path, whole: list[Path], tmp_path: Path
) -> None:
    count = len(whole)
    assert count > 2
    for i in reversed(range(1, count + 1)):
        out = tmp_path / "m.gguf"
        assert main(["convert", "--plan", str(plan_file), str(out), "--shard", f"{i}/{count}"]) == 0
    made = sorted(tmp_path.iterdir())
    assert [p.name for p in made] == [p.name for p in whole]
    assert [p.read_bytes() for p in made] == [p.read_bytes() for p in whole]


def test_a_plan_of_a_whole_file_makes_the_same_bytes(plan_file: Path, tmp_path: Path) -> None:
    path = edited(plan_file, tmp_path / "plan.json", lambda record: record.update(split_max_size=None))
    bridge.convert(out=tmp_path / "planned.gguf", plan=path)
    bridge.convert(CHECKPOINT, tmp_path / "direct.gguf")
    assert (tmp_path / "planned.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()
    with LlamaCpp(tmp_path / "planned.gguf") as model:
        assert model.generate_greedy([1, 2, 3], 2)


@pytest.mark.parametrize(
    "name",
    ["llama-gptq-4bit-g128-asym-actorder", "llama-gptq-4bit-g128-sym", "qwen3-gptq-4bit-g64-asym-actorder"],
)
def test_row_and_column_orders_survive_the_file(name: str, tmp_path: Path) -> None:
    folder = shared(f"checkpoints/{name}")
    plan_checkpoint(folder, out=tmp_path / "plan.json")
    bridge.convert(folder, tmp_path / "planned.gguf", plan=tmp_path / "plan.json")
    bridge.convert(folder, tmp_path / "direct.gguf")
    assert (tmp_path / "planned.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()


def test_what_a_template_keeps_is_read_from_it_again(tmp_path: Path) -> None:
    template = tmp_path / "template.gguf"
    bridge.convert(CHECKPOINT, template, tensor_types=[(".*", "F16")])
    reader = gguf.GGUFReader(template)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen3")
    for key, value in reader.fields.items():
        if key.startswith(("qwen3.", "tokenizer.")):
            kind, *sub = value.types
            writer.add_key_value(key, value.contents(), kind, sub[0] if sub else None)
    for t in reader.tensors:
        data = np.ones_like(t.data) if t.name == "blk.1.ffn_norm.weight" else t.data
        writer.add_tensor(t.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plan_checkpoint(CHECKPOINT, template=tmp_path / "odd.gguf", out=tmp_path / "plan.json")
    report = bridge.convert(CHECKPOINT, tmp_path / "planned.gguf", plan=tmp_path / "plan.json")
    bridge.convert(CHECKPOINT, tmp_path / "direct.gguf", template=tmp_path / "odd.gguf")
    assert (tmp_path / "planned.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()
    assert any("blk.1.ffn_norm.weight: taken from the template" in note for note in report.notes)


def test_a_type_that_was_edited_is_made(plan_file: Path, tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["split_max_size"] = None
        for t in record["tensors"]:
            if t["name"] == "blk.0.ffn_up.weight":
                t["type"] = "Q2_K"
            if t["name"] == "blk.0.ffn_gate.weight":
                t["type"] = "F16"

    report = bridge.convert(out=tmp_path / "m.gguf", plan=edited(plan_file, tmp_path / "plan.json", change))
    types = {t.name: t.type for t in report.tensors}
    assert types["blk.0.ffn_up.weight"] == "Q2_K"
    assert types["blk.0.ffn_gate.weight"] == "F16"
    # the plan's limit was that of codes carried: what is beyond it is said, and done
    assert any("blk.0.ffn_up.weight: adds" in n and "the plan allows 1%" in n for n in report.notes)


def rows_that_deceive(folder: Path, model_folder: Path) -> str:
    """A checkpoint with one matrix whose sampled rows are symmetric; the others have scales and zeros all over."""
    write_gptq(folder, model_folder, bits=5, group_size=32, sym=True, checkpoint_format="gptq_p")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj"
    zeros = weights[f"{name}.qzeros"].copy()
    scales = weights[f"{name}.scales"].copy()
    rng = np.random.default_rng(0)
    for start, stop in ((32, 352), (416, 736)):  # the first, middle and last 32 rows stay
        words = zeros[:, start // 32 * 5 : stop // 32 * 5]  # five words hold 32 rows
        words[:] = rng.integers(0, 1 << 31, words.shape)
        scales[:, start:stop] *= (0.5 ** rng.uniform(0, 4, scales[:, start:stop].shape)).astype(np.float16)
    parts = {f"{name}.qzeros": zeros, f"{name}.scales": scales}
    save_file(weights | parts, folder / "model.safetensors", {"format": "pt"})
    return "blk.0.ffn_gate.weight"


def test_a_type_that_holds_for_sampled_rows_alone_is_chosen_again(small_model: Path, tmp_path: Path) -> None:
    name = rows_that_deceive(tmp_path / "gptq", small_model)
    planned = {t.name: t for t in plan_checkpoint(tmp_path / "gptq").tensors}
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf")
    made = {t.name: t for t in report.tensors}
    assert planned[name].type == "Q5_K"
    assert made[name].type != "Q5_K"
    assert made[name].fidelity is not None
    assert made[name].fidelity.share <= 0.01
    assert {n: t.type for n, t in made.items() if n != name} == {n: t.type for n, t in planned.items() if n != name}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gptq", "m.gguf"]
    stored = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert stored == {n: t.type for n, t in made.items()}
    assert not failures(bridge.verify(tmp_path / "m.gguf", tmp_path / "gptq"))
    with LlamaCpp(tmp_path / "m.gguf") as model:
        assert model.generate_greedy([1, 2, 3], 2)


def test_a_type_that_is_chosen_again_changes_the_table_of_its_shard_alone(small_model: Path, tmp_path: Path) -> None:
    name = rows_that_deceive(tmp_path / "gptq", small_model)
    whole = bridge.convert(tmp_path / "gptq", tmp_path / "whole.gguf")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", split_max_size=60_000)
    assert len(report.outputs) > 2
    tensors = {t.name: t for file in report.outputs for t in gguf.GGUFReader(file).tensors}
    expected = {t.name: t for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors}
    assert {n: t.tensor_type for n, t in tensors.items()} == {n: t.tensor_type for n, t in expected.items()}
    assert {t.name: t.type for t in whole.tensors}[name] != "Q5_K"
    assert all(np.array_equal(t.data, expected[n].data) for n, t in tensors.items())


def test_each_part_says_what_happens_to_it(small_model: Path, tmp_path: Path) -> None:
    """And convert does that: what is edited is decided anew, what is written is obeyed."""
    plan = plan_checkpoint(CHECKPOINT, tensor_types=[("ffn_up", "Q2_K"), ("ffn_gate", "F16")])
    how = {t.kind: set(t.how) for t in plan.tensors}
    assert how["ffn_down"] == how["attn_q"] == {"carried"}
    assert how["ffn_up"] == how["ffn_gate"] == {"requantized"}
    assert (how["token_embd"], how["attn_norm"]) == ({"rounded"}, {"as it came"})
    path = tmp_path / "plan.json"
    plan_checkpoint(CHECKPOINT, out=path)
    record = json.loads(path.read_text())
    for entry in record["tensors"]:
        if "ffn_down" in entry["name"]:
            entry["how"] = "requantized"
    path.write_text(json.dumps(record))
    outcomes = {t.kind: t.outcome for t in bridge.convert(out=tmp_path / "m.gguf", plan=path).tensors}
    assert (outcomes["ffn_down"], outcomes["ffn_up"]) == (REQUANTIZED, CARRIED)


def nothing(_record: dict[str, Any]) -> None:
    pass


def first_tensor(key: str, value: Any) -> Any:
    def change(record: dict[str, Any]) -> None:
        record["tensors"][0][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (first_tensor("type", "Q9_K"), [], r"tensor token_embd.weight: .*'Q9_K': choose one of Q"),
        (first_tensor("shape", [2048, 250]), [], r"tensor token_embd.weight: .*rows of 250"),
        (first_tensor("parts", [{"source": "x"}]), [], r"tensor token_embd.weight: .*'shape'"),
        (
            first_tensor("parts", [{"source": "x.weight", "shape": [2048, 256]}]),
            [],
            "has no x.weight; the plan is of",
        ),
        (lambda r: r["tensors"][0]["parts"][0].update(rows=0), [], "rows of model.embed_tokens.weight are not 2048"),
        (lambda r: r["metadata"].update({"a.b": ["INT33", 1]}), [], r"the key 'a.b': .*INT33"),
        (lambda r: r.update(split_max_size=0), [], "split_max_size is 0"),
        (lambda r: r.update(gguf_bridge_plan=1), [], "is not a plan of this version"),
        (lambda r: r.pop("orders"), [], "'orders'"),
        (
            first_tensor("how", "carried twice"),
            [],
            r"tensor token_embd.weight: .*how is 'carried twice', not one of carried, re",
        ),
        (first_tensor("how", ["rounded", "rounded"]), [], r"tensor token_embd.weight: .*not one of .* for each part"),
        (nothing, ["--shard", "3/12"], "--shard 3/12: the plan makes 3 shards, 1/3 to 3/3"),
        (nothing, ["--shard", "0/3"], "--shard 0/3: the plan makes 3 shards"),
        (nothing, ["--shard", "three"], "'three' is not I/N such as 3/12"),
        (nothing, ["--type", "Q4_K"], "a plan defines types"),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused_in_a_line(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, options: list[str], message: str
) -> None:
    path = edited(plan_file, tmp_path / "plan.json", lambda r: (r.update(orders=[[0, 5000]]), change(r)))
    assert main(["convert", "--plan", str(path), str(tmp_path / "m.gguf"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_shard_needs_a_plan(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="shard needs plan, which defines the shards"):
        bridge.convert(CHECKPOINT, tmp_path / "m.gguf", shard=(1, 2))


def test_a_plan_is_a_line_for_each_tensor(plan_file: Path) -> None:
    lines = plan_file.read_text().splitlines()
    (line,) = [line for line in lines if line.startswith('{"name": "blk.0.attn_q.weight"')]
    assert '"type": "Q4_K", "how": "carried", "reason": "codes carried"' in line
    plan, checkpoint = load_plan(plan_file)
    assert checkpoint == str(CHECKPOINT)
    assert plan.split_max_size == SPLIT


def test_threads_that_the_system_refuses_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for work in (lambda: bridge.convert(CHECKPOINT, tmp_path / "other.gguf"), lambda: plan_checkpoint(CHECKPOINT)):
            with pytest.raises(BridgeError, match="the system starts no more threads for this user"):
                work()
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_a_head_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "Small", "Gemma2Config", num_hidden_layers=1, tie_word_embeddings=False)
    with pytest.raises(BridgeError, match="lm_head: gguf's names of gemma2 have no place for it"):
        plan_checkpoint(model)


def test_factors_of_rows_come_back_from_a_plans_file() -> None:
    part = Part("a.weight", (3, 4), factor=np.array([0.5, 1, 1.25], np.float32))
    entry = json.loads(json.dumps(_part_entry(part, {})))
    assert np.array_equal(_part(entry, []).factor, part.factor)
    for wrong in ([0.5, 1], [0.5, 1, float("nan")], [0.5, 1, -1], "x"):
        with pytest.raises(FieldError, match=r"factor of a\.weight is .*, not 3 positive numbers"):
            _part(entry | {"factor": wrong}, [])

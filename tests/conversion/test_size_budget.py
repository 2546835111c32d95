"""A size budget: types per tensor that fit the bytes and lose least."""

from __future__ import annotations

import errno
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import transformers

from bridge.blocks import BLOCKS
from bridge.blocks.read import CALIBRATED as CALIBRATED_TYPES
from bridge.checkpoint import open_checkpoint
from bridge.cli import main
from bridge.conversion.converter import convert, plan_checkpoint
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.matrix_scales import with_scales
from bridge.conversion.planning.options import Budget, PlanOptions
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan_reader import load_plan
from bridge.conversion.planning.planner import Planner
from bridge.conversion.writing.executor import Executor
from bridge.conversion.writing.gguf_writer import file_bytes
from bridge.conversion.writing.report import CALIBRATED, CARRIED
from bridge.errors import BridgeError
from bridge.quantize.budget.divergence import Divergence, Rounded
from bridge.quantize.budget.search import FLOAT, SearchResult, search
from bridge.quantize.budget.sensitivity import OutputMetric, layer_costs, nearest
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.forward_passes import Passes, drawn
from bridge.quantize.settings import Calibration
from bridge.quantize.solve.hessian import held_back
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model

pytestmark = [pytest.mark.xdist_group("budget"), pytest.mark.usefixtures("few_types")]  # files are made once
LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose inputs of 256 fill a superblock."""
    return save_model(tmp_path_factory.mktemp("model"), "LlamaConfig")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("one"), "LlamaConfig", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 300, (24, LENGTH)))
    return path


def settings(tokens: Path, **options: Any) -> Calibration:
    return Calibration(tokens, **{"samples": 24, "length": LENGTH, "sweeps": 0, "method": "gptq", **options})


@pytest.fixture(scope="module")
def passes(model: Path, tokens: Path) -> Passes:
    with torch.no_grad():
        return Passes(FloatModel(open_checkpoint(model)), torch.from_numpy(np.load(tokens))[:12], 5)


@pytest.fixture(scope="module")
def made(model: Path, tokens: Path, few_types: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of a budget, its plan and its report."""
    folder = tmp_path_factory.mktemp("made")
    size = file_bytes(plan_checkpoint(model, type="Q3_K_M")) + 1234
    command = ["quantize", str(model), str(folder / "out.gguf"), "--size", str(size), "--calibrate", str(tokens)]
    command += ["--sequence-length", str(LENGTH), "--sweeps", "0", "--method", "gptq", "--swaps", "3"]
    command += ["--plan-out", str(folder / "plan.json"), "--report", str(folder / "report.json")]
    command += ["--tensor-types-out", str(folder / "types.txt")]
    assert main(command) == 0
    (folder / "size").write_text(str(size))
    return folder


def test_the_file_has_at_most_the_bytes_and_no_tensor_could_have_a_larger_type(made: Path) -> None:
    limit = int((made / "size").read_text())
    size = (made / "out.gguf").stat().st_size
    tensors = gguf.GGUFReader(made / "out.gguf").tensors
    types = {t.tensor_type.name for t in tensors if len(t.shape) == 2}
    assert len(types) > 1
    assert any(type.startswith("IQ") for type in types)
    larger = []
    for t in tensors:
        if len(t.shape) == 2:
            sizes = sorted(b.nbytes * int(t.n_elements) // b.size for b in BLOCKS.values() if b.is_k)
            larger += [n - int(t.n_bytes) for n in sizes if n > 1.1 * t.n_bytes]  # Q2_K is no better than IQ2_S
    assert limit - min(larger) < size <= limit


def test_the_plan_is_written_with_its_curve_and_makes_the_same_file(made: Path, model, tokens, tmp_path) -> None:
    plan, checkpoint = load_plan(made / "plan.json")
    assert checkpoint == str(model)
    size = (made / "out.gguf").stat().st_size
    assert file_bytes(plan) == size
    assert size in [n for n, _ in plan.curve]
    others = [point for point in plan.curve if point[0] != size]
    assert others == sorted(others)
    assert others == sorted(others, key=lambda point: -point[1])
    assert len(others) > 8
    convert(plan=made / "plan.json", out=tmp_path / "again.gguf", calibrate=settings(tokens, samples=128))
    assert (tmp_path / "again.gguf").read_bytes() == (made / "out.gguf").read_bytes()


def test_the_types_are_written_as_llama_quantize_takes_them(made: Path) -> None:
    """A pattern that is searched in the names, =, and a type's name, in lines without blanks."""
    lines = [line.rpartition("=") for line in (made / "types.txt").read_text().split()]
    tensors = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(made / "out.gguf").tensors}
    matrices = {name: type for name, type in tensors.items() if not name.endswith("norm.weight")}
    found = {name: type for pattern, _, type in lines for name in tensors if re.search(pattern, name)}
    assert found == matrices
    assert len(lines) == len(matrices)


def test_the_report_tells_what_a_smaller_and_a_larger_file_would_have(made: Path) -> None:
    (note,) = (note for note in json.loads((made / "report.json").read_text())["notes"] if "size budget" in note)
    smaller, larger = re.findall(r"([\d.]+) MB would have about ([\d.e-]+)", note)
    assert float(smaller[1]) > float(larger[1])
    assert float(smaller[0]) * 1e6 < (made / "out.gguf").stat().st_size + 1e5


def test_rows_that_no_superblock_fills_get_q2_0_unless_the_file_is_for_a_llama_cpp_without_it(
    tokens: Path, tmp_path: Path
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = save_model(tmp_path / "model", "LlamaConfig", **small)
    out, given = tmp_path / "out.gguf", settings(tokens)
    report = convert(model, out, calibrate=given, budget=Budget(bpw=3.5, swaps=0), target="llama.cpp@11549")
    assert "Q2_0" in {t.type for t in report.tensors}
    with LlamaCpp(out, n_ctx=32) as loaded:
        assert np.isfinite(loaded.logits([1, 2, 3])).all()
    with pytest.raises(BridgeError, match="too small"):
        convert(model, out, force=True, calibrate=given, budget=Budget(bpw=3.5, swaps=0), target="llama.cpp@9000")


@pytest.mark.exhaustive
def test_with_static_act_order_there_are_no_codebooks(one_layer: Path, tokens: Path, tmp_path: Path) -> None:
    given = settings(tokens, act_order="static", method="two-sided")
    report = convert(one_layer, tmp_path / "out.gguf", calibrate=given, budget=Budget(bpw=3.5, swaps=0))
    assert {t.type for t in report.tensors if len(t.shape) == 2} <= {*BLOCKS, "F16"}


PINNED = {
    "attn_q": "NVFP4", "attn_k": "IQ1_S", "attn_v": "MXFP4", "attn_output": "IQ1_M", "ffn_gate": "IQ2_XXS",
    "ffn_up": "IQ3_S", "ffn_down": "IQ2_S",
}  # fmt: skip


@pytest.mark.parametrize(
    "pinned", [{"ffn_down": "IQ4_XS"}, pytest.param(PINNED, marks=pytest.mark.exhaustive)], ids=["one", "all"]
)
def test_tensors_that_are_pinned_to_codebooks_are_calibrated_and_count_in_the_size(
    pinned: dict[str, str], model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pinned is PINNED:  # others may get any type
        monkeypatch.setattr("bridge.conversion.size_budget.CALIBRATED", CALIBRATED_TYPES)
    size = file_bytes(plan_checkpoint(model, type="Q3_K_M"))
    types = {f"blk.0.{kind}": type for kind, type in pinned.items()}
    out, plan = tmp_path / "out.gguf", tmp_path / "plan.json"
    budget = Budget(size, swaps=0, plan_out=plan)
    report = convert(model, out, calibrate=settings(tokens), budget=budget, tensor_types=types)
    assert out.stat().st_size <= size
    made = {t.name.removesuffix(".weight"): t for t in report.tensors}
    assert {name: made[name].type for name in types} == types
    assert {made[name].outcome for name in types} == {"calibrated"}
    planned = {t["name"].removesuffix(".weight"): t["type"] for t in json.loads(plan.read_text())["tensors"]}
    assert {name: planned[name] for name in types} == types


def test_trial_models_that_do_not_fit_in_memory_are_stored_next_to_the_output_and_removed(
    one_layer, tokens, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Divergence, "has_room", lambda *_: False)
    (tmp_path / "system").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    seen: set[str] = set()

    def look(*_: object) -> None:
        seen.update(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npy"))

    budget = Budget(bpw=4.5, swaps=1, progress=look)
    convert(one_layer, tmp_path / "out.gguf", calibrate=settings(tokens, samples=8), budget=budget)
    assert seen
    assert all(name.startswith(".out.gguf.") for name in seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "system"]
    (tmp_path / "offload").mkdir()
    seen.clear()
    calibrate = settings(tokens, samples=8, offload=tmp_path / "offload")
    convert(one_layer, tmp_path / "again.gguf", calibrate=calibrate, budget=budget)
    assert seen
    assert all(name.startswith("offload/") for name in seen)
    assert not list((tmp_path / "offload").iterdir())


def test_a_full_disk_while_types_are_searched_is_one_line_and_leaves_nothing(
    one_layer, tokens, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, _values: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Divergence, "has_room", lambda *_: False)
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(BridgeError, match=r"trial models failed .*No space left.*GB free there.*make room") as caught:
        convert(one_layer, tmp_path / "out.gguf", calibrate=settings(tokens), budget=Budget(bpw=4.5, swaps=1))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BridgeError, match="none: no such folder; make it or give another one"):
        settings(tokens, offload=tmp_path / "none")


def test_experts_and_embeddings_that_are_the_head_too_fit_a_budget(tokens: Path, tmp_path: Path) -> None:
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    folder = save_model(
        tmp_path / "m", "Qwen3MoeConfig", tie_word_embeddings=True, num_hidden_layers=1, norm_topk_prob=True, **fields
    )
    report = convert(folder, tmp_path / "out.gguf", calibrate=settings(tokens), budget=Budget(bpw=4.5, swaps=2))
    matrices = [t for t in report.tensors if t.kind == "token_embd" or t.kind.endswith("_exps")]
    assert len({t.type for t in matrices}) > 1
    weights = sum(t.weights for t in report.tensors)
    assert 4.4 < 8 * sum(t.nbytes for t in report.tensors) / weights <= 4.5
    assert {t.outcome for t in matrices if t.kind != "token_embd"} == {CALIBRATED}


def test_nvfp4_counts_with_the_scale_of_its_matrix_and_not_for_embeddings(
    model: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.conversion.size_budget import _item

    monkeypatch.setattr("bridge.conversion.size_budget.CALIBRATED", CALIBRATED_TYPES)
    with open_checkpoint(model) as ckpt:
        plan = plan_checkpoint(model, type="Q4_K")
        planner = Planner(ckpt, PlanOptions(type="Q4_K"), Importance({}), plan, settings(tokens))
        by_name = {t.name: t for t in plan.tensors}
        item = _item(by_name["blk.0.attn_q.weight"], plan, planner, settings(tokens))
        sizes = dict(zip(item.types, item.sizes.tolist(), strict=True))
        assert item.scale == 2**-8
        of_256 = {name for name, block in CALIBRATED_TYPES.items() if block.size == 256}
        assert {*of_256, "MXFP4", "NVFP4", "Q2_K", "Q6_K", "F16"} <= set(item.types)
        others = [t for t in plan.tensors if t.name != item.tensor.name]
        made = {type: replace(item.tensor, type=type, how=("rounded",)) for type in ("NVFP4", "Q4_K")}
        files = {type: file_bytes(with_scales(ckpt, replace(plan, tensors=[*others, t]))) for type, t in made.items()}
        assert 0 < files["NVFP4"] - files["Q4_K"] <= sizes["NVFP4"] - sizes["Q4_K"]
        embeddings = _item(by_name["token_embd.weight"], plan, planner, settings(tokens))
        assert {"IQ1_S", "IQ4_XS", "F16"} <= set(embeddings.types)
        assert not {"NVFP4", "MXFP4"} & set(embeddings.types)


def test_the_curve_has_the_file_once_with_the_bytes_that_it_gets() -> None:
    from bridge.conversion.size_budget import _place, _Search

    search, million = _Search.__new__(_Search), 10**6
    search.items = [cast(Any, SimpleNamespace(sizes=np.array([10, 20, 40]) * million))] * 2
    search.losses = [np.array([0.4, 0.1, 0.01])] * 2
    search.result = SearchResult(np.array([1, 1]), np.ones(2))
    own = 140 * million - 3232  # scales of NVFP4 took less than they were counted with
    curve = search.curve(100 * million, own)
    sizes = [120 * million, 130 * million, own, 160 * million, 180 * million]
    assert curve == list(zip(sizes, map(pytest.approx, (0.8, 0.5, 0.2, 0.11, 0.02)), strict=True))
    near = "130.0 MB would have about 5.0e-01 and 160.0 MB would have about 1.1e-01"
    assert _place(curve, own) == f"; by the estimates, {near}"


def test_trials_round_to_nvfp4_with_the_scale_of_the_matrix() -> None:
    weight = 0.002 * torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    without, scaled = (float((weight - nearest(weight, "NVFP4", scale=s)).square().sum()) for s in (1.0, 2**-8))
    assert scaled < 0.5 * without


def test_the_report_says_what_was_measured(made: Path) -> None:
    notes = json.loads((made / "report.json").read_text())["notes"]
    assert any("nats a token of the calibration's text" in note and "rank correlation" in note for note in notes)


def test_gradients_are_those_of_the_whole_model(model: Path, passes: Passes) -> None:
    """Block by block as autograd finds them in one piece, for the tokens that are drawn."""
    found = dict(passes.output_products(2048))
    passes.load_embedding_and_head()  # which were freed
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layer = whole.model.layers[0].mlp.up_proj
    of_up: list[torch.Tensor] = []
    of_embeddings: list[torch.Tensor] = []
    for number, batch in enumerate(passes.batches):
        generator = torch.Generator().manual_seed(number)
        outputs: list[torch.Tensor] = []
        handles = [
            module.register_forward_hook(lambda m, a, out, outputs=outputs: outputs.append(out))
            for module in (whole.get_input_embeddings(), layer)
        ]
        scores = whole(batch).logits.float().log_softmax(-1).flatten(0, 1)
        for handle in handles:
            handle.remove()
        chosen = drawn(scores.detach().exp(), generator)
        for all_, gradient in zip(
            (of_embeddings, of_up), torch.autograd.grad(scores.gather(1, chosen).sum(), outputs), strict=True
        ):
            all_.append(gradient.flatten(0, 1))

    def product(gradients: list[torch.Tensor]) -> torch.Tensor:
        """Each token's root of |g|^2 is left to H."""
        g = torch.cat(gradients)
        norms = g.norm(dim=1)
        return (g / norms.clamp_min(1e-30)[:, None]).T @ g / len(g) * norms.mean()

    expected = product(of_embeddings)
    torch.testing.assert_close(
        found["model.embed_tokens"].blocks[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )
    norms: dict[str, torch.Tensor] = {}
    gathered = dict(passes.output_products(100, norms=norms.__setitem__))["model.layers.0.mlp.up_proj"]
    blocks = gathered.blocks  # of 100, 100 and 56 rows
    torch.testing.assert_close(norms["model.layers.0.mlp.up_proj"], torch.cat(of_up).norm(dim=1), rtol=1e-3, atol=1e-9)
    those = held_back(0, len(torch.cat(of_up)))
    assert gathered.held is not None
    assert gathered.share == pytest.approx(float(those.double().mean()))
    own = torch.cat(of_up)[those][:, :100]
    sizes = torch.cat(of_up).norm(dim=1)
    own = (own / sizes[those].clamp_min(1e-30)[:, None]).T @ own / len(own) * sizes.mean()
    torch.testing.assert_close(gathered.held, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))
    passes.load_embedding_and_head()  # which were freed
    for i, rows in enumerate((slice(0, 100), slice(100, 200), slice(200, 256))):
        n = rows.stop - rows.start
        own = product(of_up)[rows, rows]
        torch.testing.assert_close(blocks[i, :n, :n], own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))
        assert not blocks[i, n:].any()
    assert found.keys() == {"model.embed_tokens", *FloatModel(open_checkpoint(model)).linears()}


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head", "model.embed_tokens"]
)
def test_estimates_are_near_to_what_a_trial_measures(name: str, passes: Passes, tmp_path: Path) -> None:
    from bridge.quantize import quantize_model

    seen = {}
    types = ["Q3_K", "Q4_K", "IQ3_S"]
    products = dict(passes.output_products(2048))
    passes.load_embedding_and_head()
    if name == "lm_head":
        weight = passes.model.model.get_output_embeddings().weight
        felt = OutputMetric(passes.head_hessian().matrix, passes.head_gradients(), passes.head_gradients())
    elif name == "model.embed_tokens":
        weight = passes.model.model.get_input_embeddings().weight
        share = passes.tokens.flatten().bincount(minlength=len(weight)).double() / passes.tokens.numel()
        felt = OutputMetric(2 * products[name].blocks[0] * products[name].scale, share, share)
    else:
        walk = quantize_model(
            passes.model, passes.tokens, lambda layer: (layer.weight, seen.update({layer.name: layer})),
            wanted=name.__eq__,
        )  # fmt: skip
        assert [n for n, _ in walk] == [name]
        passes.load_embedding_and_head()
        weight = seen[name].weight
        squares = products[name].blocks[0].diagonal().double()
        felt = OutputMetric(seen[name].hessian.matrix, squares, squares)
    costs = layer_costs(weight, [felt], dict.fromkeys(types), samples=256)
    divergence = Divergence(passes, lambda name: None, tmp_path, passes.model.embedding_and_head())
    measured = {type: divergence.measure({name: Rounded(type)}) for type in costs}
    for type, cost in costs.items():
        assert 0.5 < measured[type] / cost.loss < 2
    assert measured["Q4_K"] < 0.5 * measured["Q3_K"]


def test_an_input_a_million_times_as_large_does_not_hide_what_other_rows_lose() -> None:
    """As in down projections of real models, whose first token has one such input, and one row that multiplies it."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 128, generator=dice)
    weight[:, 0] *= 1e-2
    weight[7, 0] = 30
    hessian = torch.eye(128)
    hessian[0, 0] = 1e6
    alike = torch.ones(256, dtype=torch.float64)
    felt = OutputMetric(hessian, alike, alike)

    def rounded(rows: torch.Tensor, _type: str) -> torch.Tensor:
        return torch.cat([rows[:, :1], rows[:, 1:] * 0.9], 1)  # exact where it is felt most, as by error feedback

    found = layer_costs(weight, [felt], {"Q4_0": rounded})["Q4_0"].loss
    lost = weight - rounded(weight, "Q4_0")
    assert found == pytest.approx(float((lost @ hessian * lost).sum()) / 4, rel=0.1)


def test_a_trial_that_begins_late_measures_the_same(passes: Passes, tmp_path: Path) -> None:
    up, down, embeddings = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"
    first = {up: Rounded("Q3_K"), down: Rounded("Q4_K", 0.3), embeddings: Rounded("Q4_K")}
    second = {**first, down: Rounded("Q3_K"), "lm_head": Rounded("F16")}
    begun, anew = (Divergence(passes, lambda name: None, tmp_path, passes.model.embedding_and_head()) for _ in range(2))
    begun.measure(first, as_new_base=True)
    assert begun.measure(second) == pytest.approx(anew.measure(second), rel=1e-6)
    assert anew.measure({}) == 0


def test_a_few_batches_measure_what_a_model_of_their_tokens_alone_does(passes: Passes, tmp_path: Path) -> None:
    with torch.no_grad():
        fewer = Passes(passes.model, passes.tokens[:5], 5)
    whole, alone = (
        Divergence(own, lambda name: None, tmp_path, own.model.embedding_and_head()) for own in (passes, fewer)
    )
    down = {"model.layers.1.mlp.down_proj": Rounded("Q4_K")}
    for trial in (down, down | {"model.embed_tokens": Rounded("Q4_K"), "lm_head": Rounded("Q4_0")}):
        assert whole.measure_few(trial) == pytest.approx(alone.measure(trial), rel=1e-6)
    assert whole.measure_few(down) == pytest.approx(whole.measure(down), rel=0.2)


def test_rounding_floats_to_floats_changes_only_what_they_cannot_hold() -> None:
    x = torch.tensor([[1.0, 1 + 2.0**-9, 2.0**-30]])
    assert nearest(x, "F16").tolist() == [[1.0, 1 + 2.0**-9, 0.0]]
    assert nearest(x, "BF16").tolist() == [[1.0, 1.0, 2.0**-30]]


def test_swaps_never_raise_what_is_measured_and_find_what_estimates_cannot_know() -> None:
    """Two tensors of six lose ten times as much together: no sum of single losses says so."""
    rng = np.random.default_rng(3)
    sizes = [np.array([2, 3, 4, 6])] * 6
    losses = [rng.uniform(0.5, 2) * np.array([16.0, 6, 2, 0.3]) for _ in sizes]
    tried = []

    def measure(taken: np.ndarray, scales: np.ndarray, keep: bool) -> float:
        own = [0.0 if t == FLOAT else float(x[t]) * s for x, t, s in zip(losses, taken, scales, strict=True)]
        tried.append(taken.copy())
        return sum(own) + 10 * min(own[0], own[1])

    limit = 21

    def measure_alone(taken: np.ndarray) -> float:
        return measure(taken, np.ones(6), False)

    plain = search(sizes, losses, limit, measure, measure_alone, [], 0)
    found = search(sizes, losses, limit, measure, measure_alone, [[i] for i in range(6)], 12)
    assert found.measured == sorted(found.measured, reverse=True)
    assert found.measured[0] == plain.measured[0]
    assert found.measured[-1] < 0.8 * plain.measured[-1]
    assert measure(found.chosen, found.scales, False) == found.measured[-1]
    whole = [t for t in tried if FLOAT not in t]
    assert all(sum(int(s[o]) for s, o in zip(sizes, t, strict=True)) <= limit for t in whole)


def test_estimates_allocate_and_scale_the_errors_of_trials() -> None:
    """A trial that feels one tensor too little does not take bits from it."""
    sizes, losses = [np.array([2, 3, 4])] * 3, [np.array([9.0, 3, 1])] * 3
    felt = np.array([1.0, 0.5, 1])

    def measure(taken: np.ndarray, scales: np.ndarray, keep: bool) -> float:
        return sum(float(x[t]) * by for x, t, by in zip(losses, taken, felt * scales, strict=True) if t != FLOAT)

    found = search(sizes, losses, 9, measure, lambda taken: measure(taken, np.ones(3), False), [[0], [1], [2]], 6)
    assert found.chosen.tolist() == [1, 1, 1]
    assert found.scales.tolist() == [1, 2, 1]
    assert found.measured == [9]
    assert found.estimated.tolist() == [3, 3, 3]
    assert found.alone.tolist() == [3, 1.5, 3]


def test_trials_have_windows_as_long_as_the_sequences() -> None:
    """Errors of q and k are felt more at later positions; four windows are the least that a quarter is taken of."""
    from bridge.conversion.size_budget import _probe

    tokens = torch.arange(1, 1 + 16 * 512).reshape(16, 512)
    assert _probe(tokens, 4096).tolist() == tokens[[0, 2, 4, 6, 9, 11, 13, 15]].tolist()
    assert _probe(tokens.reshape(4, 2048), 4096).shape == (4, 1024)
    assert _probe(tokens[:2, :32], 4096).shape == (2, 32)


def test_codes_that_are_carried_keep_their_type_and_count_with_their_bytes(tokens: Path, tmp_path: Path) -> None:
    plan = plan_checkpoint(CHECKPOINT)
    floats = [t for t in plan.tensors if t.kind in ("token_embd", "output")]
    size = file_bytes(plan) - sum(t.nbytes for t in floats) // 4
    out = tmp_path / "out.gguf"
    report = convert(CHECKPOINT, out, calibrate=settings(tokens), budget=Budget(size, swaps=1))
    assert size - 100_000 < out.stat().st_size <= size
    types = {t.name: t.type for t in plan.tensors}
    coded = [t for t in report.tensors if t.kind.startswith(("attn_q.", "ffn_")) and len(t.shape) == 2]
    assert all((t.outcome, t.type) == (CARRIED, types[t.name]) for t in coded)
    assert {t.type for t in report.tensors if t.kind in ("token_embd", "output")} != {"Q8_0"}


def test_no_codes_are_read_whole_before_they_are_converted(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning has decided what is carried: whether a type may be chosen is read from it."""
    read: list[str] = []
    grouped, results = PartReader.grouped, Executor.results
    monkeypatch.setattr(PartReader, "grouped", lambda self, part: (read.append(part.source), grouped(self, part))[1])
    monkeypatch.setattr(Executor, "results", lambda self, tensors: (read.append("executor"), results(self, tensors))[1])
    size = file_bytes(plan_checkpoint(CHECKPOINT)) - 100_000
    read.clear()
    convert(CHECKPOINT, tmp_path / "out.gguf", calibrate=settings(tokens), budget=Budget(size, swaps=0))
    small = [s for s in read[: read.index("executor")] if not s.endswith(("k_proj.weight", "v_proj.weight"))]
    assert not small
    assert len(read) > 28


def test_codes_are_rounded_again_where_that_is_asked_for(tokens: Path, tmp_path: Path) -> None:
    """And only where the type cannot hold them: what can costs nothing."""
    fixed = [("token_embd", "Q6_K"), (r"blk\.[1-9]", "Q4_K"), ("attn", "Q4_K")]
    size = file_bytes(plan_checkpoint(CHECKPOINT, tensor_types=fixed))
    given = {"tensor_types": fixed, "calibrate": settings(tokens)}
    with pytest.raises(BridgeError, match=f"too small; .* has {size} bytes"):
        convert(CHECKPOINT, tmp_path / "out.gguf", **given, budget=Budget(size - 100_000))
    budget = Budget(size - 100_000, swaps=0, requantize=True)
    report = convert(CHECKPOINT, tmp_path / "out.gguf", **given, budget=budget)
    assert (tmp_path / "out.gguf").stat().st_size <= budget.size
    found = {
        t.name: (t.type, t.outcome) for t in report.tensors if t.name.startswith("blk.0.ffn_") and len(t.shape) == 2
    }
    assert CALIBRATED in {how for _, how in found.values()}
    assert all((how == CARRIED) == (type == "Q4_K") for type, how in found.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "20K"], r"--size 20000: too small; the smallest file that can be made of .* has \d+ bytes"),
        (["--bpw", "1.5"], r"--bpw 1.5 \(\d+ bytes\): too small; the smallest file .* has \d+ bytes"),
        (["--size", "2G"], r"too large; the largest file that can be made of .* has \d+ bytes"),
        (["--size", "900K", "--bpw", "4"], "give one"),
        (["--bpw", "0"], "must be bits per weight, such as 4.3"),
        (["--bpw", "nan"], "must be bits per weight, such as 4.3"),
        (
            ["--size", "900K", "--type", "Q4_K"],
            "chooses the types itself, .* --type Q4_K; pin single tensors with --tensor-type",
        ),
        (["--size", "900K", "--split-max-size", "500K"], "--size is for one file: write the plan with --plan-out"),
        (["--size", "900K", "--format", "gptq"], "choose among GGUF types"),
        (["--size", "900K", "--method", "rtn"], "measured with a text and two-sided, gptaq, gptq or imatrix"),
        (["--plan-out", "plan.json"], "--plan-out is for a size budget: give --size or --bpw"),
        (["--swaps", "0"], "--swaps is for a size budget"),
        (["--size", "4.2X"], "is not a size such as 4G or 500M"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_in_one_line(options, message, model, tokens, tmp_path, capsys) -> None:
    command = ["quantize", str(model), str(tmp_path / "out.gguf"), "--calibrate", str(tokens), *options]
    assert main([*command, "--sequence-length", str(LENGTH)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out.gguf").exists()


def test_a_budget_wants_a_text_and_no_plan_of_its_types(model: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BridgeError, match="size is measured with a text and two-sided, gptaq, gptq or imatrix: give calibrate"
    ):
        convert(model, tmp_path / "out.gguf", budget=Budget(900_000))
    with pytest.raises(BridgeError, match="a plan defines every type; give size without plan"):
        convert(plan=made / "plan.json", out=tmp_path / "out.gguf", budget=Budget(900_000))
    with pytest.raises(BridgeError, match=r"plan.json.*exists"):
        convert(
            model,
            tmp_path / "out.gguf",
            calibrate=settings(tmp_path / "tokens.npy"),
            budget=Budget(900_000, plan_out=made / "plan.json"),
        )

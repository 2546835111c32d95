"""`quantize --method imatrix`: the mean squares of inputs, and the file that is rounded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bridge
from bridge.cli import main
from bridge.conversion.planning.importance import importance_of_tensors
from bridge.conversion.planning.options import Budget
from bridge.errors import BridgeError
from bridge.gguf_file.imatrix import read_imatrix
from bridge.gguf_file.reader import read_gguf
from bridge.models.outline import ModelTensor, Part
from bridge.quantize.input_squares import mean_input_squares
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose inputs of 256 fill a superblock, and an output head of its own."""
    folder = tmp_path_factory.mktemp("model")
    return save_model(folder, "LlamaConfig", vocab_size=2048, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, (24, 64)))
    return path


def squares_of(folder: Path, tokens: torch.Tensor) -> dict[str, tuple[np.ndarray, int]]:
    """By layer, with hooks on the whole model in memory: the mean square of each input, and the tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            seen[name] = []
            module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(tokens)
    return {name: (torch.cat(x).double().square().mean(0).numpy(), sum(map(len, x))) for name, x in seen.items()}


def test_mean_squares_of_inputs_are_those_of_a_pass_of_the_whole_model(model: Path, tokens: Path) -> None:
    text = torch.from_numpy(np.load(tokens))
    blocks: list[tuple[int, int]] = []
    with bridge.open_checkpoint(model) as ckpt:
        found = mean_input_squares(FloatModel(ckpt), text, batch=5, done=lambda *done: blocks.append(done))
    expected = squares_of(model, text)
    assert found.keys() == expected.keys()
    for name, (squares, count) in expected.items():
        np.testing.assert_allclose(found[name][0], squares, rtol=1e-4)
        assert found[name][1] == count
    assert blocks == [(1, 2), (2, 2)]


def test_experts_see_their_own_tokens_and_one_without_any_has_zeros(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "MixtralConfig", num_local_experts=8, num_experts_per_tok=2)
    text = torch.randint(0, 256, (1, 3), generator=torch.Generator().manual_seed(0))
    with bridge.open_checkpoint(folder) as ckpt:
        found = mean_input_squares(FloatModel(ckpt), text)
    gates = [found[f"model.layers.0.block_sparse_moe.experts.{i}.w1"] for i in range(8)]
    assert sum(count for _, count in gates) == 2 * 3
    assert all((count > 0) == squares.any() for squares, count in gates)


def test_inputs_that_are_not_finite_are_refused_with_the_layers_name(model: Path) -> None:
    with bridge.open_checkpoint(model) as ckpt:
        floats = FloatModel(ckpt)
        load = floats.load

        def damaged(block: int | None) -> None:
            load(block)
            if block == 1:
                floats.blocks[1].input_layernorm.weight.data[3] = float("inf")

        floats.load = damaged  # type: ignore[method-assign]
        with pytest.raises(BridgeError, match=r"layers\.1\.self_attn\.q_proj: its inputs hold NaN or infinity"):
            mean_input_squares(floats, torch.arange(8)[None])


@pytest.mark.parametrize("options", [["--type", "Q4_K_M"], ["--type", "IQ3_XXS"]])
def test_the_file_is_what_convert_makes_of_the_imatrix(
    model: Path, tokens: Path, tmp_path: Path, options: list[str]
) -> None:
    mine, theirs, imatrix = (tmp_path / name for name in ("mine.gguf", "theirs.gguf", "imatrix.gguf"))
    asked = ["--calibrate", str(tokens), "--sequence-length", "64", "--samples", "24", "--imatrix-out", str(imatrix)]
    assert main(["quantize", str(model), str(mine), "--method", "imatrix", *options, *asked]) == 0
    found = read_imatrix(imatrix)
    assert found["blk.1.ffn_down.weight"].shape == read_gguf(mine).tensors["blk.1.ffn_down.weight"].shape[1:]
    assert "token_embd.weight" not in found
    assert "output.weight" in found
    bridge.convert(model, theirs, type=options[1], imatrix=imatrix)
    assert mine.read_bytes() == theirs.read_bytes()


def test_it_says_what_it_needs_and_leaves_no_file_without_imatrix_out(
    model: Path, tokens: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    calls: list[str] = []
    settings = Calibration(
        tokens, method="imatrix", length=64, say=lines.append, progress=lambda _done, _all, what: calls.append(what)
    )
    bridge.convert(model, tmp_path / "out.gguf", type="Q4_K", calibrate=settings)
    assert len(lines) == 1
    assert lines[0].startswith("importance of 1,536 tokens: needs ")
    assert calls == ["importance matrix"] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.usefixtures("few_types")
def test_under_a_size_no_type_is_promised_before_it_is_chosen(model: Path, tokens: Path, tmp_path: Path) -> None:
    settings = Calibration(tokens, method="imatrix", length=64)
    report = bridge.convert(model, tmp_path / "out.gguf", calibrate=settings, budget=Budget(bpw=5.0))
    assert any(note.startswith("size budget: ") for note in report.notes)
    assert not any("become Q8_0" in note for note in report.notes)


def test_an_imatrix_has_the_columns_in_the_order_of_the_gguf_except_where_that_undoes_act_order() -> None:
    order, squares = np.array([2, 0, 1]), np.arange(3, dtype=np.float32)
    names = {"moved": (order, False), "folded": (order, True), "as it is": (None, False)}
    tensors = [
        ModelTensor(f"blk.0.{name}.weight", (4, 3), parts=(Part(name, (4, 3), columns=columns, folded=folded),))
        for name, (columns, folded) in names.items()
    ]
    found = importance_of_tensors(tensors, {tensor.parts[0].layer or "": (squares, 7) for tensor in tensors})
    assert [found[f"blk.0.{name}.weight"][0].tolist() for name in names] == [[[2, 0, 1]], [[0, 1, 2]], [[0, 1, 2]]]
    assert [found[f"blk.0.{name}.weight"][1].tolist() for name in names] == [[7]] * 3


@pytest.mark.parametrize(("own", "others", "match"), [
    ({}, {"imatrix": Path("i.gguf")}, "the method measures a matrix of its own"),
    ({"memory": 1 << 20}, {}, "too little; a pass of this model block by block takes"),
])  # fmt: skip
def test_options_that_do_not_go_with_it_are_refused(
    model: Path, tokens: Path, tmp_path: Path, own: dict[str, Any], others: dict[str, Any], match: str
) -> None:
    settings = Calibration(tokens, method="imatrix", length=64, **own)
    with pytest.raises(BridgeError, match=match):
        bridge.convert(model, tmp_path / "out.gguf", type="Q4_K", calibrate=settings, **others)


def test_machines_do_not_share_its_work(tokens: Path) -> None:
    with pytest.raises(BridgeError, match="is for the methods two-sided, gptaq and gptq, not imatrix"):
        Calibration(tokens, method="imatrix", feed="float", blocks=(1, 2))

"""A type that was asked for and is not given is said, with the reason and the count; so are matrices of zeros."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.cli.files.describe import plan_table
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.mmproj import tower_notes
from bridge.conversion.planning.plan import PlannedTensor, unmet_notes
from bridge.conversion.planning.recipe import Recipe, TensorPlace, Unmet
from bridge.models.outline import Outline, OutlineTensor
from tests.support.described import describe
from tests.support.plain_llama import CONFIG, llama_weights, write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("unmet") / "model")


def notes(folder: Path, **options: object) -> list[str]:
    return [note for note in plan_checkpoint(folder, **options).notes if "became" in note or "not used" in note]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"type": "Q4_K"},
            ["Q4_K needs rows of a multiple of 256: 14 tensors have 96 and became Q5_0 (5.50 bits a weight, not 4.50)"],
        ),
        ({"type": "Q8_0"}, []),
        (
            {"tensor_types": [("ffn_gate", "Q6_K"), ("ffn_down", "Q6_K")]},
            ["Q6_K needs rows of a multiple of 256: 2 tensors have 96 and became Q8_0 (8.50 bits a weight, not 6.56)"],
        ),
        (
            {"token_embd_type": "IQ4_XS"},
            [
                "IQ4_XS needs rows of a multiple of 256: 1 tensor has 96 and became IQ4_NL "
                "(4.50 bits a weight, not 4.25)"
            ],
        ),
        (
            {"output_type": "Q5_K"},
            ["Q5_K needs rows of a multiple of 256: 1 tensor has 96 and became Q5_1 (6.00 bits a weight, not 5.50)"],
        ),
        (
            {"type": "MXFP4"},
            ["floats are rounded to MXFP4 in layers, with a calibration text: 16 tensors became Q8_0"],
        ),
    ],
)
def test_a_type_that_the_rows_do_not_hold_is_said(folder, options, said):
    assert notes(folder, **options) == said


def test_a_preset_says_it_of_every_type_of_its_mixture(folder):
    found = notes(folder, type="Q3_K_M")
    assert (
        "Q3_K needs rows of a multiple of 256: 9 tensors have 96 and became Q4_0 (4.50 bits a weight, not 3.44)"
        in found
    )
    assert all("needs rows of a multiple of 256" in note for note in found)


def test_types_of_fewer_bits_that_the_rows_hold_are_listed(folder):
    found = plan_checkpoint(folder, type="Q4_K").notes
    of_96 = "IQ4_NL (4.50 bits), Q4_1 (5.00 bits)"  # not Q2_0
    assert (
        f"smaller than Q5_0, for rows of 96: Q4_0 (4.50 bits), {of_96}; with size, the best mixture of that size"
        in found
    )
    unmet = Unmet("Q2_K", "Q2_K needs rows of a multiple of 256", 576)
    tensors = [PlannedTensor(f"blk.{i}.ffn_up.weight", (8, 576), type="Q4_0", unmet=unmet) for i in range(2)]
    assert unmet_notes(tensors)[1].startswith("smaller than Q4_0, for rows of 576: Q2_0 (2.25 bits); with ")
    assert not [note for note in plan_checkpoint(folder, type="Q2_K").notes if "smaller than" in note]


def test_it_is_in_the_report_and_in_the_table_of_a_plan(folder, tmp_path):
    said = "Q4_K needs rows of a multiple of 256: 14 tensors have 96 and became Q5_0 (5.50 bits a weight, not 4.50)"
    assert f"note: {said}" in bridge.convert(folder, tmp_path / "m.gguf", type="Q4_K").table()
    assert f"note: {said}" in plan_table(plan_checkpoint(folder, type="Q4_K"))


def test_rows_that_no_block_type_holds_are_said_without_an_option(tmp_path):
    write_llama(tmp_path / "model", hidden_size=72, head_dim=18)
    said = (
        "note: Q8_0 needs rows of a multiple of 32: 14 tensors have 72 and became F16 (16.00 bits a weight, not 8.50)"
    )
    assert said in describe(tmp_path / "model")


def test_the_head_of_a_calibrated_model_is_said_to_have_more_bits():
    place = TensorPlace("output.weight", "output", None, 2, 1, 256)
    unmet = Recipe("IQ4_XS").wanted(place, as_codes=False, calibrated=True).unmet
    assert unmet is None  # the preset of that name has a mixture
    unmet = Recipe("Q4_K").wanted(place, as_codes=False, calibrated=True).unmet
    assert unmet is not None
    tensors = [PlannedTensor("output.weight", (8, 256), type="Q6_K", unmet=unmet)]
    assert unmet_notes(tensors) == [
        "with a calibration text, the output head has the bits of Q6_K or more, as in llama.cpp's presets: 1 tensor "
        "became Q6_K"
    ]
    assert Recipe("Q4_K").wanted(place, as_codes=False).unmet is None


def test_codes_of_a_smaller_type_than_the_one_asked_for_are_not_mentioned():
    place = TensorPlace("blk.0.ffn_up.weight", "ffn_up", 0, 2, 1, 96)
    assert Recipe("Q4_K_M").wanted(place, as_codes=True).unmet == Unmet(
        "Q4_K", "Q4_K needs rows of a multiple of 256", 96
    )


def test_the_embeddings_type_is_said_to_lose_against_the_heads(tmp_path):
    weights = llama_weights(CONFIG)
    del weights["lm_head.weight"]
    folder = write_llama(tmp_path / "model", weights, tie_word_embeddings=True)
    (note,) = notes(folder, output_type="Q8_0", token_embd_type="Q4_0")
    assert note.startswith("the embeddings are the output head too: output_type decides on them")


def test_narrow_matrices_of_a_vision_tower_are_said():
    tensors = [OutlineTensor(f"v.blk.{i}.ffn_up.weight", (8, 72), fixed_type="F16") for i in range(2)]
    found = tower_notes([], Outline({}, tensors), "Q8_0")
    assert "Q8_0 needs rows of a multiple of 32: 2 tensors of the mmproj have 72 and became F16" in found


@pytest.mark.parametrize("type", ["Q8_0", "F16", "BF16"])
def test_matrices_of_zeros_get_a_note(tmp_path, type):
    weights = llama_weights(CONFIG)
    for name in weights:
        if ".mlp." in name:
            weights[name] = np.zeros_like(weights[name])
    folder = write_llama(tmp_path / "model", weights)
    lines = bridge.convert(folder, tmp_path / "m.gguf", type=type).table().splitlines()
    (line,) = [line for line in lines if "all zeros" in line]
    assert line.startswith("note: blk.0.ffn_gate.weight and 5 more: is all zeros in the checkpoint")

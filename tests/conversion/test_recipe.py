"""Options to types: explicit ones first, presets as llama.cpp mixes them, an upper bound for codes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bridge.blocks.read import WRITTEN
from bridge.conversion.planning.recipe import Recipe, TensorPlace, Wanted, for_rows
from bridge.errors import BridgeError
from tests.conftest import ROOT


def place(kind="ffn_up", layer=0, n_layers=32, gqa=1, columns=4096, tied=False):
    name = f"blk.{layer}.{kind}.weight" if layer is not None else f"{kind}.weight"
    return TensorPlace(name, kind, layer, n_layers, gqa, columns, tied)


def test_auto_leaves_codes_to_the_mapping_and_stores_floats_as_q8_0():
    recipe = Recipe()
    assert recipe.wanted(place(), as_codes=True) == Wanted("auto")
    assert recipe.wanted(place("token_embd", None), as_codes=False) == Wanted("forced", "Q8_0")


def test_a_block_type_is_taken_literally_for_codes():
    assert Recipe("q6_k").wanted(place(), as_codes=True) == Wanted("forced", "Q6_K")


@pytest.mark.parametrize("kind", ["auto", "Q4_K_M", "Q4_K", "Q2_K"])
def test_codes_in_rows_that_no_block_divides_become_floats(kind):
    found = Recipe(kind).wanted(place(columns=1000), as_codes=True), Recipe("exact").wanted(place(columns=1000), True)
    assert [(wanted.mode, wanted.type) for wanted in found] == [("forced", "F16"), ("forced", "F32")]
    assert all(wanted.unmet is not None and wanted.unmet.columns == 1000 for wanted in found)
    assert Recipe("exact").wanted(place(columns=4320), as_codes=True) == Wanted("exact")


def test_a_preset_is_an_upper_bound_for_codes_and_a_mixture_for_floats():
    recipe = Recipe("Q4_K_M")
    assert recipe.wanted(place("attn_v"), as_codes=True) == Wanted("at_most", "Q6_K")
    assert recipe.wanted(place("attn_v"), as_codes=False) == Wanted("forced", "Q6_K")
    assert recipe.wanted(place("attn_v", 5), as_codes=False) == Wanted("forced", "Q4_K")
    assert recipe.wanted(place("output", None), as_codes=False) == Wanted("forced", "Q6_K")
    assert recipe.wanted(place("token_embd", None), as_codes=False) == Wanted("forced", "Q4_K")
    assert recipe.wanted(place("token_embd", None, tied=True), as_codes=False) == Wanted("forced", "Q6_K")


@pytest.mark.parametrize(
    ("preset", "kind", "layer", "gqa", "expected"),
    [
        ("Q4_K_M", "ffn_down", 3, 1, "Q6_K"),
        ("Q4_K_M", "ffn_down", 4, 1, "Q4_K"),
        ("Q4_K_M", "ffn_down", 6, 1, "Q6_K"),
        ("Q4_K_M", "ffn_down", 28, 1, "Q6_K"),
        ("Q5_K_M", "attn_v", 5, 1, "Q5_K"),
        ("Q4_K_S", "attn_v", 3, 1, "Q5_K"),
        ("Q4_K_S", "attn_v", 4, 1, "Q4_K"),
        ("Q4_K_S", "ffn_down", 3, 1, "Q5_K"),
        ("Q3_K_M", "attn_v", 1, 1, "Q5_K"),
        ("Q3_K_M", "attn_v", 2, 1, "Q4_K"),
        ("Q3_K_M", "ffn_down", 1, 1, "Q5_K"),
        ("Q3_K_M", "ffn_down", 2, 1, "Q4_K"),
        ("Q3_K_M", "attn_output", 9, 1, "Q4_K"),
        ("Q3_K_L", "attn_output", 9, 1, "Q5_K"),
        ("Q3_K_S", "ffn_down", 0, 1, "Q3_K"),
        ("Q2_K", "attn_v", 0, 4, "Q4_K"),
        ("Q2_K", "attn_v", 0, 2, "Q3_K"),
        ("Q2_K", "ffn_down", 9, 1, "Q3_K"),
        ("Q8_0", "output", None, 1, "Q8_0"),
        ("Q6_K", "ffn_down", 0, 1, "Q6_K"),
    ],
)
def test_mixtures_are_llama_cpps(preset, kind, layer, gqa, expected):
    assert Recipe(preset).wanted(place(kind, layer, gqa=gqa), as_codes=False).type == expected


@pytest.mark.parametrize(
    ("arch", "gqa", "expected"),
    [
        ("llama", 8, {"Q2_K": "Q5_K", "Q3_K_S": "Q5_K", "Q3_K_M": "Q5_K", "Q4_K_S": "Q5_K", "Q4_K_M": "Q5_K Q6_K",
            "IQ3_S": "Q5_K", "IQ3_M": "Q5_K", "IQ4_XS": "Q5_K"}),
        ("llama", 1, {"Q2_K": "Q3_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q4_K Q5_K", "Q4_K_M": "Q4_K Q6_K", "IQ3_M": "Q4_K"}),
        ("qwen2", 1, {"Q2_K": "Q5_K", "Q4_K_M": "Q5_K Q6_K", "IQ3_S": "IQ3_S", "IQ3_M": "Q5_K", "IQ4_XS": "IQ4_XS"}),
    ],
)  # fmt: skip
def test_values_of_a_model_of_70b_get_five_bits(arch, gqa, expected):
    """As llama.cpp's own quantizer gives them, of models of 80 layers (cyllama 0.7.0)."""
    for preset, types in expected.items():
        layers = (replace(place("attn_v", i, 80, gqa), arch=arch) for i in range(80))
        assert {Recipe(preset).wanted(p, as_codes=False).type for p in layers} == set(types.split()), preset


def places(model: dict[str, Any], layers: int, kind: str) -> list[TensorPlace]:
    """A tensor of each layer, or the one outside of them."""
    tied = kind == "token_embd" and "output" not in model["types"]["Q2_K"]
    numbers = [None] if kind in ("token_embd", "output") else range(layers)
    return [replace(place(kind, i, layers, model["gqa"], 256, tied), experts=model["experts"]) for i in numbers]


def test_presets_are_those_of_llama_cpps_own_quantizer_layer_by_layer():
    golden = json.loads((ROOT / "tests/data/llama_cpp_presets.json").read_text())
    for name in set(golden) - {"layers", "what"}:
        model = golden[name]
        for preset, kinds in model["types"].items():
            needs = kinds.pop("needs an imatrix")
            found = set()
            for kind, runs in kinds.items():
                expected = [type for run in runs.split() for type, n in [run.split("*")] for _ in range(int(n))]
                wanted = [Recipe(preset).wanted(p, as_codes=False).type for p in places(model, golden["layers"], kind)]
                assert wanted == expected, (name, preset, kind)
                found |= set(wanted) if kind not in ("token_embd", "output") else set()
            assert needs == any(type in WRITTEN and WRITTEN[type].needs_imatrix for type in found), (name, preset)


@pytest.mark.parametrize(
    ("preset", "kind", "expected"),
    [("IQ4_XS", "ffn_down", "IQ4_XS"), ("IQ3_XXS", "ffn_down", "IQ3_XXS"), ("IQ3_XXS", "attn_v", "IQ3_XXS")],
)
def test_with_an_imatrix_some_tensors_get_no_more_bits(preset, kind, expected):
    assert Recipe(preset).wanted(place(kind), as_codes=False, imatrix=True).type == expected
    assert Recipe(preset).wanted(place(kind), as_codes=False).type != expected


def test_the_most_specific_option_wins():
    recipe = Recipe(
        "Q4_K_M", output_type="f16", token_embd_type="q4_0", actorder_type="q6_k",
        tensor_types=[("attn", "Q5_0"), (r"blk\.3\.attn_q", "BF16")],
    )  # fmt: skip
    assert recipe.wanted(place("attn_q", 3), as_codes=True) == Wanted("forced", "BF16")
    assert recipe.wanted(place("attn_q", 4), as_codes=True) == Wanted("forced", "Q5_0")
    assert recipe.wanted(place("output", None), as_codes=False) == Wanted("forced", "F16")
    assert recipe.wanted(place("token_embd", None), as_codes=False) == Wanted("forced", "Q4_0")
    assert recipe.wanted(place(), as_codes=True, act_order=True) == Wanted("forced", "Q6_K")


def test_tensor_types_may_be_a_dict():
    pairs = [("attn", "Q5_0"), (r"blk\.3\.attn_q", "BF16")]
    assert Recipe("Q4_K", tensor_types=dict(pairs)) == Recipe("Q4_K", tensor_types=pairs)


def test_rows_that_do_not_hold_blocks_fall_back_as_in_llama_cpp():
    assert for_rows("Q4_K", 288) == "Q5_0"
    assert for_rows("Q6_K", 288) == "Q8_0"
    assert for_rows("Q2_K", 512) == "Q2_K"
    assert for_rows("IQ2_XS", 288) == "IQ4_NL"
    assert for_rows("TQ2_0", 288) == "Q4_0"
    assert for_rows("Q8_0", 80) == "F16"
    assert for_rows("F16", 80) == "F16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "Q4_X"}, "unknown type 'Q4_X': choose one of auto, exact, Q2_K"),
        ({"output_type": "Q4_K_M"}, "unknown tensor type 'Q4_K_M'"),
        ({"tensor_types": [("(", "Q4_K")]}, "not a regular expression"),
        ({"tensor_types": [("x", "Q9")]}, "unknown tensor type 'Q9'"),
        ({"actorder_type": "F16"}, "not a block type"),
        ({"tensor_types": ["attn=Q5_0"]}, "tensor_types 'attn=Q5_0': must be a regular expression and a type"),
        ({"tensor_types": "attn=Q5_0"}, "tensor_types 'a': must be a regular expression and a type"),
        ({"tensor_types": {"attn": 5}}, "tensor_types ('attn', 5): must be a regular expression and a type"),
    ],
)
def test_unknown_types_are_named_with_the_known_ones(options, message):
    with pytest.raises(BridgeError) as error:
        Recipe(**options)
    assert message in str(error.value)

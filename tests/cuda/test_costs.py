"""The counts of docs/measurements/cuda.md are those of the code."""

from __future__ import annotations

import re

import pytest

from tests.support import ptx
from tests.support.gpu import costs, step_costs
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.proof("docs/measurements/cuda.md"),
]

PAGE = ROOT / "docs" / "measurements" / "cuda.md"


def in_the_docs(what: str) -> str:
    """The last cell of a row."""
    row = re.search(rf"\| {re.escape(what)}.*\| (.+?) \|\n", PAGE.read_text())
    assert row is not None, what
    return row[1]


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        pytest.param(kind, group, marks=[] if (kind, group) == ("q8_0", 4) else [pytest.mark.exhaustive])
        for kind in costs.KINDS
        for group in costs.GROUPS
    ],
)
def test_instructions_of_attention(kind: str, group: int) -> None:
    row = f"attention of a token, {kind}, {group} query heads a key: instructions a tile"
    assert in_the_docs(row) == str(costs.attention_loop(kind, group))


def test_products_of_prompts_modelled() -> None:
    docs = PAGE.read_text()
    assert [row for row in costs.prompt_rows() if row not in docs] == []


def test_launches_of_a_layer_of_experts() -> None:
    row = "a token in a layer of experts of `bridge.nn`, 8 of them chosen: our launches, torch's"
    assert in_the_docs(row) == "{}, {}".format(*costs.experts_layer(at_once=True))


@pytest.mark.parametrize("name", step_costs.MODELS)
def test_a_step_takes_no_more_launches_than_the_docs_say(name: str) -> None:
    docs = PAGE.read_text()
    found = re.search(rf"\| {re.escape(name)} \| (\d+) \+ (\d+) \+ (\d+) \|", docs)
    assert found is not None
    _, types = step_costs.described(name)
    counts = step_costs.launches(step_costs.MODELS[name], types)
    assert all(count <= int(most) for count, most in zip(counts, found.groups(), strict=True)), counts
    assert step_costs.row_of_four(name) in docs


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [("Llama 3 8B", 4.92e9), ("Gemma 3 4B", 2.49e9), ("Qwen3-30B-A3B", 18.56e9), ("gpt-oss-20b", 12.1e9),
     ("DeepSeek V2 Lite", 10.36e9)],
)  # fmt: skip
def test_models_whose_steps_are_modelled_have_the_size_of_published_files(model: str, nbytes: float) -> None:
    outline, types = step_costs.described(model)
    assert step_costs.file_bytes(outline, types) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", costs.LENGTHS)
def test_launches_and_bytes_of_prompts(n: int) -> None:
    ours, torchs, nbytes = costs.prompt_layer(n)
    row = f"a prompt of {n} tokens: our launches, torch's, MB a token"
    assert in_the_docs(row) == f"{ours}, {torchs}, {nbytes / 1e6:.2f}"

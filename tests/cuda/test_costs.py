"""The counts of docs/speed.md are those of the code."""

from __future__ import annotations

import re

import pytest

from tests.support import ptx
from tests.support.gpu import costs
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.proof("docs/speed.md"),
]


def in_the_docs(what: str) -> str:
    """The last cell of a row."""
    found = re.search(rf"\| {re.escape(what)}.*\| (.+?) \|\n", (ROOT / "docs" / "speed.md").read_text())
    assert found is not None, what
    return found[1]


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
    docs = (ROOT / "docs" / "speed.md").read_text()
    assert [row for row in costs.prompt_rows() if row not in docs] == []


def test_launches_of_a_layer_of_experts() -> None:
    row = "a token in a layer of experts of `bridge.nn`, 8 of them chosen: our launches, torch's"
    assert in_the_docs(row) == "{}, {}".format(*costs.experts_layer(at_once=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", costs.LENGTHS)
def test_launches_and_bytes_of_prompts(n: int) -> None:
    ours, torchs, nbytes = costs.prompt_layer(n)
    row = f"a prompt of {n} tokens: our launches, torch's, MB a token"
    assert in_the_docs(row) == f"{ours}, {torchs}, {nbytes / 1e6:.2f}"

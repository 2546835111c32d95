"""Patterns out of configs and adapters: a comparison ends, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoint.adapter import read_adapter
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.labels.schemes import matches
from bridge.conversion.planning.recipe import Recipe
from bridge.errors import BridgeError
from bridge.system import patterns
from bridge.system.patterns import matched, pattern_problem
from tests.support.adapters import low_rank, write_adapter

ENDLESS = "(a|a)*$"
NAME = "a" * 40 + "!"


def test_patterns_are_found_as_by_re() -> None:
    name = "model.layers.12.mlp.up_proj"
    assert matched("match", r"model\.layers\.1\d", name, None)
    assert not matched("match", r"layers", name, None)
    assert matched("search", r"layers", name, None)
    assert matched("fullmatch", r"(.*\.)?(up_proj)", name, None)
    assert not matched("fullmatch", r"layers", name, None)
    assert matched("match", r"^(?!.*lm_head).*", name, None)


def test_repeats_one_after_the_other_are_not_nested() -> None:
    assert matched("fullmatch", r"\d{4}" * 8, "1234" * 8, None)


@pytest.mark.parametrize("pattern", ["(", "*up", "a{99999999999}", "(" * 5000, "(?:(?:a{1000}){1000}){1000}"])
def test_what_is_no_pattern_matches_nothing(pattern: str) -> None:
    assert pattern_problem(pattern)
    assert not matched("search", pattern, "aaa", None)


def of_adapter(key: str, folder: Path) -> Any:
    return read_adapter(write_adapter(folder, low_rank({NAME: (8, 8)}), **{key: {ENDLESS: 4}}))


PLACES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dynamic": (lambda f: QuantConfig(dynamic={f"-:{ENDLESS}": {}}, source=f).for_module(NAME), ""),
    "extra_config": (
        lambda f: QuantConfig(raw={"extra_config": {ENDLESS: {"a": 1}}}, source=f).for_module(NAME),
        "",
    ),
    "target": (lambda f: matches(NAME, [f"re:{ENDLESS}"], f), ""),
    "tensor_types": (lambda f: Recipe(tensor_types=((ENDLESS, "Q8_0"),)).check([NAME]), "tensor_types"),
    "rank_pattern": (lambda f: of_adapter("rank_pattern", f), "adapter_config.json: rank_pattern"),
    "alpha_pattern": (lambda f: of_adapter("alpha_pattern", f), "adapter_config.json: alpha_pattern"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_pattern_that_backtracks_without_end_is_an_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.02)
    call, where = PLACES[place]
    with pytest.raises(BridgeError, match=r"takes more than 0\.02 s") as refused:
        call(tmp_path / "folder")
    assert (where or str(tmp_path)) in str(refused.value)
    assert json.dumps(ENDLESS)[1:-1] in str(refused.value)

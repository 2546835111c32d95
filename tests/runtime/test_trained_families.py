"""Small models of all families that were trained for a while: their perplexity is that of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.family_models import MODELS
from tests.support.gpu.small_models import LEFT_TO_LLAMA_CPP
from tests.support.trained_families import LLAMA_CPP_DIFFERS, measured, windows_of

pytest.importorskip("torch")
pytest.importorskip("xllamacpp")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted({*MODELS} - LLAMA_CPP_DIFFERS - LEFT_TO_LLAMA_CPP))
def test_perplexity_is_within_a_thousandth_of_llama_cpps(name: str, wiki_text: str, tmp_path: Path) -> None:
    windows = windows_of(wiki_text[:300_000], 544)
    found = measured(name, windows[32:], windows[:32], 60, tmp_path)
    assert found.ours == pytest.approx(found.floats, rel=1e-5)
    assert found.worst() < 1e-3

"""Float models of random weights, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model(config class, **fields): a float model of random weights."""
    pytest.importorskip("transformers")
    from tests.support.tiny_models import save_model

    @cache
    def make(config_class: str, **fields: Any) -> Path:
        return save_model(tmp_path_factory.mktemp(config_class) / "float", config_class, **fields)

    return make

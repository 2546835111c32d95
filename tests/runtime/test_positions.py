"""Tables of rotary angles are filled as far as tokens have come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.positions import Positions
from tests.conftest import CHECKPOINT


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("positions") / "m.gguf"
    bridge.convert(CHECKPOINT, path)
    return path


@pytest.fixture(scope="module")
def config(path: Path) -> DecoderConfig:
    with bridge.Model.load(path) as model:
        return model.config


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("counts", [[1, 2, 256, 257, 700, 1000], [1000], [999, 1000, 1000], [5000]])
def test_tables_are_filled_up_to_a_position_at_least(config: DecoderConfig, windows: bool, counts: list[int]) -> None:
    if windows:
        config = replace(config, windows=(True,) * config.layers, local_base=100.0)
    factors = np.linspace(1, 3, config.rotated // 2).astype(np.float32)
    whole = [*config.angles(1008, factors), *config.local_angles(1008, factors)]
    positions = Positions(config, 1008, factors)
    tables = [*positions.angles, *positions.local_angles]
    before = [table.ctypes.data for table in tables]
    for count in counts:
        positions.reach(count)
        for table, expected in zip(tables, whole if windows else [*whole[:2], *whole[:2]], strict=True):
            np.testing.assert_allclose(table[:count], expected[:count], atol=1e-6)
        assert not tables[0][max(256, 2 * count) :].any()
    assert [table.ctypes.data for table in (*positions.angles, *positions.local_angles)] == before


def test_a_reply_across_the_first_positions_is_that_of_a_filled_table(path: Path) -> None:
    with bridge.Model.load(path, context=600) as model, bridge.Model.load(path, context=600) as filled:
        filled._decoder._positions.reach(600)
        prompt = [*range(250)]
        assert [*model.generate_tokens(prompt, 20, temperature=0)] == [
            *filled.generate_tokens(prompt, 20, temperature=0)
        ]
        np.testing.assert_array_equal(model.logits([*range(530)], last=1), filled.logits([*range(530)], last=1))

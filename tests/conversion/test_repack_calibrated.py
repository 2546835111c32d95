"""Layers that are quantized with a text on their way from a checkpoint to another format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.conversion.checkpoints.repack import Repacked
from bridge.quantize.settings import Calibration
from tests.support.encode import write_gptq
from tests.support.tiny_models import save_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

MLP = "model.layers.0.mlp"


def products(folder: Path) -> list[np.ndarray]:
    """What the feed-forward network of a layer computes but for its activation: the order of its inner values goes."""
    with bridge.open_checkpoint(folder) as ckpt:
        gate, up, down = (ckpt.read_module(f"{MLP}.{part}_proj").dequantize() for part in ("gate", "up", "down"))
    return [down @ gate, down @ up]


@pytest.mark.parametrize(
    ("bits", "how", "most"),
    [(None, {"gate": "calibrated", "down": "all codes"}, 0.01), (3, {"down": "calibrated"}, 0.2)],
)
def test_calibrated_layers_have_their_rows_in_the_order_of_the_columns_after_them(tmp_path, bits, how, most):
    """Where the act-order of down_proj is undone; not where it is calibrated too."""
    model = save_model(tmp_path / "model", "LlamaConfig")
    write_gptq(tmp_path / "ordered", model, 4, 32, sym=False, desc_act=True, checkpoint_format="gptq_v2")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 300, (8, 32)))
    settings = Calibration(tmp_path / "tokens.npy", length=32, method="gptq", sweeps=0)
    done = bridge.repack(tmp_path / "ordered", tmp_path / "mlx", "mlx", bits=bits, calibrate=settings)
    assert isinstance(done, Repacked)
    layers = {t.name: t for t in done.tensors}
    assert {part: layers[f"{MLP}.{part}_proj.weight"].how for part in how} == how
    assert max(t.nmse for t in done.tensors) < most
    for before, after in zip(products(tmp_path / "ordered"), products(tmp_path / "mlx"), strict=True):
        assert np.square(after - before).sum() / np.square(before).sum() < 2 * most

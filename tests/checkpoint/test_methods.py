"""Every quantization method that the installed transformers knows is read, or refused in one sentence."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from bridge.checkpoint.formats.registry import READERS
from bridge.checkpoint.labels.detect_format import REFUSED
from tests.support.encode import write_folder
from tests.support.refusal import refusal

auto = pytest.importorskip("transformers.quantizers.auto")
METHODS = {
    **{name: {"quant_method": name} for name in auto.AUTO_QUANTIZER_MAPPING},
    "bitsandbytes_4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes_8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    },
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_of_transformers_has_a_reader_or_a_refusal(tmp_path, method):
    """A folder without codes tells which: the reader says what it looked for."""
    floats = {"model.layers.0.mlp.down_proj.weight": np.ones((4, 4), np.float32)}
    said = refusal(write_folder(tmp_path, floats, METHODS[method]))
    if method in REFUSED:
        assert REFUSED[method] in said
    else:
        assert "no tensor of the checkpoint ends in" in said or "has no" in said or "has codes" in said, said


def test_every_reader_opens_with_its_layout():
    """The module's docstring draws the tensors."""
    for method, reader in READERS.items():
        text = sys.modules[reader.__module__].__doc__ or ""
        assert text.count("\n    ") >= 1, method

"""One model quantized by several processes; one of them is killed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import bridge
from bridge.quantize.run.cluster import Spread
from tests.conftest import PATIENCE, ROOT
from tests.scripts.test_convert_on_dask import is_worker
from tests.support.tiny_models import save_model

pytest.importorskip("distributed", reason="the extra dask is not installed")


@pytest.mark.exhaustive
def test_a_killed_workers_sequences_and_layers_are_done_by_the_other(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "LlamaConfig", hidden_size=64, intermediate_size=64)
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (6, 64)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as Dask's workers have it
    try:
        calibrate = bridge.Calibration(tokens, length=64, spread=Spread(parts=3))
        bridge.convert(model, tmp_path / "whole.gguf", type="Q4_0", calibrate=calibrate)
    finally:
        torch.set_num_threads(threads)
    out, layers = tmp_path / "m.gguf", tmp_path / "m.gguf.layers"
    script = ROOT / "scripts" / "quantize_on_dask.py"
    options = ["--type", "Q4_0", "--calibrate", tokens, "--sequence-length", 64, "--parts", 3]
    command = [sys.executable, script, model, out, *options]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    while len(list(layers.glob(f"{'?' * 24}.safetensors"))) < 3:  # some of the first block's
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    workers = [p for p in psutil.Process(process.pid).children(recursive=True) if is_worker(p)]
    assert len(workers) == 2
    workers[0].kill()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not layers.exists()

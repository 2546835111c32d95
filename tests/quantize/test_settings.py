"""The package without what it needs for work: its settings, its names, and the command line's side of both."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

from bridge import quantize
from bridge.quantize.settings import Calibration
from tests.conftest import ROOT


def test_settings_need_neither_torch_nor_numpy():
    code = "import sys, bridge.quantize.settings; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def test_every_public_name_can_be_had():
    assert all(callable(getattr(quantize, name)) for name in quantize.__all__)


def test_the_command_line_can_ask_for_every_setting():
    fields = {f.name: f.metadata.get("flag") for f in dataclasses.fields(Calibration)}
    assert [name for name, flag in fields.items() if flag is None] == ["progress", "spread", "say"]
    assert all(flag.help and flag.metavar and (flag.parse or flag.choices) for flag in fields.values() if flag)

"""Where the project is, and how long tests wait for a process."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # seconds until a process that a test started hangs: no test fails because a machine is slow

"""OpenMP's threads, which PyTorch computes with, beside this project's own (pool.py)."""

import os


def sleep_when_idle() -> None:
    """Let OpenMP's threads sleep when they have nothing to do, unless the environment says otherwise.

    By default they spin, and the pool's threads have fewer cores: on a busy machine, quantizing took 2 to 7 times as
    long. OpenMP reads the variable when PyTorch is loaded, so this has no effect after that.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

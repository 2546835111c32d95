"""How much memory is free, and how much this process has."""

import os
from contextlib import suppress
from pathlib import Path

_LIMITS = Path("/sys/fs/cgroup")  # of the container, in version 2


def free_memory() -> int | None:
    """Bytes that this process can still take without swapping, on Linux; None where it is not known."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_LIMITS / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        limits.append(limit - used)
    return min(limits, default=None)


def resident() -> int:
    """Bytes of this process that are in memory; where the system does not tell, as many as its imports take."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 600 << 20

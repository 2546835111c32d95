"""How many CPUs there are to work on: those of the affinity mask, and no more than a cgroup's quota pays for.

On a Mac, the performance cores: chunks of a product are alike, and the last one would run on a slow core.

A container of 2 CPUs on a machine of 64 (`docker --cpus=2`) sees all 64; the kernel stops its threads when they have
used up the time of two. The quota is in files of the control groups that the process is in, and of those around
them:

    cgroup v2   cpu.max                                  "200000 100000" or "max 100000": microseconds, of so many
    cgroup v1   cpu.cfs_quota_us, cpu.cfs_period_us      200000 or -1, and 100000
"""

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bridge.system.cpu.arm import performance_cores

_PROCESS = Path("/proc/self")  # Linux's description of this process


def usable_cpus() -> int:
    """The CPUs that this process may run on, at least 1; a part of one in a quota counts as a whole one."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = performance_cores() or os.cpu_count() or 1
    quota = _quota()
    return max(1, math.ceil(quota)) if quota < cpus else cpus


@cache
def _quota() -> float:
    """The smallest of the quotas, in CPUs; read once, since that takes most of a millisecond."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    """CPUs' worth of time that each control group around this process may use, where it has a limit."""
    for group in _groups():
        try:
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # the root group has no such file
            continue


def _groups() -> Iterator[Path]:
    """The folders of this process's control groups that may limit its CPUs, and of those that hold them."""
    try:
        mounts = [line.split() for line in (_PROCESS / "mountinfo").read_text().splitlines()]
        paths = [line.split(":", 2) for line in (_PROCESS / "cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in paths:
        for fields in mounts:
            root, mount = fields[3:5]
            kind, options = fields[fields.index("-") + 1], fields[-1]
            if kind == "cgroup" and "cpu" in set(controllers.split(",")) & set(options.split(",")):
                break
            if kind == "cgroup2" and not controllers:
                break
        else:
            continue
        # a container may see its own group as the root of the mount, or a path from outside that is not in it
        inside = Path(path).is_relative_to(root) and ".." not in path
        group = Path(mount) / Path(path).relative_to(root) if inside else Path(mount)
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))

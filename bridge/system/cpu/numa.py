"""On which CPUs threads run where a machine has several NUMA nodes: sockets, or parts of one, with memory of their own.

A thread reads the memory of its own node faster than another's, and a page belongs to the node of the thread that
writes to it first. So threads stay on a node, and copies of weights are written by threads of the node that will read
them. The ways have llama.cpp's names:

    distribute  threads are spread over all nodes, as many on each as it has CPUs, and stay there
    isolate     all threads stay on the node where the first one runs; there are no more than it has CPUs

Linux lists the nodes in /sys/devices/system/node: node0/cpulist holds "0-15,32-47". Only those CPUs count that the
process may run on. With one node, nothing is to be done.
"""

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from bridge.errors import BridgeError

WAYS = ("distribute", "isolate")
_NODES = Path("/sys/devices/system/node")
_THREAD = Path("/proc/thread-self/stat")  # what Linux says of the thread that reads it


def check_way(name: str, how: str) -> str:
    """`how`, if this system can do it; BridgeError, which calls it `name`, where it is not one of WAYS."""
    if how not in WAYS:
        raise BridgeError(f"unknown {name} {how!r}: choose {' or '.join(WAYS)}")
    if sys.platform != "linux":
        raise BridgeError(f"{name} {how}: threads can be kept on NUMA nodes on Linux only")
    return how


def thread_cpus(how: str | None, threads: int) -> list[frozenset[int]] | None:
    """The CPUs that each of so many threads may run on; None where they may run on all."""
    if how is None or len(nodes := _usable_nodes()) < 2:
        return None
    if how == "isolate":
        return [own_node()] * threads
    spread = [node for node in nodes for _ in node]  # a node for each CPU
    return [spread[len(spread) * thread // threads] for thread in range(threads)]


def limited(cpus: int, how: str | None) -> int:
    """As many CPUs, but no more than threads may run on."""
    return min(cpus, len(own_node())) if how == "isolate" else cpus


def keep_on(cpus: frozenset[int]) -> None:
    """Let the calling thread run on these CPUs only, if they still are the process's."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)


@cache
def own_node() -> frozenset[int]:
    """The usable CPUs of the node where this thread ran when it was first asked for."""
    # the fields after the command's name, which may have spaces and brackets, begin with the third; the CPU is the 39th
    cpu = int(_THREAD.read_text().rpartition(")")[2].split()[39 - 3])
    return next(node for node in _usable_nodes() if cpu in node)


def _usable_nodes() -> list[frozenset[int]]:
    """The CPUs of each node that this process may run on; at most one set where the kernel knows of no nodes."""
    usable = os.sched_getaffinity(0)
    folders = [folder for folder in _NODES.glob("node[0-9]*") if (folder / "cpulist").exists()]
    listed = [_numbers((folder / "cpulist").read_text()) for folder in sorted(folders, key=lambda f: int(f.name[4:]))]
    return [frozenset(node & usable) for node in listed or [set(usable)] if node & usable]


def _numbers(text: str) -> set[int]:
    """The numbers of a list as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:  # a node with memory alone has none
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers

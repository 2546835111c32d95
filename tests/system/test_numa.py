"""Threads on the NUMA nodes of a machine that is not here: folders in the place of /sys and /proc."""

import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.runtime.cpu.engines.engine import prepare
from bridge.system.cpu import numa
from bridge.system.threads import pool
from bridge.system.threads.jobs import owner
from tests.support.random_blocks import random_matrix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say where threads run")

NODES = {"node0": "0-3,8-11\n", "node1": "4-7,12-15\n", "node2": "\n"}  # the last has memory alone
FIRST, SECOND = frozenset([0, 1, 2, 3, 8, 9, 10, 11]), frozenset([4, 5, 6, 7, 12, 13, 14, 15])


@pytest.fixture(autouse=True)
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, frozenset[int]]]:
    """A machine of two nodes; the threads that were kept on CPUs, by name."""
    for node, cpus in NODES.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    (tmp_path / "stat").write_text(f"1 (a name) of 2) S {' '.join(map(str, range(4, 39)))} 13 0 0")
    kept: list[tuple[str, frozenset[int]]] = []
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(numa, "_THREAD", tmp_path / "stat")
    monkeypatch.setattr(numa, "own_node", numa.own_node.__wrapped__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cpus: kept.append((threading.current_thread().name, frozenset(cpus)))
    )
    monkeypatch.setattr("bridge.system.cpu.cpus._quota", lambda: 100.0)
    monkeypatch.delenv("BRIDGE_THREADS", raising=False)
    for name in ("_pool", "_wanted", "_numa"):
        monkeypatch.setattr(pool, name, None)
    return kept


def test_distributed_threads_are_spread_over_the_nodes_as_their_cpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.thread_cpus("distribute", 4) == [FIRST, FIRST, SECOND, SECOND]
    assert numa.thread_cpus("distribute", 3) == [FIRST, FIRST, SECOND]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5, 6})
    assert numa.thread_cpus("distribute", 4) == [{0}, {4, 5, 6}, {4, 5, 6}, {4, 5, 6}]


def test_isolated_threads_are_as_many_as_the_cpus_of_the_first_ones_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.get_num_threads() == 16
    monkeypatch.setenv("BRIDGE_NUMA", "isolate")
    assert pool.get_num_threads() == 8
    assert pool.thread_cpus() == [SECOND] * 8
    pool.set_num_threads(2)
    assert pool.thread_cpus() == [SECOND] * 2


@pytest.mark.parametrize("how", numa.WAYS)
def test_one_node_leaves_threads_where_the_system_likes(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 13})
    assert numa.thread_cpus(how, 4) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(numa, "_NODES", tmp_path / "a kernel without nodes")
    assert numa.thread_cpus(how, 4) is None
    assert pool.get_num_threads() == 16


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BridgeError, match="unknown numa 'numactl': choose distribute or isolate"):
        pool.set_numa("numactl")
    monkeypatch.setenv("BRIDGE_NUMA", "all")
    with pytest.raises(BridgeError, match="unknown BRIDGE_NUMA 'all': choose distribute or isolate"):
        pool.get_numa()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BridgeError, match=r"numa distribute: .* on Linux only"):
        pool.set_numa("distribute")


def test_workers_and_copies_are_on_the_node_that_reads_them(two_nodes: list[tuple[str, frozenset[int]]]) -> None:
    pool.set_num_threads(4)
    pool.set_numa("distribute")
    tensor, _ = random_matrix(BLOCKS["Q4_K"], 4096, 2048)
    written: dict[int, frozenset[int]] = {}

    def note(first: int, stop: int) -> None:
        """The file's bytes first..stop were repacked by this thread, which was just moved."""
        name = threading.current_thread().name
        written[first] = next(cpus for thread, cpus in reversed(two_nodes) if thread == name)

    prepare(tensor, note)
    wrong = [first for first, cpus in written.items() if cpus != (FIRST if first < tensor.nbytes // 2 else SECOND)]
    assert len(written) > 4
    assert not wrong
    x = np.ones(2048, np.float32)
    distributed = tensor.matvec(x)
    pool.set_num_threads(1)  # waits for the workers
    workers = {name: cpus for name, cpus in two_nodes if re.fullmatch(r"gguf-bridge-\d", name)}
    assert workers == {"gguf-bridge-1": FIRST, "gguf-bridge-2": SECOND, "gguf-bridge-3": SECOND}
    np.testing.assert_array_equal(tensor.matvec(x), distributed)


@pytest.mark.parametrize(("items", "threads"), [(1, 1), (7, 3), (3, 7), (64, 64), (1000, 48)])
def test_every_item_is_of_the_thread_whose_part_has_it(items: int, threads: int) -> None:
    for item in range(items):
        thread = owner(item, items, threads)
        assert items * thread // threads <= item < items * (thread + 1) // threads

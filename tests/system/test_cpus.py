"""How many CPUs there are to work on: the affinity mask's, and no more than a container's quota pays for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge.system.cpu import cpus
from bridge.system.cpu.cpus import usable_cpus


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /proc/self, read anew every time."""
    monkeypatch.setattr(cpus, "_quota", cpus._quota.__wrapped__)
    monkeypatch.setattr(cpus, "_PROCESS", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    return tmp_path / "proc"


def quota(folder: Path, text: str, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not v1:
        (folder / "cpu.max").write_text(f"{text}\n")
        return
    for part, number in zip(("quota", "period"), text.split(), strict=True):
        (folder / f"cpu.cfs_{part}_us").write_text(f"{number}\n")


def mounts(process: Path, groups: str, *lines: str) -> None:
    (process / "cgroup").write_text(groups)
    first = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
    (process / "mountinfo").write_text("\n".join([first, *(f"35 23 0:30 {line}" for line in lines)]) + "\n")


@pytest.mark.parametrize(
    ("text", "usable"),
    [("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("max 100000", 8), ("1600000 100000", 8), ("", 8)],
)
def test_a_containers_quota_limits_the_cpus(process: Path, tmp_path: Path, text: str, usable: int) -> None:
    quota(tmp_path / "cgroup", text)
    mounts(process, "0::/\n", f"/ {tmp_path}/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate")
    assert usable_cpus() == usable


def test_the_smallest_quota_of_nested_groups_counts(process: Path, tmp_path: Path) -> None:
    mounts(process, "0::/a.slice/b.service\n", f"/ {tmp_path}/cgroup rw shared:9 - cgroup2 cgroup2 rw")
    quota(tmp_path / "cgroup" / "a.slice" / "b.service", "400000 100000")
    assert usable_cpus() == 4
    quota(tmp_path / "cgroup" / "a.slice", "300000 100000")
    assert usable_cpus() == 3
    quota(tmp_path / "cgroup" / "other.slice", "100000 100000")
    assert usable_cpus() == 3


@pytest.mark.parametrize("root", ["/", "/docker/1f", "/elsewhere"])
def test_a_quota_of_version_1_counts_wherever_its_group_is_mounted(process: Path, tmp_path: Path, root: str) -> None:
    mount = tmp_path / "cgroup" / "cpu,cpuacct"
    quota(mount / "docker" / "1f" if root == "/" else mount, "200000 100000", v1=True)
    groups = "5:cpuset:/\n4:cpu,cpuacct:/docker/1f\n0::/\n"
    other = f"/ {tmp_path}/cgroup/cpuset ro - cgroup cgroup rw,cpuset"
    mounts(process, groups, other, f"{root} {mount} ro - cgroup cgroup rw,cpu,cpuacct")
    assert usable_cpus() == 2
    quota(mount / "docker" / "1f" if root == "/" else mount, "-1 100000", v1=True)
    assert usable_cpus() == 8


def test_without_control_groups_the_affinity_mask_alone_counts(process: Path) -> None:
    assert usable_cpus() == 8

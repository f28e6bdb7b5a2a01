"""What is recorded about a process and its machine: the command, affinity and CPU quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.config import CodeEnvConfig
from rstar2.machine import cpu_quota, typed_command, usable_cores


def test_the_command_is_shown_as_it_is_typed() -> None:
    assert typed_command(["/usr/bin/rstar2", "train", "tiny"]) == ["rstar2", "train", "tiny"]
    package = "/lib/rstar2/__main__.py"
    assert typed_command([package, "train"]) == ["python", "-m", "rstar2", "train"]


def test_slots_follow_the_affinity_of_the_process() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
        assert WorkerExecutor(CodeEnvConfig(), "portable").slots == 2
    finally:
        os.sched_setaffinity(0, allowed)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_version_2_is_the_smallest_of_the_group_and_those_above(tmp_path: Path) -> None:
    write(tmp_path / "a/b/cpu.max", "max 100000\n")
    write(tmp_path / "a/cpu.max", "150000 100000\n")
    assert cpu_quota(tmp_path, {"": "/a/b"}) == 1.5
    write(tmp_path / "a/b/cpu.max", "50000 100000\n")
    assert cpu_quota(tmp_path, {"": "/a/b"}) == 0.5


def test_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu/job/cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "cpu/job/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path, {"memory": "/job", "cpu": "/job"}) == 2.0


def test_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "400000 100000\n")
    assert cpu_quota(tmp_path, {"": "/docker/0123"}) == 4.0


@pytest.mark.parametrize("own", [{}, {"": "/"}, {"cpu": "/"}])
def test_no_quota(tmp_path: Path, own: dict[str, str]) -> None:
    assert cpu_quota(tmp_path, own) is None

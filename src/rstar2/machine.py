"""The machine and the versions that a run uses. It imports none of the packages that it reports, so
it takes milliseconds.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import rstar2

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "math-verify",
    "pydantic",
    "numpy",
    "sympy",
    "vllm",
    "ray",
)


def describe() -> dict[str, Any]:
    """Everything needed to repeat a run, as plain JSON values."""
    return {
        "rstar2": rstar2.__version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(total_memory() / 2**30, 1),
        "gpu": _gpu_driver(),
        "command": typed_command(sys.argv),
    }


def typed_command(argv: Sequence[str]) -> list[str]:
    """The command that started a process, as a person would type it."""
    program = Path(argv[0])
    if program.name == "__main__.py":  # python -m PACKAGE
        return ["python", "-m", program.parent.name, *argv[1:]]
    return [program.name, *argv[1:]]


def usable_cores() -> int:
    """Cores this process may use: its affinity (taskset) or, if less, its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(Path("/sys/fs/cgroup"), _own_groups())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(mounted: Path, own: Mapping[str, str]) -> float | None:
    """The smallest CPU quota, in cores, of a cgroup and those above it; None if there is none.

    `own` maps a controller of version 1, or "" for version 2, to the path of this process's group.
    """
    quotas = []
    for controller, path in own.items():
        if controller not in ("", "cpu"):
            continue
        root = mounted / controller
        group = root / path.strip("/")
        while True:
            quotas.append(_quota_of(group))
            if group == root or root not in group.parents:
                break
            group = group.parent
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """The CPU quota of one group in cores; None without one."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _own_groups() -> dict[str, str]:
    """The cgroup of this process per controller; "" is the hierarchy of version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 2) for line in lines)
    return {name: path for _, names, path in fields for name in names.split(",")}


def total_memory() -> int:
    """Bytes of memory this process may use: those of the machine or, if less, of its cgroup."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    return min(pages, limit) if limit else pages


def available_memory() -> int:
    """Bytes available now without swapping (total memory if the system does not report it)."""
    total = total_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            used = _read_int(Path("/sys/fs/cgroup/memory.current"))
            return min(free, total - used) if used else min(free, total)
    return total


def source_commit() -> str | None:
    """Commit of the checkout rstar2 is imported from ("+" if changed); None when installed."""
    root = Path(rstar2.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu_driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None

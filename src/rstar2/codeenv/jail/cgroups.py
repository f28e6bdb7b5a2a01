"""Control groups, version 1 or 2, where this process may create them.

They limit memory and processes, and count the CPU time of all processes of a worker.

A service owns one directory per hierarchy, named after its pid and start time. Each worker has a
directory below it. The next start removes the directories of services that ended (`sweep`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "rstar2-codeenv-"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A place where groups can be created: `parent` is writable and has the controllers."""

    version: int
    controllers: tuple[str, ...]
    parent: str


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The control groups of one worker: one directory (v2) or one per controller (v1)."""

    version: int
    memory: str | None
    pids: str | None
    cpu: str | None = None
    """Only counts CPU time."""

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d for d in (self.memory, self.pids, self.cpu) if d))

    @property
    def complete(self) -> bool:
        return bool(self.memory and self.pids)

    @property
    def cpu_usage_file(self) -> str | None:
        """The file that `cpu_usage` reads."""
        if self.cpu is None:
            return None
        return os.path.join(self.cpu, "cpu.stat" if self.version == 2 else "cpuacct.usage")


def owner_name(pid: int | None = None) -> str:
    """A directory name that identifies its owner by pid and start time, as pids are reused."""
    pid = pid or os.getpid()
    return f"{PREFIX}{pid}-{_start_time(pid)}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def owner_alive(name: str) -> bool:
    """Whether the owner of a directory still runs; names of other programs count as alive."""
    pid, _, started = name.removeprefix(PREFIX).partition("-")
    if not name.startswith(PREFIX) or not pid.isdigit():
        return True
    return started.startswith(_start_time(int(pid))) if started else False


def hierarchies() -> list[Hierarchy]:
    """The hierarchies with memory, pids or cpuacct in which this process can create groups."""
    usable: list[Hierarchy] = []
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        own = _own_paths()
    except OSError:
        return usable
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), [*right.split(), "", "", ""][:3]
        root, mount_point = fields[3], fields[4]
        if kind == "cgroup":
            for controller in {"memory", "pids", "cpuacct"} & set(options.split(",")):
                parent = _usable(mount_point, root, own.get(controller, "/"), (), 1)
                if parent:
                    usable.append(Hierarchy(1, (controller,), parent))
        elif kind == "cgroup2":
            parent = _usable(mount_point, root, own.get("", "/"), ("memory", "pids"), 2)
            if parent:
                usable.append(Hierarchy(2, ("memory", "pids"), parent))
    return usable


def _own_paths() -> dict[str, str]:
    """Path of this process by controller; the unified hierarchy has the empty name."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _usable(
    mount_point: str, root: str, own: str, controllers: tuple[str, ...], version: int
) -> str | None:
    """This process's group or the root, whichever first allows a group with the controllers."""
    relative = os.path.relpath(own, root) if own.startswith(root) else "."
    for parent in dict.fromkeys(
        (os.path.normpath(os.path.join(mount_point, relative)), mount_point)
    ):
        trial = Path(parent, f"{PREFIX}trial-{os.getpid()}")
        try:
            trial.mkdir()
        except OSError:
            continue
        try:
            if version == 1 or _has_controllers(parent, trial, controllers):
                return parent
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                trial.rmdir()
    return None


def _has_controllers(parent: str, trial: Path, controllers: tuple[str, ...]) -> bool:
    """Version 2: enable the controllers for children; a group with processes cannot do this."""
    if not set(controllers) <= set(Path(parent, "cgroup.controllers").read_text().split()):
        return False
    given = set(Path(trial, "cgroup.controllers").read_text().split())
    if not set(controllers) <= given:
        Path(parent, "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
        given = set(Path(trial, "cgroup.controllers").read_text().split())
    return set(controllers) <= given


class ControlGroupTree:
    """The groups of one service: one per worker, all removed at the end."""

    def __init__(self, usable: list[Hierarchy]) -> None:
        self._roots: list[tuple[Hierarchy, Path]] = []
        for hierarchy in usable:
            sweep(hierarchy.parent)
            root = Path(hierarchy.parent, owner_name())
            root.mkdir(exist_ok=True)
            if hierarchy.version == 2:
                enable = " ".join(f"+{c}" for c in hierarchy.controllers)
                (root / "cgroup.subtree_control").write_text(enable)
            self._roots.append((hierarchy, root))

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(str(root) for _, root in self._roots)

    def make(self, name: str, memory_mb: int, processes: int) -> ControlGroup:
        """Create a group with these limits."""
        memory = pids = cpu = None
        version = 1
        for hierarchy, root in self._roots:
            directory = root / name
            directory.mkdir(exist_ok=True)
            version = max(version, hierarchy.version)
            if "memory" in hierarchy.controllers:
                _limit_memory(directory, hierarchy.version, memory_mb << 20)
                memory = str(directory)
            if "pids" in hierarchy.controllers:
                (directory / "pids.max").write_text(str(processes))
                pids = str(directory)
            if "cpuacct" in hierarchy.controllers or hierarchy.version == 2:
                cpu = str(directory)
        return ControlGroup(version, memory, pids, cpu)

    def remove(self, group: ControlGroup) -> None:
        """Remove the directories of a worker that has ended."""
        for directory in group.directories:
            remove(directory)

    def close(self) -> None:
        """Remove all groups of this service; processes left in a group are killed."""
        for _, root in self._roots:
            _remove_tree(root)
        self._roots = []


def _limit_memory(directory: Path, version: int, limit: int) -> None:
    if version == 2:
        (directory / "memory.max").write_text(str(limit))
        with contextlib.suppress(OSError):  # no swap accounting: only memory.max limits then
            (directory / "memory.swap.max").write_text("0")
        return
    (directory / "memory.limit_in_bytes").write_text(str(limit))
    with contextlib.suppress(OSError):  # no swap accounting
        (directory / "memory.memsw.limit_in_bytes").write_text(str(limit))


def raise_limits(group: ControlGroup, memory_mb: int, processes: int) -> None:
    """Give an existing group higher limits."""
    if group.memory:
        directory = Path(group.memory)
        if group.version == 1:  # memory and swap together must stay above memory
            with contextlib.suppress(OSError):  # no swap accounting
                (directory / "memory.memsw.limit_in_bytes").write_text(str(memory_mb << 20))
        _limit_memory(directory, group.version, memory_mb << 20)
    if group.pids:
        Path(group.pids, "pids.max").write_text(str(processes))


def join(group: ControlGroup, pid: int) -> None:
    """Move a process into its groups and check that it has arrived."""
    for directory in group.directories:
        procs = Path(directory, "cgroup.procs")
        procs.write_text(str(pid))
        if str(pid) not in procs.read_text().split():
            raise OSError(f"{procs}: process {pid} was not added to the control group")


def oom_kills(group: ControlGroup) -> int:
    """How often the kernel killed a process of this group because of memory."""
    if not group.memory:
        return 0
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    with contextlib.suppress(OSError):
        for line in Path(group.memory, name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def cpu_usage(descriptor: int) -> float:
    """CPU seconds of all processes that are or were in a group, from its `cpu_usage_file`."""
    text = os.pread(descriptor, 256, 0)
    if text.startswith(b"usage_usec"):
        return int(text.split(maxsplit=2)[1]) / 1e6
    return int(text) / 1e9


def sweep(parent: str) -> None:
    """Remove groups below `parent` whose owners have ended."""
    with contextlib.suppress(OSError):
        for entry in Path(parent).glob(f"{PREFIX}*-*"):
            if not owner_alive(entry.name):
                _remove_tree(entry)


def remove(directory: str) -> None:
    """Remove one group; processes inside are killed."""
    _remove(Path(directory))


def _remove_tree(root: Path) -> None:
    with contextlib.suppress(OSError):
        for child in [entry for entry in root.iterdir() if entry.is_dir()]:
            _remove_tree(child)
    _remove(root)


def _remove(directory: Path, patience_s: float = 2.0) -> None:
    """Kill the processes inside and remove the directory; gives up after `patience_s`."""
    end = time.monotonic() + patience_s
    while directory.exists():
        try:
            directory.rmdir()
            return
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                for pid in (directory / "cgroup.procs").read_text().split():
                    if int(pid) > 0:  # 0 is a process in another PID namespace
                        os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > end:
                return
            time.sleep(0.005)

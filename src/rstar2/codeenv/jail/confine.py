"""The jail of a worker. The worker enters it once; every call inherits it by fork.

strict    Separate mount, PID, network, IPC, UTS and cgroup namespaces (and a user namespace, unless
          the service is root and gives the worker its own unprivileged uid). The root is an empty
          read-only tmpfs into which the interpreter, its packages and the system's libraries are
          bound read-only; no /proc, no /sys, five harmless device nodes. Scratch is a tmpfs with
          limits on bytes and inodes. No capabilities, no_new_privs, a seccomp allow list, Landlock,
          rlimits, and memory and pids control groups where available. After each call every process
          left in the PID namespace is killed.
portable  No namespaces: a seccomp allow list, Landlock (required), rlimits, no capabilities, and
          control groups where available. Calls can start threads but no processes, so nothing
          outlives them, and can signal only themselves. Scratch is a private directory whose size
          is checked from outside about 30 times per second; modes and times cannot be changed.

In both levels calls may start processes only with a PID namespace *and* memory and pids control
groups; without them memory would be limited per process only.

Limitations
- The kernel is shared. A kernel bug reachable through the allowed system calls, or a leak through
  the CPU's caches, breaks both levels. Against stronger adversaries run the service in a VM.
- A program can lie about itself: it can print anything and exit with 0.
- A call may use a core until its CPU or wall limit; memory bandwidth and caches are shared.
- The interpreter, its packages and (strict) /usr/lib, /usr/bin are readable: keep no secrets there.
- Programs can lock (flock) files that they can read, also those that other calls read.
- portable: `stat` reveals file names and metadata outside the allowed paths (not content), and pids
  of other processes with their CPU time; scratch can exceed its limit between two checks, and by
  deleted files that the program keeps open; host name, kernel version and uid are visible; the
  thread limit is shared with the service's user without a pids control group; if root starts the
  service with an interpreter that only root can read, calls keep uid 0 without capabilities,
  confined by Landlock alone (start the service as an ordinary user instead).
- Time, CPU model and the machine's load are visible in both levels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rstar2.codeenv.jail import cgroups, landlock, seccomp, syscalls

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_OTHER_NAMESPACES = NEWNS | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_NOATIME, _MS_BIND, _MS_REC, _MS_PRIVATE = 1024, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/usr/lib", "/usr/lib32", "/usr/lib64",
    "/usr/libx32", "/usr/bin", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
_UID_INSIDE = 1000
_WORKER_FILES, _SESSION_FILES = 1024, 4096
"""Descriptors of a worker; that of a session has two for each member of its family."""
SCRATCH_INSIDE = "/tmp"
GROUP_FD = 204
"""A session worker's descriptor of its control group, where programs may start processes."""
HOLDER_FD = 203
"""In strict, a session worker's descriptor of the directory with the files of all members."""
SESSION_PLACES = ("files", "shm")
"""Directories in the holder that programs see as their scratch directory and /dev/shm."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    """Everything that a worker's jail depends on."""

    level: str
    name: str
    runtime: str
    """The service's private directory: mount point (strict) or parent of scratch (portable)."""
    memory_mb: int
    processes: int
    scratch_mb: int
    uid: int | None
    """Unprivileged uid of the worker if the service is root."""
    group: cgroups.ControlGroup
    session: bool = False
    """The worker serves a session and its branches instead of plain calls."""
    landlock_abi: int = landlock.NEWEST_ABI
    """The newest ABI of Landlock to use; lower only in tests of what older kernels offer."""

    @property
    def forks(self) -> bool:
        """Whether calls may start processes; see the module docstring."""
        return self.level == "strict" and self.group.complete

    @property
    def scratch(self) -> str:
        return SCRATCH_INSIDE if self.level == "strict" else os.path.join(self.runtime, self.name)


def prctl(option: int, *arguments: int) -> int:
    """Call prctl; raises OSError on failure."""
    longs = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return syscalls.checked(syscalls.libc.prctl(option, *longs), f"prctl({option})")


_bare_fork = getattr(syscalls.libc, "_Fork", None) or syscalls.libc.fork


def fork() -> int:
    """Fork without Python's fork hooks, which cost a millisecond in a warm interpreter."""
    pid: int = _bare_fork()
    return pid if pid >= 0 else syscalls.checked(pid, "fork")


more_readable_paths: list[str] = []
"""Further host paths that jailed code may read; set in a zygote before it forks workers."""


@functools.cache
def readable_paths() -> list[str]:
    """The host paths that jailed code may read: interpreter, packages and system libraries."""
    package = str(Path(__file__).resolve().parents[2])
    wanted = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix, package]
    paths: list[str] = []
    for path in (*wanted, *more_readable_paths, *_SYSTEM):
        path = os.path.abspath(path)  # symbolic links are not resolved
        for spelled in (path, os.path.realpath(path)):
            if spelled != "/" and os.path.lexists(spelled) and spelled not in paths:
                paths.append(spelled)
    return paths


def fork_worker(level: str) -> int:
    """Fork a worker. In strict it is PID 1 of a new PID namespace and, unless this process is root,
    in a new user namespace."""
    if level != "strict":
        return fork()
    flags = NEWPID | (0 if os.geteuid() == 0 else NEWUSER) | signal.SIGCHLD
    number = ctypes.c_long(syscalls.numbers()["clone"])
    return syscalls.checked(
        syscalls.libc.syscall(number, ctypes.c_ulong(flags), 0, 0, 0, 0), "clone"
    )


def leave_namespaces(uid: int, gid: int) -> None:
    """In a worker of strict: leave the host's other namespaces. The user is the zygote's."""
    if uid != 0:
        _map_user(uid, gid)
    syscalls.checked(syscalls.libc.unshare(_OTHER_NAMESPACES), "unshare")


def unshare_namespaces() -> None:
    """Leave the host's namespaces; the next child is PID 1 of the new PID namespace."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _OTHER_NAMESPACES | NEWPID
    if uid == 0:
        syscalls.checked(syscalls.libc.unshare(flags), "unshare")
        return
    syscalls.checked(syscalls.libc.unshare(flags | NEWUSER), "unshare(user namespace)")
    _map_user(uid, gid)


def _map_user(uid: int, gid: int) -> None:
    """Map the user that created this user namespace to an ordinary one inside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_UID_INSIDE} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{_UID_INSIDE} {gid} 1")


def enter(spec: JailSpec) -> None:
    """Confine the calling process irrevocably. In strict it must be PID 1 of its namespace."""
    os.umask(0o022)
    readable: list[str | int]
    writable: list[str | int]
    if spec.level == "strict":
        _build_root(spec)
        readable, writable = ["/"], [SCRATCH_INSIDE, "/dev/shm"]
        if spec.session:
            writable.append(HOLDER_FD)
            if spec.forks:
                readable.append(GROUP_FD)
    else:
        readable, writable = [*readable_paths()], [spec.scratch]
    os.umask(0o077)
    os.chdir(spec.scratch)
    _limit_worker(_SESSION_FILES if spec.session else _WORKER_FILES)
    _drop_bounding_set()
    _become(spec.uid)
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(readable, writable, _DEVICES, spec.landlock_abi)
    _drop_capabilities()
    die_with_parent()  # last, because a change of uid clears it
    seccomp.base_filter(spec.level == "strict", spec.session).install()


def prepare(spec: JailSpec) -> None:
    """Compute in the zygote, once, what every worker would compute again after its fork."""
    readable_paths()
    seccomp.base_filter(spec.level == "strict", spec.session)


def keep_to_working_directory(spec: JailSpec) -> None:
    """Confine this process further: of all scratch, only its working directory (portable)."""
    landlock.restrict(readable_paths(), [os.getcwd()], _DEVICES, spec.landlock_abi)


def kill_children(children: Callable[[], set[int]], keep: set[int]) -> None:
    """Kill and reap every child of this process except `keep`, including those that appear now.

    A process with a pending SIGKILL cannot fork, and one that is not reaped still counts towards
    the process limit. So a fork bomb ends when a listing shows only processes that were killed.
    """
    killed: set[int] = set()
    while others := children() - keep:
        for pid in others - killed:
            os.kill(pid, signal.SIGKILL)
        if others <= killed:
            for pid in others:
                os.waitpid(pid, 0)
        killed = others


def die_with_parent() -> None:
    """Send SIGKILL to this process when its parent ends."""
    prctl(_PR_SET_PDEATHSIG, 9)


# --------------------------------------------------------------------------- strict: a new root


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if s is None else s.encode() for s in (source, target, kind)]
    syscalls.checked(
        syscalls.libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None),
        f"mount {source} on {target}",
    )


def _set_attributes(path: str, attributes: int) -> None:
    """Set attributes of all mounts at and below `path` (RDONLY 1, NOSUID 2, NODEV 4)."""
    structure = struct.pack("QQQQ", attributes, 0, 0, 0)
    recursive = ctypes.c_uint(0x8000)
    try:
        syscalls.call(
            "mount_setattr", -100, path.encode(), recursive, structure, ctypes.c_size_t(32)
        )
    except OSError as error:
        if error.errno != 38:
            raise
        _mount("none", path, None, _MS_REMOUNT | _MS_BIND | attributes)  # kernels before 5.12


def _build_root(spec: JailSpec) -> None:
    """Build the read-only root in a tmpfs on the runtime directory and pivot into it."""
    root = spec.runtime
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("rstar2", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=4k,mode=755")
    paths = readable_paths()
    in_scratch = [path for path in paths if path.startswith(f"{SCRATCH_INSIDE}/")]
    for path in paths:
        if path not in in_scratch:
            _bind(path, root)
    for directory in ("tmp", "dev/shm", "etc"):
        Path(root, directory).mkdir(parents=True, exist_ok=True)
    uid = _UID_INSIDE if spec.uid is None else spec.uid
    Path(root, "etc/passwd").write_text(f"user:x:{uid}:{uid}::/tmp:/bin/sh\n")
    for device in _DEVICES:
        target = Path(root, device[1:])
        target.touch()
        _mount(device, str(target), None, _MS_BIND)
        _set_attributes(str(target), _MS_NOSUID | _MS_NOEXEC)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    owner = "mode=1777"
    if spec.uid is not None:  # the worker restores mode and times after each call
        owner += f",uid={spec.uid},gid={spec.uid}"
    if spec.session:
        _mount_session_scratch(spec, root)
    else:
        size = f"size={spec.scratch_mb}m,nr_inodes=2k,{owner}"
        _mount("scratch", f"{root}/tmp", "tmpfs", flags, size)
        size = f"size=8m,nr_inodes=256,{owner}"
        _mount("shm", f"{root}/dev/shm", "tmpfs", flags | _MS_NOEXEC, size)
    _show_in_scratch(in_scratch, root)
    os.chdir(root)
    syscalls.call("pivot_root", b".", b".")
    syscalls.checked(syscalls.libc.umount2(b".", 2), "umount2(old root)")
    os.chdir("/")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    with contextlib.suppress(OSError):  # a visible host name is no reason to refuse
        name = b"jail"
        syscalls.checked(syscalls.libc.sethostname(name, len(name)), "sethostname")


def _show_in_scratch(paths: list[str], root: str) -> None:
    """Show an interpreter that is installed below /tmp inside scratch, read-only.

    The directories on the way are not part of scratch: a program could change their modes.
    """
    aside = f"{root}/.installed"
    for path in paths:
        _bind(path, aside)
    for name in sorted({path.split("/")[2] for path in paths}):
        source, target = Path(aside, "tmp", name), Path(root, "tmp", name)
        if source.is_symlink():
            target.symlink_to(source.readlink())
            continue
        target.mkdir()
        _mount(str(source), str(target), None, _MS_BIND | _MS_REC)
        _set_attributes(str(target), _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _mount_session_scratch(spec: JailSpec, root: str) -> None:
    """Mount one tmpfs for the files of a family: the worker sees all of it, programs two places.

    The worker keeps a descriptor of the whole; no path leads there any more.
    """
    holder = f"{root}/.sessions"
    os.mkdir(holder)
    size = f"size={spec.scratch_mb}m,nr_inodes=8k,mode=700"
    _mount("scratch", holder, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    targets = (f"{root}/tmp", f"{root}/dev/shm")
    for place, target in zip(SESSION_PLACES, targets, strict=True):
        source = f"{holder}/{place}"
        os.mkdir(source)
        os.chmod(source, 0o1777)
        _mount(source, target, None, _MS_BIND)
        if spec.uid is not None:
            os.chown(source, spec.uid, spec.uid)
    _set_attributes(targets[1], _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if spec.uid is not None:
        os.chown(holder, spec.uid, spec.uid)
    opened = os.open(holder, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(opened, HOLDER_FD, inheritable=False)
    os.close(opened)
    syscalls.checked(syscalls.libc.umount2(holder.encode(), 2), "umount2(session scratch)")
    os.rmdir(holder)


def _bind(path: str, root: str) -> None:
    """Bind a host path read-only at the same place in the new root."""
    target = Path(root, path[1:])
    if target.exists() or target.is_symlink():
        return  # part of a path that is already bound
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        target.symlink_to(os.readlink(path))
        return
    if os.path.isdir(path):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(path, str(target), None, _MS_BIND | _MS_REC)
    _set_attributes(str(target), _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


# --------------------------------------------------------------------------- both levels


def _limit_worker(descriptors: int) -> None:
    """Set hard limits that the worker and all its calls share."""
    limits = {
        resource.RLIMIT_CORE: 1,  # unlike 0, it also keeps the kernel from starting a crash handler
        resource.RLIMIT_NOFILE: descriptors,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    for which, value in limits.items():
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))


def _become(uid: int | None) -> None:
    """Give up root irrevocably; None means that the process is already unprivileged."""
    if uid is None:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _drop_bounding_set() -> None:
    """Prevent exec from restoring capabilities; needs privileges that are dropped next."""
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # EINVAL: no such capability; EPERM: there was none to drop


def _drop_capabilities() -> None:
    """Empty the ambient, permitted, effective and inheritable sets."""
    with contextlib.suppress(OSError):  # kernels before 4.3
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)
    syscalls.call("capset", header, bytes(24))

"""A disposable cell around the code environment under attack: an escape from the jail ends here.

    python cell.py VARIANT                      requests on stdin, answers on stdout (JSON lines)
    python cell.py VARIANT PROGRAM ARGUMENTS    another Python program instead, such as a benchmark

The cell has its own PID, mount, network, IPC, UTS and cgroup namespaces (and a user namespace
unless started by root), an overlay of the root on a tmpfs, which discards all writes, its own
/proc, /dev and /tmp, and memory and pids control groups where available. Inside it,
`cell_server.py` starts the executor and the canaries. The cell ends with its first process.

Variants: root (control groups are available), user (ordinary user, no control groups).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rstar2.codeenv.jail import cgroups, confine, syscalls

HERE = Path(__file__).resolve().parent
USER = 20_000 + os.getpid() % 30_000
"""A user per cell: the kernel counts processes per user, also across cells."""
_FLAGS = (
    confine.NEWNS | confine.NEWPID | confine.NEWNET
    | confine.NEWIPC | confine.NEWUTS | confine.NEWCGROUP
)  # fmt: skip


def mount(
    source: str, target: str | Path, kind: str | None, flags: int = 0, data: str = ""
) -> None:
    result = syscalls.libc.mount(
        source.encode(),
        str(target).encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    syscalls.checked(result, f"mount {source} on {target}")


def main(variant: str) -> int:
    """Outside: control groups, namespaces, then wait for the cell to end."""
    tree = cgroups.ControlGroupTree(cgroups.hierarchies() if os.geteuid() == 0 else [])
    base = tempfile.mkdtemp(prefix="rstar2-cell-")
    try:
        group = tree.make("cell", 3000, 1500)
        pid = os.fork()
        if pid == 0:
            enter(variant, base, group)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    finally:
        tree.close()
        os.rmdir(base)  # noqa: PTH106 - empty: everything was mounted over it


def enter(variant: str, base: str, group: cgroups.ControlGroup) -> NoReturn:
    """Intermediate process: join the groups, unshare the namespaces, fork the cell's init."""
    try:
        confine.die_with_parent()
        cgroups.join(group, os.getpid())
        if os.geteuid() == 0:
            syscalls.checked(syscalls.libc.unshare(_FLAGS), "unshare")
        else:
            uid, gid = os.geteuid(), os.getegid()
            syscalls.checked(syscalls.libc.unshare(_FLAGS | confine.NEWUSER), "unshare")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{USER} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{USER} {gid} 1")
        pid = os.fork()
        if pid == 0:
            confine.die_with_parent()
            init(variant, Path(base))
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    except BaseException as error:  # noqa: BLE001 - reported to the fixture
        print(f"no cell: {error}", file=sys.stderr, flush=True)
        os._exit(3)


def init(variant: str, base: Path) -> NoReturn:
    """PID 1 of the cell: build its root, start the server, reap, end with the server."""
    try:
        build_root(base, variant)
        bring_up_loopback()
        pid = os.fork()
        if pid == 0:
            if variant == "user" and os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(USER, USER, USER)
                os.setresuid(USER, USER, USER)
            program = sys.argv[2:] or [str(HERE / "cell_server.py")]
            os.execv(sys.executable, [sys.executable, *program])
    except BaseException as error:  # noqa: BLE001 - reported to the fixture
        print(f"no cell: {error}", file=sys.stderr, flush=True)
        os._exit(3)
    for descriptor in (0, 1):
        os.close(descriptor)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def build_root(base: Path, variant: str) -> None:
    """An overlay of the host's root that discards writes, with a new /proc, /dev and /tmp."""
    private, recursive = 1 << 18, 16384
    paths = (*confine.readable_paths(), str(HERE.parents[1]))
    needed = sorted(path for path in paths if Path(path).exists())  # parents first
    mount("none", "/", None, private | recursive)
    mount("cell", base, "tmpfs", 0, "size=1g,mode=755")
    upper, work, root = (base / name for name in ("upper", "work", "root"))
    for directory in (upper, work, root):
        directory.mkdir()
    mount("cell", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in needed:
        show(path, root)
    for path in needed:
        for parent in [*Path(path).resolve().parents][:-1]:
            inside = root / str(parent)[1:]
            if os.geteuid() == 0 and not inside.stat().st_mode & 0o001:
                inside.chmod(inside.stat().st_mode | 0o001)  # in the overlay only
    mount("proc", root / "proc", "proc")
    mount("dev", root / "dev", "tmpfs", 0, "size=1m,mode=755")
    for name in ("null", "zero", "full", "random", "urandom"):
        make_device(Path("/dev", name), root / "dev" / name)
    (root / "dev/shm").mkdir()
    mount("shm", root / "dev/shm", "tmpfs", 0, "size=64m,mode=1777")
    (root / "srv/cell").mkdir(parents=True)
    (root / "srv/cell").chmod(0o1777)
    mount("tmp", root / "tmp", "tmpfs", 0, "size=600m,mode=1777")
    for path in needed:  # a checkout or an interpreter below /tmp
        show(path, root)
    if os.geteuid() == 0:
        mount_cgroups(root)
    os.chdir(root)
    syscalls.call("pivot_root", b".", b".")
    syscalls.checked(syscalls.libc.umount2(b".", 2), "umount2")
    os.chdir("/")


def make_device(device: Path, path: Path) -> None:
    """A device file of the cell's own, so that no cell sees the file locks of another one.

    Only root can make one. An ordinary user's cell gets the machine's own file.
    """
    if os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, device.stat().st_rdev)
        path.chmod(0o666)
    else:
        path.touch()
        mount(str(device), path, None, 4096)


def show(path: str, root: Path) -> None:
    """Bind a path that the overlay hides because it is on another file system or mounted over."""
    target = root / path[1:]
    if not target.exists() and not target.is_symlink():
        target.mkdir(parents=True)
        mount(path, target, None, 4096 | 16384)


def mount_cgroups(root: Path) -> None:
    """Mount the cell's own control groups, so that the executor inside can create more."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    version2 = any(
        line.split(" - ")[1].startswith("cgroup2") and "/unified" not in line for line in lines
    )
    where = root / "sys/fs/cgroup"
    where.mkdir(parents=True, exist_ok=True)
    if version2:
        mount("cgroup2", where, "cgroup2")
        (where / "leaf").mkdir()
        (where / "leaf/cgroup.procs").write_text(str(os.getpid()))
        (where / "cgroup.subtree_control").write_text("+memory +pids")
        return
    wanted = {"memory", "pids", "cpu", "cpuacct"}
    for line in lines:
        kind, _, options = line.split(" - ")[1].split()
        together = wanted & set(options.split(","))  # some hosts mount cpu and cpuacct as one
        if kind == "cgroup" and together - {"cpu"}:
            name = ",".join(sorted(together))
            (where / name).mkdir(exist_ok=True)
            mount("cgroup", where / name, "cgroup", 0, name)


def bring_up_loopback() -> None:
    """SIOCSIFFLAGS with IFF_UP on lo."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", 1))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[2:3] = [str(Path(program).resolve()) for program in sys.argv[2:3]]
    sys.exit(main(sys.argv[1]))

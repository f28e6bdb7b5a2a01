"""Runs a command as a container's default profile does: `python container.py COMMAND...`.

It becomes an ordinary user (if it is root), forbids namespaces and mounts by seccomp, and executes
the command. An interpreter or a checkout below a directory that only root can enter is made visible
in a private mount namespace first.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

from rstar2.codeenv.jail import confine, seccomp, syscalls

USER = 54_321
DENIED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
}
"""Numbers on x86_64 and aarch64."""
_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 16384, 4096
_NO_NEW_PRIVS = 38


def mount(source: str, target: Path, kind: str | None, flags: int, data: str = "") -> None:
    result = syscalls.libc.mount(
        source.encode(), str(target).encode(), kind.encode() if kind else None,
        ctypes.c_ulong(flags), data.encode() or None,
    )  # fmt: skip
    syscalls.checked(result, f"mount {source} on {target}")


def show(paths: list[Path]) -> None:
    """Replace directories that others cannot enter by ones that hold only the given paths."""
    hidden: dict[Path, list[Path]] = {}
    for path in paths:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                hidden.setdefault(parent, []).append(path)
                break
    if not hidden:
        return
    syscalls.checked(syscalls.libc.unshare(confine.NEWNS), "unshare")
    mount("none", Path("/"), None, _PRIVATE | _RECURSIVE)
    for directory, inside in hidden.items():
        descriptors = {path: os.open(path, os.O_PATH) for path in inside}
        mount("shown", directory, "tmpfs", 0, "size=1m,mode=755")
        for path, descriptor in descriptors.items():
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _RECURSIVE)
            os.close(descriptor)


def forbid_namespaces() -> None:
    """Let the calls of DENIED fail with EPERM."""

    def op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
        return struct.pack("HBBI", code, jt, jf, k)

    column = ("x86_64", "aarch64").index(syscalls.MACHINE)
    code = op(0x20, 4) + op(0x15, syscalls.AUDIT_ARCH[syscalls.MACHINE], 1, 0)
    code += op(0x06, 0x80000000) + op(0x20, 0)
    for pair in DENIED.values():
        code += op(0x15, pair[column], 0, 1) + op(0x06, 0x00050001)
    syscalls.checked(syscalls.libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    seccomp.BpfProgram(code + op(0x06, 0x7FFF0000)).install()


def main(command: list[str]) -> None:
    if os.geteuid() == 0:
        checkout = Path(__file__).resolve().parents[1]
        readable = {Path(path).resolve() for path in [*confine.readable_paths(), str(checkout)]}
        show(sorted(path for path in readable if path.is_dir()))
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    forbid_namespaces()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

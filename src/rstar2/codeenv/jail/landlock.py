"""Landlock: the files that a worker and its calls may access, independent of file permissions.

A ruleset denies every handled right and allows some below the given paths. Rights that the running
kernel does not know are left out; `restrict` returns the ABI that was enforced. Landlock does not
cover stat, chdir, chmod and similar calls: seccomp and the mount namespace restrict those.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from rstar2.codeenv.jail import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK = 1 << 6, 1 << 7, 1 << 8, 1 << 9
_MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = (
    READ | WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK
    | _MAKE_FIFO | _MAKE_SYM | _REFER | _TRUNCATE
)  # fmt: skip
_FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
_TCP = 3
NEWEST_ABI = 6
"""The newest ABI whose rights are used here."""


def abi() -> int:
    """Landlock's ABI version in this kernel; 0 if it is missing, disabled or filtered."""
    try:
        return syscalls.call("landlock_create_ruleset", None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    if version >= 5:
        rights |= _IOCTL_DEV
    return rights


def restrict(
    readable: Iterable[str | int],
    writable: Iterable[str | int],
    devices: Iterable[str],
    newest: int,
) -> int:
    """Confine this thread and its children irrevocably; returns the ABI that was enforced.

    That is the kernel's ABI, but at most `newest`. ABI 6 and later also restrict signals and
    abstract Unix sockets to the new domain.
    """
    version = min(abi(), newest)
    if version == 0:
        raise OSError("landlock: not available in this kernel or container")
    handled = _handled(version)
    scope = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL
    attributes = struct.pack("QQQ", handled, _TCP if version >= 4 else 0, scope)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = syscalls.call("landlock_create_ruleset", attributes[:size], ctypes.c_size_t(size), 0)
    try:
        for paths, rights in ((readable, READ), (writable, WRITE)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        for path in devices:
            _allow(ruleset, path, (READ_FILE | WRITE_FILE | _TRUNCATE) & handled)
        syscalls.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str | int, rights: int) -> None:
    """Allow rights at and below a path, which may be given by a descriptor."""
    flags = os.O_PATH | os.O_CLOEXEC
    descriptor = os.dup(path) if isinstance(path, int) else os.open(path, flags)
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY
        rule = struct.pack("=Qi", rights, descriptor)
        syscalls.call("landlock_add_rule", ruleset, 1, rule, 0)
    finally:
        os.close(descriptor)

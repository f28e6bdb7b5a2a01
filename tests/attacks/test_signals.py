"""Attacks by signals that a program makes the kernel send: none leaves the call.

Every attempt is made against the worker, the service, a process of the same user and their groups.
The canaries notice a signal that arrives; a worker that dies shows as a second attempt.
"""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell

PRELUDE = """
import ctypes, fcntl, os, platform, signal, struct, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == 'x86_64'
def syscall(x86, arm, *arguments):
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *arguments)
TARGETS = [os.getppid(), <victim>, <server>, 1]
TARGETS += [-os.getpgid(0), -<server>, -<victim>]
def attempt(action):
    for target in TARGETS:
        try:
            action(target)
        except (OSError, ValueError, OverflowError):
            pass
"""
OWNED = (
    "def action(pid):\n"
    "    r, w = os.pipe()\n"
    "    {own}\n"
    "    fcntl.fcntl(r, {sig}, {number})\n"
    "    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n"
    "    print('armed')\n"
    "    os.write(w, b'x')\n"
    "attempt(action)"
)
ATTEMPTS = {
    "owner, SIGKILL": OWNED.format(own="fcntl.fcntl(r, 8, pid)", sig=10, number=9),
    "owner, SIGTERM": OWNED.format(own="fcntl.fcntl(r, 8, pid)", sig=10, number=15),
    "owner, SIGIO": OWNED.format(own="fcntl.fcntl(r, 8, pid)", sig=10, number=0),
    "extended owner": OWNED.format(
        own="fcntl.fcntl(r, 15, struct.pack('ii', 1 if pid > 0 else 2, abs(pid)))",
        sig=10,
        number=9,
    ),
    "owner by ioctl": OWNED.format(
        own="fcntl.ioctl(r, 0x8901, struct.pack('i', pid))", sig=10, number=9
    ),
    "owner of a socket": "def action(pid):\n    import socket\n    a, b = socket.socketpair()\n"
    "    fcntl.ioctl(a, 0x8902, struct.pack('i', pid))\n"
    "    fcntl.ioctl(a, 0x5452, struct.pack('i', 1))\n    print('armed')\n    b.send(b'x')\n"
    "    b.send(b'x', socket.MSG_OOB)\nattempt(action)",
    "asynchronous by ioctl": "def action(pid):\n    r, w = os.pipe()\n"
    "    fcntl.fcntl(r, 8, pid)\n    fcntl.ioctl(r, 0x5452, struct.pack('i', 1))\n"
    "    print('armed')\n    os.write(w, b'x')\nattempt(action)",
    "raw system call": "def action(pid):\n    r, w = os.pipe()\n"
    "    for command, value in ((8, pid), (10, 9), (4, 0x2000)):\n"
    "        if syscall(72, 25, r, command, value) < 0:\n            return\n"
    "    print('armed')\n    os.write(w, b'x')\nattempt(action)",
    "lease": "def action(pid):\n    fd = os.open('f', os.O_CREAT | os.O_RDONLY)\n"
    "    fcntl.fcntl(fd, 1024, 0)\n    fcntl.fcntl(fd, 8, pid)\n    fcntl.fcntl(fd, 10, 9)\n"
    "    print('armed')\n    os.open('f', os.O_WRONLY | os.O_NONBLOCK)\nattempt(action)",
    "directory notification": "def action(pid):\n    fd = os.open('.', os.O_RDONLY)\n"
    "    fcntl.fcntl(fd, 10, 9)\n    fcntl.fcntl(fd, 1026, 0x80000000 | 4)\n"
    "    fcntl.fcntl(fd, 8, pid)\n    print('armed')\n    open('g', 'w').close()\nattempt(action)",
    "standard output": "def action(pid):\n    for fd in (1, 2, 3):\n"
    "        fcntl.fcntl(fd, 8, pid)\n        fcntl.fcntl(fd, 10, 9)\n"
    "        fcntl.fcntl(fd, 4, 0x2000)\n        print('armed')\nattempt(action)",
    "timer": "def action(pid):\n    event = ctypes.create_string_buffer(64)\n"
    "    struct.pack_into('qiii', event, 0, 0, 9, 4, abs(pid))\n"
    "    timer = ctypes.c_int()\n"
    "    if syscall(222, 107, 1, event, ctypes.byref(timer)) == 0:\n        print('armed')\n"
    "        spec = struct.pack('qqqq', 0, 0, 0, 1)\n"
    "        syscall(223, 110, timer, 0, spec, None)\n"
    "attempt(action)",
    "message queue": "def action(pid):\n"
    "    if syscall(240, 180, b'queue', 0o102, 0o600, None) >= 0:\n        print('armed')\n"
    "attempt(action)",
    "queued signal": "def action(pid):\n    info = ctypes.create_string_buffer(128)\n"
    "    struct.pack_into('iii', info, 0, 9, 0, -1)\n"
    "    syscall(129, 138, pid, 9, info)\n    syscall(297, 240, pid, pid, 9, info)\n"
    "attempt(action)",
    "thread": "def action(pid):\n    syscall(200, 130, pid, 9)\n"
    "    syscall(234, 131, pid, pid, 9)\nattempt(action)",
    "pidfd": "def action(pid):\n    fd = os.pidfd_open(pid)\n"
    "    signal.pidfd_send_signal(fd, 9)\nattempt(action)",
    "kill": "def action(pid):\n    os.kill(pid, 9)\nattempt(action)",
    "parent death": "def action(pid):\n    print(libc.prctl(1, 9, 0, 0, 0))\nattempt(action)",
    "exit signal": "def action(pid):\n"
    "    for flags in (9, 0x8000 | 9, 0x8000 | 15):\n"
    "        child = syscall(56, 220, flags, 0, 0, 0, 0)\n"
    "        if child == 0:\n            os._exit(0)\nattempt(action)",
    "other group": "def action(pid):\n    os.setpgid(0, abs(pid))\n    os.killpg(0, 9)\n"
    "attempt(action)",
    "terminal": "def action(pid):\n    for fd in range(4):\n"
    "        fcntl.ioctl(fd, termios.TIOCSPGRP, struct.pack('i', abs(pid)))\nattempt(action)",
    "resource limit": "import resource\ndef action(pid):\n"
    "    resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))\n    print('armed')\nattempt(action)",
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_signal_does_not_leave_the_call(cell: Cell, name: str) -> None:
    result = cell.run(PRELUDE + ATTEMPTS[name])
    assert result["attempts"] == 1, result
    assert result["outcome"] in ("ok", "no_output", "killed"), result
    assert "armed" not in result["stdout"], result

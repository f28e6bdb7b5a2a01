"""Attacks on the service itself: its environment, its memory, its sockets, other calls' data."""

from __future__ import annotations

from tests.attacks.attacker import Cell


def test_environment_of_the_service_is_not_inherited(cell: Cell) -> None:
    cell.gets_nothing("import os\nprint(dict(os.environ), os.environb)")


def test_environment_of_the_service_cannot_be_read_from_its_memory_image(cell: Cell) -> None:
    cell.gets_nothing(
        "import ctypes, re\n"
        "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        "i = 0\nwhile environ[i]:\n    print(environ[i])\n    i += 1"
    )


def test_proc_mem_of_the_service_cannot_be_opened(cell: Cell) -> None:
    cell.gets_nothing(
        "with open('/proc/<server>/mem', 'rb') as f:\n"
        "    f.seek(<secret_address>)\n    print('PWNED', f.read(64))"
    )


def test_process_vm_readv_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "class V(ctypes.Structure):\n"
        "    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "buffer = ctypes.create_string_buffer(64)\n"
        "ours = V(ctypes.addressof(buffer), 64)\n"
        "for pid in (<server>, 1):\n"
        "    theirs = V(<secret_address>, 64)\n"
        "    n = libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)\n"
        "    print(n, 'PWNED' if n > 0 else '', buffer.raw if n > 0 else '')"
    )


def test_ptrace_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for pid in (1, os.getppid(), <victim>, <server>):\n"
        "    for request in (16, 0x4206):\n"
        "        if libc.ptrace(request, pid, None, None) == 0:\n            print('PWNED', pid)"
    )


def test_data_of_an_earlier_call_is_not_in_the_memory_of_the_next(cell: Cell) -> None:
    marker = "previous-secret-answer-8675309"
    for _ in range(3):
        cell.run(f"print(input(), '{marker}')", stdin=marker)
    halves = (marker[:14], marker[14:])
    result = cell.run(
        "import ctypes, gc, re\n"
        f"needle = ({halves[0]!r} + {halves[1]!r}).encode()\n"
        "found = []\n"
        "for thing in gc.get_objects():\n"
        "    if isinstance(thing, dict):\n"
        "        found += [v for v in list(thing.values())"
        " if isinstance(v, str) and needle.decode() in v"
        " or isinstance(v, (bytes, bytearray)) and needle in v]\n"
        "print(len([f for f in found if f is not needle]))"
    )
    assert result["outcome"] == "ok", result
    assert result["stdout"] == "0\n"


def test_sockets_of_the_service_are_not_inherited(cell: Cell) -> None:
    result = cell.run(
        "import os, stat\n"
        "for fd in range(256):\n"
        "    try:\n        mode = os.fstat(fd).st_mode\n    except OSError:\n        continue\n"
        "    print(fd, 'socket' if stat.S_ISSOCK(mode) else 'ok')"
    )
    assert result["stdout"].split("\n")[:-1] == ["0 ok", "1 ok", "2 ok", "3 ok"]


def test_worker_cannot_be_killed_by_its_call(cell: Cell) -> None:
    before = cell.run("import os\nprint(os.getppid())")["stdout"]
    cell.gets_nothing(
        "import os, signal\n"
        "for number in (9, 15, 2, 19, 11):\n"
        "    try:\n        os.kill(os.getppid(), number)\n    except OSError:\n        pass\n"
    )
    assert cell.run("import os\nprint(os.getppid())")["stdout"].strip().isdigit()
    assert before


def test_random_numbers_differ_between_calls(cell: Cell) -> None:
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())"
    seen = {cell.run(code)["stdout"] for _ in range(4)}
    numbers = [part for line in seen for part in line.split()]
    assert len(numbers) == len(set(numbers)) == 8

"""Attacks on time and memory: nothing a program does keeps it alive or lets it grow."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import LONG, MARK, Cell


def test_endless_loop_ends_at_the_deadline(cell: Cell) -> None:
    result = cell.run("while True:\n    pass", wall_s=0.4)
    assert result["outcome"] == "timeout"
    assert "0.4 s" in result["message"]


def test_loop_that_ignores_every_signal_ends(cell: Cell) -> None:
    result = cell.run(
        "import signal\n"
        "for s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "while True:\n    pass",
        wall_s=0.4,
    )
    assert result["outcome"] == "timeout"


def test_loop_in_c_ends(cell: Cell) -> None:
    result = cell.run("sum(range(10**12))", wall_s=0.4)
    assert result["outcome"] == "timeout"


def test_regular_expression_that_never_ends_ends(cell: Cell) -> None:
    result = cell.run("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", wall_s=0.4)
    assert result["outcome"] == "timeout"


def test_huge_power_ends(cell: Cell) -> None:
    result = cell.run("x = 7 ** 7 ** 11", wall_s=0.4)
    assert result["outcome"] in ("timeout", "memory")


def test_sleep_ends_at_the_deadline(cell: Cell) -> None:
    assert cell.run("import time\ntime.sleep(60)", wall_s=0.4)["outcome"] == "timeout"


def test_waiting_for_input_that_never_comes_ends(cell: Cell) -> None:
    assert cell.run("input()")["outcome"] == "exception"


def test_exceptions_cannot_hold_off_the_deadline(cell: Cell) -> None:
    result = cell.run(
        "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
        wall_s=0.4,
    )
    assert result["outcome"] == "timeout"


def test_alarm_games_change_nothing(cell: Cell) -> None:
    result = cell.run(
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
        "while True:\n    time.sleep(1)",
        wall_s=0.4,
    )
    assert result["outcome"] == "timeout"


def test_atexit_cannot_prolong_a_call(cell: Cell) -> None:
    result = cell.run("import atexit\n@atexit.register\ndef f():\n    while True: pass", wall_s=0.4)
    assert result["outcome"] == "timeout"


def test_thread_cannot_prolong_a_call(cell: Cell) -> None:
    result = cell.run(
        "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()",
        wall_s=0.4,
    )
    assert result["outcome"] == "timeout"


def test_cpu_time_is_limited_apart_from_wall_time(cell: Cell) -> None:
    result = cell.run("while True:\n    pass", cpu_s=0.3)
    assert result["outcome"] == "timeout"
    assert "CPU" in result["message"]


def test_cpu_time_of_threads_is_added_up(cell: Cell) -> None:
    result = cell.run(
        "import threading, hashlib\nblock = bytes(1 << 20)\n"
        "def f():\n    while True: hashlib.sha256(block)\n"
        "[threading.Thread(target=f).start() for _ in range(4)]",
        cpu_s=0.4,
    )
    assert result["outcome"] == "timeout"


SPIN = "while True: pass"
CHILDREN = {
    "kept": "for _ in range(6):\n    if os.fork() == 0:\n        " + SPIN + "\ntime.sleep(1000)",
    "grandchildren": "for _ in range(6):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        if os.fork() == 0:\n            " + SPIN + "\n        os._exit(0)\n"
    "time.sleep(1000)",
    "never waited for": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "while True:\n    reader, writer = os.pipe()\n"
    "    if os.fork() == 0:\n        end = time.process_time() + 0.05\n"
    "        while time.process_time() < end: pass\n        os._exit(0)\n"
    "    os.close(writer)\n    os.read(reader, 1)\n    os.close(reader)",
    "one after the other": "while True:\n    if os.fork() == 0:\n"
    "        end = time.process_time() + 0.05\n"
    "        while time.process_time() < end: pass\n        os._exit(0)\n    os.wait()",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_cpu_time_of_children_is_added_up(cell: Cell, name: str) -> None:
    code = "\n    ".join(CHILDREN[name].split("\n"))
    result = cell.run(
        f"import os, time\ntry:\n    {code}\nexcept OSError:\n    print('no fork')", cpu_s=0.5
    )
    if cell.forks:
        assert result["outcome"] == "timeout", result
        assert "CPU" in result["message"]
        assert result["cpu_s"] >= 0.5
    else:
        assert result["stdout"] == "no fork\n"
    innocent = cell.run("print(sum(range(10**6)))", cpu_s=1.0)
    assert innocent["outcome"] == "ok", innocent  # it is not charged for the call before it


def test_cpu_time_is_limited_when_it_equals_the_wall_time(cell: Cell) -> None:
    """Several processes or threads use it up sooner."""
    result = cell.run(
        "import threading, hashlib\nblock = bytes(1 << 20)\n"
        "def f():\n    while True: hashlib.sha256(block)\n"
        "[threading.Thread(target=f).start() for _ in range(4)]",
        cpu_s=1.5,
    )
    assert result["outcome"] == "timeout"
    assert "CPU" in result["message"]


MAPPINGS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
def area(protection):
    ctypes.memset(libc.mmap(None, 4096, protection, 0x22, -1, 0), 1, 8)
if os.fork() == 0:
    os._exit(0)
for _ in range(30_000):  # with different protections, so that the kernel does not merge them
    area(3)
    area(7)
for _ in range(31):
    if os.fork() == 0:
        break
time.sleep(1000)
"""
"""60,000 mappings in each of 32 processes."""


def test_slow_teardown_is_charged_to_the_program(cell: Cell) -> None:
    """The kernel needs seconds to end these processes: the call is not executed twice."""
    result = cell.run(MAPPINGS, wall_s=8.0, processes=64, memory_mb=2400)
    assert result["attempts"] == 1
    if cell.forks:
        assert result["outcome"] in ("timeout", "memory"), result
    else:
        assert result["outcome"] == "exception"


def test_limits_cannot_be_raised_again(cell: Cell) -> None:
    cell.gets_nothing(
        "import resource\n"
        "for name in ('AS', 'CPU', 'FSIZE', 'NPROC', 'NOFILE', 'CORE'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    soft, hard = resource.getrlimit(which)\n"
        "    try:\n        resource.setrlimit(which, (hard + 1, hard + 1))\n"
        "        print('PWNED', name)\n    except (ValueError, OSError):\n        pass"
    )


def test_endless_loop_does_not_delay_its_neighbours(cell: Cell) -> None:
    """The quick calls all end while the loop still runs."""
    loop = {"code": f"{MARK}mark()\nwhile True: pass", "limits": LONG}
    quick = [{"code": f"print({i})", "limits": LONG} for i in range(8)]
    answer = cell.ask("runs_beside", endless=loop, orders=quick)
    assert [r["stdout"] for r in answer["results"]] == [f"{i}\n" for i in range(8)]
    assert answer["endless_still_runs"]


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(700 << 20)",
        "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
        "import numpy\nx = numpy.ones((1 << 27,))",
        "x = 'a' * 10\nwhile True:\n    x += x",
        "import mmap\nx = mmap.mmap(-1, 900 << 20)\nx.write(b'x' * (900 << 20))",
    ],
    ids=["bytearray", "list", "numpy", "string", "mmap"],
)
def test_memory_beyond_the_limit_is_refused(cell: Cell, code: str) -> None:
    result = cell.run(code, memory_mb=256)
    assert result["outcome"] in ("memory", "exception")
    assert "emory" in result["message"] + result["traceback"]


def test_memory_of_children_counts_together(cell: Cell) -> None:
    result = cell.run(
        "import os, time\n"
        "def hog():\n"
        "    block = bytearray(100 << 20)\n"
        "    block[::4096] = b'x' * len(block[::4096])\n"
        "    time.sleep(1000)\n"
        "try:\n"
        "    for _ in range(12):\n        if os.fork() == 0:\n            hog()\n"
        "except OSError as error:\n    print('no fork', flush=True)\n    os._exit(0)\n"
        "os.wait()\nprint('one was killed')\n",
        memory_mb=200,
    )
    assert result["outcome"] in ("ok", "memory", "killed")  # and not a timeout: one was killed


def test_hidden_memory_in_files_without_names_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import os\nfds = []\n"
        "for i in range(50):\n    fd = os.memfd_create('x')\n    os.write(fd, bytes(10 << 20))\n"
        "    fds.append(fd)\nprint('PWNED')",
        memory_mb=128,
    )


def test_shared_memory_segments_are_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "if libc.shmget(0, 1 << 28, 0o1600) >= 0 or libc.msgget(0, 0o1600) >= 0"
        " or libc.semget(0, 4, 0o1600) >= 0:\n    print('PWNED')"
    )


def test_memory_cannot_be_locked(cell: Cell) -> None:
    cell.gets_nothing("import ctypes\nif ctypes.CDLL(None).mlockall(3) == 0:\n    print('PWNED')")

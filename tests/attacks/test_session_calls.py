"""What one call of a session leaves behind never makes the next one wrong or `infrastructure`.

Training does not count `infrastructure` against a model, so a program must not be able to cause it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.attacker import Cell, Result


@pytest.fixture
def session(cell: Cell) -> Iterator[str]:
    name = cell.ask("open")
    yield name
    cell.ask("close_session", session=name)


def is_success(result: Result) -> bool:
    return result["outcome"] in ("ok", "no_output")


# --------------------------------------------------------------------------- descriptors


def test_open_files_never_cost_the_output_of_later_calls(cell: Cell) -> None:
    kept = []
    for number in range(244, 253):
        session = cell.ask("open")
        hold = f"x = {number}\nkeep = [open('/dev/null') for _ in range({number})]"
        held = cell.run(hold, session=session)
        kept.append(is_success(held))
        if not kept[-1]:
            assert held["outcome"] == "exception"
            assert "Too many open files" in held["message"], held
        after = cell.run("print(globals().get('x'))", session=session)
        assert (after["outcome"], after["stdout"]) == ("ok", f"{number if kept[-1] else None}\n")
        cell.ask("close_session", session=session)
    assert kept == sorted(kept, reverse=True)
    assert set(kept) == {True, False}


def test_thread_that_opens_files_cannot_make_an_order_arrive_without_them(
    cell: Cell, session: str
) -> None:
    """The thread takes every descriptor between the end of one call and the start of the next."""
    code = (
        "import os, threading\nkeep = []\n"
        "def fill():\n    while True:\n"
        "        try:\n            keep.append(os.open('/dev/null', 0))\n"
        "        except OSError:\n            pass\n"
        "threading.Thread(target=fill, daemon=True).start()"
    )
    for _ in range(3):
        result = cell.run(f"{code}\nprint('shown')", session=session)
        assert result["outcome"] in ("ok", "exception", "killed"), result
        assert result["outcome"] != "ok" or result["stdout"] == "shown\n"
        assert "infrastructure" not in cell.run("print(1)", session=session)["outcome"]


# --------------------------------------------------------------------------- signals and timers

LATE = {
    "alarm": "signal.alarm(1)",
    "alarm with a handler that raises": (
        "def late(*_):\n    raise TimeoutError('late')\n"
        "signal.signal(signal.SIGALRM, late)\nsignal.alarm(1)"
    ),
    "repeated timer": (
        "def late(*_):\n    raise TimeoutError('late')\n"
        "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)"
    ),
    "timer of CPU time": "signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)",
}


@pytest.mark.parametrize("name", LATE)
def test_timer_ends_with_its_call(cell: Cell, session: str, name: str) -> None:
    code = f"import signal\nx = 1\n{LATE[name]}"
    kept = is_success(cell.run(code, session=session))
    if "1e-3" not in code:
        assert kept
        cell.run("import time\ntime.sleep(1.1)")  # the alarm would have fired
    for _ in range(3):
        after = cell.run("globals().get('x')", session=session)
        assert after["value"] == ("1" if kept else None), after
        assert is_success(after)


def test_timeout_by_alarm_works_in_each_call(cell: Cell, session: str) -> None:
    code = (
        "import signal\ndef late(*_):\n    raise TimeoutError('late')\n"
        "signal.signal(signal.SIGALRM, late)\n"
        "try:\n    signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "    while True: sum(range(9))\nexcept TimeoutError as error:\n    print(error)"
    )
    for _ in range(2):
        result = cell.run(code, session=session)
        assert result["stdout"] == "late\n", result


def test_blocked_signals_of_a_program_stay_blocked(cell: Cell, session: str) -> None:
    cell.run("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {10})", session=session)
    cell.run("1 / 0", session=session)
    mask = "sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, set())))"
    assert cell.run(mask, session=session)["value"] == "[10]"


# --------------------------------------------------------------------------- processes


def test_session_goes_on_after_its_process_left_its_group(cell: Cell, session: str) -> None:
    code = (
        "import os\nx = 1\ntry:\n    os.setpgid(0, os.getpgid(os.getppid()))\n    os.setsid()\n"
        "except OSError:\n    pass"
    )
    assert is_success(cell.run(code, session=session))
    assert cell.run("x", session=session)["value"] == "1"
    assert cell.run("1 / 0", session=session)["outcome"] == "exception"
    assert cell.run("x", session=session)["value"] == "1"
    assert is_success(cell.run(code, session=session))
    branch = cell.ask("branch", session=session)
    assert cell.run("x", session=branch)["value"] == "1"
    cell.ask("close_session", session=branch)


def test_child_that_runs_to_the_end_does_not_end_the_call(cell: Cell, session: str) -> None:
    code = (
        "import os, sys\nchild = os.fork()\nif child == 0:\n    x = 'child'\nelse:\n"
        "    os.waitpid(child, 0)\n    x = 'parent'\nprint(x)"
    )
    result = cell.run(code, session=session)
    if not cell.forks:
        assert result["outcome"] == "exception"
        return
    assert (result["outcome"], result["stdout"]) == ("ok", "child\nparent\n")
    assert cell.run("x", session=session)["value"] == "'parent'"


def test_limit_of_processes_cannot_be_lowered(cell: Cell, session: str) -> None:
    code = (
        "import resource\nbefore = resource.getrlimit(resource.RLIMIT_NPROC)\n"
        "try:\n    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\nexcept ValueError:\n"
        "    print('refused')\nprint(resource.getrlimit(resource.RLIMIT_NPROC) == before)"
    )
    assert cell.run(code, session=session)["stdout"] == "refused\nTrue\n"
    assert cell.run("print(1)", session=session)["stdout"] == "1\n"


def test_threads_that_leave_no_room_for_a_copy_are_the_session_s_own_fault(
    cell: Cell, session: str
) -> None:
    code = (
        "import threading, time\nfull = threading.Event()\ndef fill():\n    while True:\n"
        "        try:\n"
        "            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "        except RuntimeError:\n            full.set()\n"
        "threading.Thread(target=fill, daemon=True).start()\nfull.wait()\nprint('full')"
    )
    assert cell.run(code, session=session)["stdout"] == "full\n"
    outcomes = []
    for _ in range(4):
        result = cell.run("print(1)", session=session)
        outcomes.append(result["outcome"])
        assert result["outcome"] == "ok" or "threads" in result["message"], result
    assert set(outcomes) <= {"ok", "killed"}, outcomes


BREAKING = {
    "exit": "import atexit, os, threading, time\nthreading.Timer(0, lambda: (time.sleep(0.3), "
    "os._exit(3))).start()",
    "no memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "patched module": "import socket\nsocket.recv_fds = None",
    "endless copy": "import os, time\nos.register_at_fork(before=lambda: time.sleep(1000))",
    "kill": "import os\nos.register_at_fork(before=lambda: os.kill(os.getpid(), 9))",
    "kill of the thread": "import os, signal\n"
    "os.register_at_fork(before=lambda: signal.raise_signal(9))",
    "kill of the group": "import os\nos.register_at_fork(before=lambda: os.kill(0, 9))",
    "limit of CPU time": "import os, resource\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    "def spin():\n    while True: pass\nos.register_at_fork(before=spin)",
    "timer of the kernel": "import ctypes, os, struct, time\nlibc = ctypes.CDLL(None)\n"
    "timer = ctypes.c_void_p()\nkill = struct.pack('QiiQQQQQQ', 0, 9, 0, *bytes(6))\n"
    "libc.timer_create(0, kill, ctypes.byref(timer))\n"
    "soon = struct.pack('llll', 0, 0, 0, 1000)\n"
    "os.register_at_fork(before=lambda: (libc.timer_settime(timer, 0, soon, None), "
    "time.sleep(0.1)))",
    "child whose end kills": "import ctypes, os, platform, time\n"
    "number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "if ctypes.CDLL(None).syscall(ctypes.c_long(number), 9, 0, 0, 0, 0) == 0:\n"
    "    time.sleep(1000)",
}


@pytest.mark.parametrize("name", BREAKING)
def test_session_that_breaks_itself_is_not_lost_by_the_infrastructure(
    cell: Cell, session: str, name: str
) -> None:
    outcomes = [cell.run(BREAKING[name], session=session)["outcome"]]
    for _ in range(3):
        result = cell.run("import time\ntime.sleep(0.5)\nprint(1)", session=session)
        outcomes.append(result["outcome"])
    assert "infrastructure" not in outcomes, outcomes


@pytest.mark.parametrize("name", ["kill", "limit of CPU time", "exit at the copy"])
def test_branch_of_a_session_that_breaks_itself_is_refused_and_the_session_is_to_blame(
    cell: Cell, session: str, name: str
) -> None:
    leave = "import os\nos.register_at_fork(before=lambda: os._exit(0))"
    cell.run({**BREAKING, "exit at the copy": leave}[name], session=session)
    assert "one of its programs broke its process" in cell.ask("refused_branch", session=session)
    assert cell.run("print(1)", session=session)["outcome"] == "killed"


LEFT_BEHIND = (
    "import os, signal, time\nleft = []\n"
    "def leave(run):\n    reader, writer = os.pipe()\n    if os.fork() == 0:\n"
    "        run()\n        os.write(writer, os.getpid().to_bytes(4, 'little'))\n"
    "        while True: time.sleep(1000)\n"
    "    left.append(int.from_bytes(os.read(reader, 4), 'little'))\n"
    "def ignore():\n    for number in set(signal.valid_signals()) - {9, 19}:\n"
    "        signal.signal(number, signal.SIG_IGN)\n"
    "def daemon():\n    os.setsid()\n    if os.fork() != 0:\n        os._exit(0)\n"
    "for run in (ignore, daemon, os.setpgrp):\n    leave(run)\n"
)


def test_no_process_of_a_call_is_there_in_the_next(cell: Cell, session: str) -> None:
    result = cell.run(LEFT_BEHIND, session=session)
    if not cell.forks:
        assert result["outcome"] == "exception"
        return
    assert is_success(result), result
    look = (
        "seen = []\nfor pid in left:\n    try:\n        os.waitpid(pid, 0)\n"
        "    except ChildProcessError:\n        pass\n"
        "    try:\n        os.kill(pid, 0)\n        seen.append(pid)\n"
        "    except ProcessLookupError:\n        pass\nlen(left), seen"
    )
    assert cell.run(look, session=session)["value"] == "(3, [])"


def test_messages_that_a_program_left_are_no_answer_to_the_next_order(
    cell: Cell, session: str
) -> None:
    forged = (
        "import os, struct\nos.write(4, struct.pack('<cq', b'D', 1))\n"
        "os.write(4, struct.pack('<cq', b'X', 5))\nos.write(4, b'nonsense')\n"
    )
    outcomes = [cell.run(forged, session=session)["outcome"]]
    outcomes += [cell.run("print(1)", session=session)["outcome"] for _ in range(2)]
    assert "infrastructure" not in outcomes, outcomes

"""Attacks from within a session: state is kept for its owner, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.attacker import LONG, MARK, Cell


@pytest.fixture
def session(cell: Cell) -> Iterator[str]:
    name = cell.ask("open")
    yield name
    cell.ask("close_session", session=name)


def test_failed_call_is_rolled_back(cell: Cell, session: str) -> None:
    cell.run("x = [1]", session=session)
    assert cell.run("x.append(2)\n1 / 0", session=session)["outcome"] == "exception"
    assert cell.run("x", session=session)["value"] == "[1]"


def test_endless_call_is_rolled_back(cell: Cell, session: str) -> None:
    cell.run("x = [1]", session=session)
    endless = cell.run("x.append(2)\nwhile True: pass", session=session, cpu_s=0.3)
    assert endless["outcome"] == "timeout"
    assert cell.run("x", session=session)["value"] == "[1]"


def test_crashed_call_is_rolled_back(cell: Cell, session: str) -> None:
    cell.run("x = 1", session=session)
    crashed = cell.run("x = 2\nimport ctypes\nctypes.string_at(0)", session=session)
    assert (crashed["outcome"], crashed["signal"]) == ("killed", 11)
    assert cell.run("x", session=session)["value"] == "1"


def test_memory_bomb_is_rolled_back(cell: Cell, session: str) -> None:
    cell.run("x = 1", session=session)
    assert cell.run("x = bytearray(3 << 30)", session=session)["outcome"] == "memory"
    assert cell.run("x", session=session)["value"] == "1"


def test_background_process_does_not_survive_its_call(cell: Cell, session: str) -> None:
    cell.run(
        "import os, time\nx = 1\ntry:\n    if os.fork() == 0:\n        time.sleep(100)\n"
        "except OSError:\n    pass",
        session=session,
    )
    assert cell.run("x", session=session)["value"] == "1"


CLONE_BOMB = (
    "import ctypes, platform\nn = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "libc = ctypes.CDLL(None)\n"
    "for _ in range(40):\n    libc.syscall(ctypes.c_long(n), 0x8000 | 17, 0, 0, 0, 0)\n"
    "import time; time.sleep(1000)"
)


def test_clone_bomb_does_not_survive_its_call(cell: Cell, session: str) -> None:
    cell.run(CLONE_BOMB, session=session, wall_s=1.0)
    assert cell.run("print(1)")["outcome"] == "ok"


def test_clone_bomb_does_not_survive_its_worker(cell: Cell, session: str) -> None:
    """The server kills a worker that does not answer in time, as on a very busy machine."""
    code = f"import time; time.sleep(1)\n{CLONE_BOMB}"
    cell.ask("kill_session_worker", code=code, session=session, limits=LONG)
    assert cell.run("print(1)")["outcome"] == "ok"


def test_head_that_is_killed_by_its_program_is_reported(cell: Cell, session: str) -> None:
    cell.run("import os\nold = os.getpid()", session=session)
    cell.run("import os\ntry:\n    os.kill(old, 9)\nexcept OSError:\n    pass", session=session)
    result = cell.run("print(1)")
    assert result["outcome"] == "ok"


def test_lies_on_the_head_socket_hurt_only_the_session(cell: Cell, session: str) -> None:
    cell.run(
        "import os\nfor fd in range(3, 10):\n"
        "    try:\n        os.write(fd, b'D' * 9)\n        os.close(fd)\n"
        "    except OSError:\n        pass",
        session=session,
        wall_s=1.0,
    )
    assert cell.run("print('alive')")["stdout"] == "alive\n"


def test_state_of_a_session_is_not_seen_outside(cell: Cell, session: str) -> None:
    cell.run("secret_state = 5", session=session)
    assert cell.run("secret_state")["outcome"] == "exception"


# --------------------------------------------------------------------------- threads

THREADS = {
    "executor": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
        "list(pool.map(abs, [-1, -2]))",
        "list(pool.map(abs, [-3, -4]))",
        "[3, 4]",
    ),
    "timer": (
        "import threading\nfired = []\ntimer = threading.Timer(0.1, fired.append, [1])\n"
        "timer.start()",
        "timer.join()\nfired",
        "[1]",
    ),
    "tqdm": (
        "import tqdm\nfor _ in tqdm.tqdm(range(3)):\n    pass",
        "tqdm.tqdm.monitor.is_alive()",
        "True",
    ),
    "thread": (
        "import threading\nasked, answers = threading.Semaphore(0), []\n"
        "def serve():\n    while True:\n        asked.acquire()\n        answers.append(1)\n"
        "        done.set()\n"
        "done = threading.Event()\nthreading.Thread(target=serve).start()",
        "asked.release()\ndone.wait()\nanswers",
        "[1]",
    ),
}


@pytest.mark.parametrize("name", THREADS)
def test_state_and_threads_survive_a_call_that_leaves_a_thread(
    cell: Cell, session: str, name: str
) -> None:
    first, second, value = THREADS[name]
    assert cell.run(f"x = 1\n{first}", session=session)["outcome"] in ("ok", "no_output")
    assert cell.run("x", session=session)["value"] == "1"
    assert cell.run(second, session=session)["value"] == value


@pytest.mark.slow
def test_state_survives_pandas(cell: Cell, session: str) -> None:
    pytest.importorskip("pandas")
    cell.run("import pandas\ntable = pandas.DataFrame({'a': [1, 2]})", session=session)
    assert cell.run("int(table.a.sum())", session=session)["value"] == "3"


def test_executor_works_after_a_rollback_and_in_a_branch(cell: Cell, session: str) -> None:
    cell.run(THREADS["executor"][0], session=session)
    assert cell.run("1 / 0", session=session)["outcome"] == "exception"
    branch = cell.ask("branch", session=session)
    for name in (session, branch):
        assert cell.run("list(pool.map(abs, [-3]))", session=name)["value"] == "[3]"
    cell.ask("close_session", session=branch)


def test_failed_call_does_not_wait_for_threads_of_earlier_calls(cell: Cell, session: str) -> None:
    cell.run("import threading, time\nthreading.Timer(10000, print).start()", session=session)
    assert cell.run("1 / 0", session=session)["outcome"] == "exception"


def test_threads_rest_between_calls(cell: Cell, session: str) -> None:
    code = "import threading\ndef spin():\n    while True: pass\n"
    cell.run(f"{code}threading.Thread(target=spin, daemon=True).start()", session=session)
    assert cell.ask("session_threads") == ["T", "T"]
    branch = cell.ask("branch", session=session)
    assert cell.ask("session_threads") == ["T", "T", "T"]  # a branch has one thread
    cell.ask("close_session", session=branch)


VFORK = """
import ctypes, os, platform, threading, time
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
libc = ctypes.CDLL(None)
refused = []
def wait_in_vfork():
    if libc.syscall(ctypes.c_long(number), 0x4000 | 17, 0, 0, 0, 0) == 0:
        time.sleep(1000)
    refused.append(1)
threading.Thread(target=wait_in_vfork, daemon=True).start()
while not refused:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        break
    except ChildProcessError:
        pass
"""
"""Ends while a thread waits for a child that does not end; SIGSTOP has no effect on that thread."""


def test_thread_that_cannot_be_stopped_costs_only_its_call(cell: Cell, session: str) -> None:
    cell.run("x = 1", session=session)
    result = cell.run(f"x = 2\n{VFORK}", session=session)
    if cell.forks:
        assert (result["outcome"], result["attempts"]) == ("killed", 1), result
        assert "a thread did not stop" in result["message"]
    assert cell.run("x", session=session)["value"] == ("1" if cell.forks else "2")


def test_session_process_cannot_give_up_to_end_with_its_worker(cell: Cell, session: str) -> None:
    code = (
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "n = {'x86_64': 317, 'aarch64': 277}[platform.machine()]\n"
        "[(call(), ctypes.get_errno()) for call in (\n"
        "    lambda: libc.prctl(1, 0, 0, 0, 0), lambda: libc.prctl(1, 15, 0, 0, 0),\n"
        "    lambda: libc.prctl(4, 1, 0, 0, 0), lambda: libc.syscall(n, 1, 0, 0))]"
    )
    assert cell.run(code, session=session)["value"] == str([(-1, 1)] * 4)
    assert cell.run("x = 1\nx", session=session)["value"] == "1"


# --------------------------------------------------------------------------- CPU time


def test_cpu_time_is_counted_per_call(cell: Cell, session: str) -> None:
    """Earlier calls do not count: the first one alone uses more than the limit of the others."""
    cell.run("import time\nwhile time.process_time() < 0.8: pass", session=session)
    outcomes = {cell.run("1", session=session, cpu_s=0.5)["outcome"] for _ in range(30)}
    assert outcomes == {"ok"}


def test_endless_call_is_ended_by_cpu_time(cell: Cell, session: str) -> None:
    result = cell.run("while True: pass", session=session, cpu_s=0.3)
    assert result["outcome"] == "timeout"
    assert "CPU" in result["message"]


def test_cpu_time_covers_children(cell: Cell, session: str) -> None:
    spin = (
        "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\nos.wait()"
    )
    result = cell.run(spin, session=session, cpu_s=0.5)
    if not cell.forks:  # programs cannot start processes here
        assert result["outcome"] == "exception"
        return
    assert (result["outcome"], "CPU" in result["message"]) == ("timeout", True)
    assert result["cpu_s"] >= 0.5


# --------------------------------------------------------------------------- branches

KILL_EVERYBODY = (
    "import os, signal\nfor call in (\n"
    "    lambda pid: os.kill(pid, 9), lambda pid: os.killpg(pid, 9),\n"
    "    lambda pid: signal.pidfd_send_signal(os.pidfd_open(pid), 9),\n):\n"
    "    for pid in (-1, *range(1, 300), *range(os.getpid() - 60, os.getpid() + 60)):\n"
    "        if pid == os.getpid():\n            continue\n"
    "        try:\n            call(pid)\n"
    "        except (OSError, OverflowError):\n            pass"
)


@pytest.fixture
def branches(cell: Cell, session: str) -> Iterator[list[str]]:
    """Two branches of a session with `x = 1`, a thread and a file `data`."""
    first = THREADS["executor"][0]
    cell.run(f"x = 1\nopen('data', 'w').write('trunk')\n{first}", session=session)
    names = [cell.ask("branch", session=session) for _ in range(2)]
    for number, name in enumerate(names):
        cell.run(f"x += {number}\n{first}", session=name)
    yield names
    for name in names:
        cell.ask("close_session", session=name)


def test_branch_cannot_kill_its_siblings(cell: Cell, session: str, branches: list[str]) -> None:
    one, two = branches
    cell.run(KILL_EVERYBODY, session=one)
    values = [cell.run("x", session=name)["value"] for name in (session, one, two)]
    assert values == ["1", "1", "2"]


def test_branch_cannot_kill_its_siblings_by_its_process_group(
    cell: Cell, session: str, branches: list[str]
) -> None:
    one, two = branches
    group = cell.run("import os\nos.getpgrp()", session=session)["value"]
    attack = (
        f"import os\ntry:\n    os.setpgid(0, {group})\nexcept OSError:\n    pass\nos.kill(0, 9)"
    )
    cell.run(attack, session=one)
    values = [cell.run("x", session=name)["value"] for name in (session, one, two)]
    assert values == ["1", "1", "2"]


def test_program_can_signal_itself_and_its_children(cell: Cell, session: str) -> None:
    own = (
        "import os, signal\ngot = []\nsignal.signal(10, lambda *_: got.append(1))\n"
        "os.kill(os.getpid(), 10)\ngot"
    )
    assert cell.run(own, session=session)["value"] == "[1]"
    cell.run("1 / 0", session=session)
    assert cell.run("os.kill(os.getpid(), 10)\ngot", session=session)["value"] == "[1, 1]"
    if cell.forks:
        child = (
            "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
            "child.terminate()\nchild.wait()"
        )
        assert cell.run(child, session=session)["value"] == "-15"


def test_branches_have_their_own_files(cell: Cell, session: str, branches: list[str]) -> None:
    one, two = branches
    cell.run("import os\nopen('data', 'w').write('one')\nopen('more', 'w').close()", session=one)
    cell.run("import os\nos.remove('data')", session=two)
    read = "import os\n[open(name).read() for name in ('data', 'more') if os.path.exists(name)]"
    values = [cell.run(read, session=name)["value"] for name in (session, one, two)]
    assert values == ["['trunk']", "['one', '']", "[]"]


def test_branch_that_locks_its_scratch_harms_no_sibling(
    cell: Cell, session: str, branches: list[str]
) -> None:
    one, two = branches
    lock = (
        "import os\nos.mkdir('locked')\n"
        "for path in ('locked', 'data', os.getcwd(), '/dev/shm'):\n"
        "    try:\n        os.chmod(path, 0)\n    except OSError:\n        pass"
    )
    cell.run(lock, session=one)
    assert cell.run("open('data').read()", session=two)["value"] == "'trunk'"
    assert cell.run("x", session=one)["value"] == "1"
    cell.ask("close_session", session=one)
    assert cell.run("open('data').read()", session=session)["value"] == "'trunk'"


@pytest.mark.slow
def test_a_session_has_forty_branches(cell: Cell, session: str) -> None:
    cell.run("x = 7", session=session)
    names = [cell.ask("branch", session=session) for _ in range(40)]
    values = [
        cell.run(f"x += {number}\nx", session=name)["value"] for number, name in enumerate(names)
    ]
    assert values == [str(7 + number) for number in range(40)]
    for name in names:
        cell.ask("close_session", session=name)


def test_files_that_cannot_be_copied_refuse_a_branch_by_name(cell: Cell, session: str) -> None:
    deep = "import os\nx = 1\nfor _ in range(200):\n    os.mkdir('d')\n    os.chdir('d')"
    cell.run(deep, session=session)
    refusal = cell.ask("refused_branch", session=session)
    assert "could not be copied" in refusal
    assert cell.run("x", session=session)["value"] == "1"


def test_sparse_files_of_a_branch_stay_sparse(cell: Cell, session: str) -> None:
    """They have 192 MB, more than the scratch space of 128 MB, and take little of it."""
    make = (
        "for number in range(12):\n    with open(f'f{number}', 'wb') as file:\n"
        "        file.truncate(16 << 20)\n        file.seek(5 << 20)\n        file.write(b'data')"
    )
    assert cell.run(make, session=session)["outcome"] in ("ok", "no_output")
    branch = cell.ask("branch", session=session)
    look = (
        "import os\n[(info.st_size >> 20, info.st_blocks < 2048, data[5 << 20 :][:4],"
        " data.count(0)) for number in (0, 11)\n"
        " for info, data in [(os.stat(f'f{number}'), open(f'f{number}', 'rb').read())]]"
    )
    expected = (16, True, b"data", (16 << 20) - 4)
    assert cell.run(look, session=branch)["value"] == str([expected, expected])
    cell.ask("close_session", session=branch)


FILL = (
    "data = bytes(1 << 20)\nfor number in range(300):\n    open(f'n{number}', 'wb').write(data)\n"
    "import time; time.sleep(1000)"
)


def test_call_that_fills_scratch_keeps_files_of_earlier_calls(
    cell: Cell, session: str, branches: list[str]
) -> None:
    """Also those that were put in place just before it, in the same tick of the file clock."""
    one, _ = branches
    cell.run("import os\nos.mkdir('d')\nopen('d/old', 'w').write('old')", session=one)
    cell.run("1", session=session)
    result = cell.run(f"import os\nos.rename('data', 'd/moved')\n{FILL}", session=one)
    assert result["outcome"] == ("exception" if cell.level == "strict" else "killed")
    listing = cell.run(
        "import os\nsorted(os.listdir('d')), [os.path.exists(n) for n in ('data', 'n0')]",
        session=one,
    )
    kept = (["moved", "old"], [False, cell.level == "strict"])  # strict: the size is the limit
    assert listing["value"] == str(kept)


LOCKED = (
    "import os\nos.mkdir('open')\nos.umask(0o777)\nos.mkdir('locked')\nos.mkdir('open/locked')\n"
)


@pytest.mark.parametrize("end", ["", "import time; time.sleep(1000)"])
def test_directory_without_rights_costs_at_most_its_call(
    cell: Cell, session: str, end: str
) -> None:
    """In portable, a directory that cannot be read ends the call, unless the call is short."""
    cell.run("x = 1\nopen('old', 'w').write('old')", session=session)
    cell.run(LOCKED + end, session=session, wall_s=2.0 if end else 60.0)
    look = "import time\ntime.sleep(0.2)\nx, open('old').read()"  # files are counted meanwhile
    assert cell.run(look, session=session)["value"] == "(1, 'old')"
    branch = cell.ask("branch", session=session)
    assert cell.run(look, session=branch)["value"] == "(1, 'old')"
    cell.ask("close_session", session=branch)


# --------------------------------------------------------------------------- losses


def test_full_scratch_and_long_code_keep_the_session(cell: Cell, session: str) -> None:
    fill = (
        "x = 1\ntry:\n    for number in range(300):\n"
        "        open(f'f{number}', 'wb').write(bytes(1 << 20))\nexcept OSError:\n    pass"
    )
    cell.run(fill, session=session)
    cell.run("x = 1", session=session)
    long = cell.run(f"text = '{'z' * 100_000}'\nlen(text), len(input())", "y" * 200_000, session)
    assert long["value"] == "(100000, 200000)"


def test_abandoned_call_is_rolled_back_and_the_session_stays(cell: Cell, session: str) -> None:
    cell.run("x = [1]", session=session)
    code = f"{MARK}x.append(2)\nmark()\nimport time; time.sleep(1000)"
    cell.ask("abandon", code=code, session=session, limits=LONG)
    assert cell.run("x", session=session)["value"] == "[1]"


def test_lost_session_stays_lost_by_name(cell: Cell, session: str) -> None:
    branch = cell.ask("branch", session=session)
    cell.ask("end_session_worker")
    for name in (session, branch, session):
        result = cell.run("x = 1", session=name)
        assert result["outcome"] == "infrastructure"
        assert "is lost" in result["message"]
    assert "session_lost" in cell.ask("refused_branch", session=session)


def test_lies_about_copies_harm_only_the_session(
    cell: Cell, session: str, branches: list[str]
) -> None:
    one, two = branches
    lie = (
        "import os, struct\nfor pid in range(1, 60):\n    try:\n"
        "        os.write(4, struct.pack('<cq', b'C', pid))\n    except OSError:\n        break"
    )
    cell.run(lie, session=one, wall_s=2.0)
    assert [cell.run("x", session=name)["value"] for name in (session, two)] == ["1", "2"]


def test_tiny_wall_limit_keeps_the_session(cell: Cell, session: str) -> None:
    cell.run("x = 1", session=session)
    for _ in range(5):
        assert cell.run("while True: pass", session=session, wall_s=0.001)["outcome"] == "timeout"
    assert cell.run("x", session=session)["value"] == "1"

"""Attacks from within a session: state is kept for its owner, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.attacker import LONG, Cell


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
    assert cell.run("x.append(2)\nwhile True: pass", session=session, wall_s=0.4)["outcome"] == (
        "timeout"
    )
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

"""A supervised child: it answers, is stopped or killed, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rstar2.child import Child, describe_exit
from rstar2.errors import DeadlineError

LONG_S = 60.0
SLEEP = "print('up', flush=True); import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
WITH_GRANDCHILD = (
    "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
    "print(child.pid, flush=True); time.sleep(600)"
)

Start = Callable[..., Child]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts children that run a program, and ends them after the test."""
    children: list[Child] = []

    def make(
        program: str,
        *,
        stdin: bytes | None = None,
        grace_s: float = LONG_S,
        log: Path | None = None,
    ) -> Child:
        child = Child(
            "test",
            [sys.executable, "-c", program],
            parent_death_signal=signal.SIGKILL,
            grace_s=grace_s,
            stdin=stdin,
            reads_line=log is None,
            log=log,
        )
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()
        await child.stop()


async def test_it_answers_and_stops_gracefully(start: Start) -> None:
    child = start(SLEEP)
    assert await child.ready(child.read_line(), LONG_S) == b"up\n"
    assert child.running
    await child.stop()
    await child.stop()
    assert not child.running
    assert child.returncode == -signal.SIGTERM
    assert child.post_mortem() == f"process {child.pid} was killed by SIGTERM"


async def test_a_child_that_ignores_sigterm_is_killed(start: Start) -> None:
    child = start(DEAF, grace_s=0.05)
    await child.ready(child.read_line(), LONG_S)
    await child.stop()
    assert child.returncode == -signal.SIGKILL


async def test_it_leads_a_session_of_its_own(start: Start) -> None:
    child = start("import os; print(os.getsid(0), os.getpgid(0), flush=True)")
    line = await child.ready(child.read_line(), LONG_S)
    assert line.split() == [str(child.pid).encode()] * 2


async def test_stdin_is_given_and_stays_open_until_stop(start: Start) -> None:
    program = (
        "import sys; print(sys.stdin.readline(), end='', flush=True); sys.stdin.read(); sys.exit(7)"
    )
    child = start(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + program, stdin=b"hello\n"
    )
    assert await child.ready(child.read_line(), LONG_S) == b"hello\n"
    assert child.running
    await child.stop()
    assert child.returncode == 7


async def test_no_answer_within_the_deadline_stops_the_child(start: Start) -> None:
    child = start("import time; time.sleep(600)")
    with pytest.raises(DeadlineError, match=r"test: not ready within 0\.2 s"):
        await child.ready(child.read_line(), 0.2)
    assert not child.running


async def test_a_child_that_ends_at_once_answers_with_an_empty_line(start: Start) -> None:
    child = start("raise SystemExit(3)", stdin=b"unread\n")
    assert await child.ready(child.read_line(), LONG_S) == b""
    assert await child.wait() == 3
    assert child.describe_end() == f"process {child.pid} ended with code 3"


async def test_the_post_mortem_has_the_end_of_the_log(start: Start, tmp_path: Path) -> None:
    child = start("import sys; print('out', flush=True); sys.exit('why')", log=tmp_path / "log")
    assert await child.wait() == 1
    assert child.post_mortem().splitlines()[1:] == ["out", "why"]
    assert "ended with code 1" in child.post_mortem()


async def test_two_tasks_may_wait_for_the_same_child(start: Start) -> None:
    child = start(SLEEP)
    waiting = [asyncio.ensure_future(child.wait()) for _ in range(2)]
    await child.ready(child.read_line(), LONG_S)
    await child.stop()
    assert await asyncio.gather(*waiting) == [-signal.SIGTERM] * 2


async def test_a_cancelled_stop_leaves_no_process(start: Start) -> None:
    child = start(DEAF)
    await child.ready(child.read_line(), LONG_S)
    stopping = asyncio.ensure_future(child.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("end", ["stop", "death"])
async def test_its_own_children_end_with_it(start: Start, end: str) -> None:
    child = start(WITH_GRANDCHILD)
    grandchild = int(await child.ready(child.read_line(), LONG_S))
    if end == "stop":
        await child.stop()
    else:
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    wait_for(lambda: not is_alive(grandchild))


PARENT = """\
import signal, sys, time
from rstar2.child import Child
child = Child("x", ["sleep", "600"], parent_death_signal=signal.SIGTERM, grace_s=1)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_takes_its_child_along() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep")
        parent.kill()
        wait_for(lambda: not is_alive(child))


def test_exit_codes_in_words() -> None:
    assert describe_exit(0) == "ended with code 0"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true"
        time.sleep(0.02)

"""`Sandbox` and `AsyncSandbox` on the real jail: calls, files, sessions, threads, forks, exits."""

from __future__ import annotations

import asyncio
import io
import pickle
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rstar2 import AsyncSandbox, CodeEnvError, Outcome, Sandbox, UserError, sandbox
from rstar2.codeenv.client import sandbox_calls
from rstar2.codeenv.client.background import background
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.sandbox_calls import ProgressLine, merge_limits
from rstar2.types import Limits

pytestmark = pytest.mark.slow
SLOTS = 2
"""All tests share one warm server: sandboxes with the same settings do."""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(slots=SLOTS, wall_s=60.0) as box:
        yield box


def client_of(box: Sandbox) -> CodeEnvClient:
    return background().submit(box._calls.client()).result(60)


def server_metric(box: Sandbox, name: str) -> float:
    """A figure of /metrics: what the server itself has counted."""
    endpoint = client_of(box).endpoints[0]
    assert endpoint.owned is not None
    request = urllib.request.Request(
        f"{endpoint.url}/metrics", headers={"authorization": f"Bearer {endpoint.owned.token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    full = f"rstar2_codeenv_{name} "
    (value,) = (line.removeprefix(full) for line in lines if line.startswith(full))
    return float(value)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


# --------------------------------------------------------------------------- calls


def test_a_program_runs_and_its_streams_are_the_result(box: Sandbox) -> None:
    result = box.run(
        "print(input()[::-1])\nimport sys; print('note', file=sys.stderr)", stdin="abc"
    )
    assert (result.outcome, result.stdout, result.stderr) == (Outcome.OK, "cba\n", "note\n")
    assert box.isolation in ("strict", "portable")


def test_a_failure_of_the_program_is_a_result(box: Sandbox) -> None:
    result = box.run("{}['missing']")
    assert result.outcome is Outcome.EXCEPTION
    assert "KeyError: 'missing'" in result.traceback


def test_files_go_in_and_come_out(box: Sandbox) -> None:
    result = box.run(
        "rows = open('data/in.csv').read().split()\nopen('out.txt', 'w').write(rows[1])",
        files={"data/in.csv": b"a,b\n1,2\n", "text": "kept"},
    )
    assert result.files == {"out.txt": b"1,2"}


def test_bad_files_are_refused_by_name(box: Sandbox) -> None:
    with pytest.raises(UserError, match=r"files: '../up' is not a relative path"):
        box.run("1", files={"../up": b""})
    with pytest.raises(UserError, match="files: 'n': must map a path to bytes or text"):
        box.run("1", files={"n": 3})  # type: ignore[dict-item]


def test_limits_hold_for_a_call_and_for_a_sandbox(box: Sandbox) -> None:
    assert box.run("while True: pass", wall_s=0.3).outcome is Outcome.TIMEOUT
    with Sandbox(slots=SLOTS, wall_s=60.0, output_chars=10) as short:
        assert short.run("print(100 * 'x')").truncated.stdout
        assert not short.run("print(100 * 'x')", output_chars=1000).truncated


def test_a_wall_limit_alone_is_also_the_limit_of_cpu_time() -> None:
    limits = merge_limits(Limits(cpu_s=1.0), {"wall_s": 9.0})
    assert (limits.wall_s, limits.cpu_s) == (9.0, 9.0)
    assert merge_limits(limits, {"wall_s": 2.0, "cpu_s": 1.0}).cpu_s == 1.0


def test_a_limit_of_a_sandbox_raises_the_cap_of_its_server() -> None:
    config = Sandbox(wall_s=100.0, memory_mb=64)._calls.config
    assert (config.cap.wall_s, config.cap.cpu_s, config.cap.memory_mb) == (100.0, 100.0, 4096)


@pytest.mark.parametrize(
    "limits", [{"wal_s": 1}, {"wall_s": "1"}, {"memory_mb": 1.5}, {"wall_s": -1}, {"wall_s": 1e9}]
)
def test_a_wrong_limit_is_named(box: Sandbox, limits: dict[str, float]) -> None:
    (name,) = limits
    with pytest.raises(UserError, match=name):
        box.run("1", **limits)  # type: ignore[arg-type]


def test_what_is_not_text_is_refused_and_harms_no_other_call(box: Sandbox) -> None:
    with pytest.raises(UserError, match="code: must be text, is int"):
        box.run(7)  # type: ignore[arg-type]
    assert box.run("print(7)").stdout == "7\n"


def test_a_given_id_is_executed_once(box: Sandbox) -> None:
    first = box.run("import random; print(random.random())", id="chosen")
    assert first.call_id == "chosen"
    assert box.run("import random; print(random.random())", id="chosen").stdout == first.stdout


# --------------------------------------------------------------------------- many


def test_map_keeps_the_order(box: Sandbox) -> None:
    programs = [f"import time; time.sleep({(7 - i) / 100}); print({i})" for i in range(8)]
    assert [int(r.stdout) for r in box.map(programs, concurrency=5)] == list(range(8))
    assert box.map([]) == []


def test_map_takes_one_input_per_program(box: Sandbox) -> None:
    results = box.map(["print(2 * int(input()))"] * 3, stdin=["1", "2", "3"])
    assert [r.stdout for r in results] == ["2\n", "4\n", "6\n"]
    with pytest.raises(UserError, match="stdin: 1 inputs for 2 programs"):
        box.map(["1", "2"], stdin=["x"])
    with pytest.raises(UserError, match="concurrency: 0"):
        box.map(["1"], concurrency=0)


def test_map_raises_the_first_error_itself(box: Sandbox) -> None:
    with pytest.raises(UserError, match="code: must be text"):
        box.map(["print(1)", None])  # type: ignore[list-item]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_map_shows_a_bar_on_a_terminal(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = threading.Event()
    show = ProgressLine.show

    def observed(line: ProgressLine) -> None:
        show(line)
        shown.set()

    terminal = Terminal()
    monkeypatch.setattr(ProgressLine, "show", observed)
    monkeypatch.setattr(sandbox_calls, "SHOW_PROGRESS_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    results = box.map(["import time; time.sleep(0.2)"] * 4)
    assert shown.is_set()
    assert "programs" in terminal.getvalue()
    assert len(results) == 4
    shown.clear()
    box.map(["import time; time.sleep(0.1)"] * 2, progress=False)
    assert not shown.is_set()


# --------------------------------------------------------------------------- sessions


def test_a_session_keeps_state_branches_and_rolls_back(box: Sandbox) -> None:
    with box.session() as session:
        session.run("x = [1]")
        with session.branch() as other:
            other.run("x.append(2)")
            assert session.run("print(x)").stdout == "[1]\n"
            assert other.run("print(x)").stdout == "[1, 2]\n"
        assert session.run("x.append(3)\n1/0").outcome is Outcome.EXCEPTION
        assert session.run("print(x)").stdout == "[1]\n"
    with pytest.raises((UserError, CodeEnvError)):
        session.run("1")


def test_files_of_a_session_stay_and_each_call_returns_what_it_changed(box: Sandbox) -> None:
    with box.session() as session:
        first = session.run("open('a', 'w').write('1')", files={"in/put": b"x"})
        assert first.files == {"a": b"1"}
        second = session.run("print(open('a').read(), open('in/put').read())")
        assert (second.stdout, second.files) == ("1 x\n", {})
        with session.branch() as other:
            assert other.run("open('a', 'a').write('2')").files == {"a": b"12"}
        assert session.run("print(open('a').read())").stdout == "1\n"


def test_sessions_end_with_their_sandbox(box: Sandbox) -> None:
    with Sandbox(slots=SLOTS) as other:
        session = other.session(id="mine")
        assert session.id == "mine"
        session.run("1")
    session.close()
    assert box.session(id="mine").run("print('again')").stdout == "again\n"


# --------------------------------------------------------------------------- reuse


def test_the_group_of_a_call_reaches_the_server(box: Sandbox) -> None:
    """What is reused is tested in tests/codeenv/test_reuse.py."""

    def counted() -> float:
        return sum(
            server_metric(box, f'reuse_total{{result="{result}"}}')
            for result in ("hit", "miss", "refused")
        )

    before = counted()
    assert box.run("print(1)", reuse="one").stdout == "1\n"
    assert [r.stdout for r in box.map(["print(1)"] * 3, reuse="one")] == ["1\n"] * 3
    assert counted() == before + 4
    box.run("print(1)")
    assert counted() == before + 4


def test_a_group_must_have_a_name(box: Sandbox) -> None:
    with pytest.raises(UserError, match="reuse: must have 1 to 256 characters"):
        box.run("1", reuse="")
    with pytest.raises(UserError, match="reuse: must be text, is int"):
        box.run("1", reuse=7)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- where it runs


async def test_both_kinds_work_beside_a_running_loop(box: Sandbox) -> None:
    """A notebook has a running event loop."""
    assert box.run("print(1)").stdout == "1\n"
    async with AsyncSandbox(slots=SLOTS) as other:
        results = await asyncio.gather(*(other.run(f"print({i})") for i in range(20)))
        assert [int(r.stdout) for r in results] == list(range(20))
        assert [r.stdout for r in await other.map(["print(1)", "print(2)"])] == ["1\n", "2\n"]
        async with await other.session() as session:
            await session.run("x = 1")
            async with await session.branch() as branch:
                assert (await branch.run("print(x)")).stdout == "1\n"


async def test_a_cancelled_call_ends_in_the_server_too(box: Sandbox) -> None:
    before = server_metric(box, "abandoned_total")
    async with AsyncSandbox(slots=SLOTS) as other:
        call = asyncio.create_task(other.run("import time; time.sleep(50)", wall_s=60.0))
        await asyncio.to_thread(wait_until, lambda: server_metric(box, "busy_slots") == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        abandoned = before + 1
        await asyncio.to_thread(
            wait_until, lambda: server_metric(box, "abandoned_total") == abandoned
        )
        await asyncio.to_thread(wait_until, lambda: server_metric(box, "busy_slots") == 0)


def test_threads_share_a_sandbox(box: Sandbox) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: box.run(f"print({i})").stdout, range(40)))
    assert results == [f"{i}\n" for i in range(40)]


def test_sandboxes_with_equal_settings_share_a_warm_server(box: Sandbox) -> None:
    with Sandbox(slots=SLOTS) as first:
        name = first.run("1").server
    with Sandbox(slots=SLOTS) as second:
        assert second.run("1").server == name == box.run("1").server


def test_a_sandbox_can_be_sent_to_another_process(box: Sandbox) -> None:
    with pickle.loads(pickle.dumps(box)) as copy:
        assert copy.run("1").server == box.run("1").server


def test_a_server_elsewhere_is_used_by_url_and_token(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = client_of(box).endpoints[0]
    assert endpoint.owned is not None
    with Sandbox(endpoint.url, token=endpoint.owned.token) as remote:
        assert remote.run("print(1)").server == box.run("1").server
    monkeypatch.setenv(sandbox.TOKEN_VARIABLE, endpoint.owned.token)
    with Sandbox([endpoint.url]) as remote:
        assert remote.run("print(1)").stdout == "1\n"
    with pytest.raises(UserError, match="token"), Sandbox(endpoint.url, token="wrong"):
        pass
    assert box.run("print(1)").stdout == "1\n"


def test_a_failed_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2.codeenv.deadlines.CONNECT_S", 0.1)
    lost = Sandbox("http://127.0.0.1:9")
    for _ in range(2):
        with pytest.raises(CodeEnvError, match="no code environment answered"):
            lost.run("1")
    lost.close()


def test_packages_are_for_a_server_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"packages: \['pandas'\] cannot be given with a URL"):
        Sandbox("http://127.0.0.1:9", packages=["pandas"])
    with pytest.raises(UserError, match="packages: 'pandas' must be a list"):
        Sandbox(packages="pandas")
    with pytest.raises(UserError, match="packages: 'no_such_package' is not installed"):
        Sandbox(slots=1, packages=["no_such_package"]).run("1")


def test_packages_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "ownpack-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("ownpack/__init__.py", "answer = 42\n")
    monkeypatch.chdir(tmp_path)
    with Sandbox(slots=1, packages=["./"]) as own:
        assert own.run("import ownpack\nprint(ownpack.answer)", wall_s=60.0).stdout == "42\n"
        assert client_of(own).endpoints[0].health.packages == ["ownpack"]


def test_a_closed_sandbox_says_so() -> None:
    box = Sandbox(slots=SLOTS)
    box.close()
    with pytest.raises(UserError, match="this sandbox is closed"):
        box.run("1")


def test_an_outage_is_an_error_and_never_a_result(box: Sandbox) -> None:
    """The deadline passes before a server could execute the call."""
    with pytest.raises(CodeEnvError, match="deadline"):
        background().submit(
            box._calls.run("import time; time.sleep(30)", "", None, None, {}, deadline_s=0.2)
        ).result(60)


# --------------------------------------------------------------------------- ends


def script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A process that uses a sandbox; it prints the pid of its server first."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\nfrom rstar2 import Sandbox\n"
        "from rstar2.codeenv.client.background import background\n"
        "box = Sandbox(slots=1).__enter__()\n"
        "client = background().submit(box._calls.client()).result()\n"
        "print(client.endpoints[0].owned.pid, flush=True)\n" + body
    )
    return subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def server_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_an_unclosed_sandbox_ends_with_its_process(tmp_path: Path) -> None:
    process = script(tmp_path, "print(box.run('print(6*7)').stdout)")
    pid = server_pid(process)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "42\n\n", "")
    assert not Path(f"/proc/{pid}").exists()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = script(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it\n"
        "print('running', flush=True)\nbox.run('while True: pass', wall_s=60)",
    )
    pid = server_pid(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not Path(f"/proc/{pid}").exists()


def test_the_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process = script(tmp_path, "import time; time.sleep(600)")
    pid = server_pid(process)
    process.kill()
    process.wait(60)
    process.communicate()
    wait_until_gone(pid)


def test_a_forked_child_gets_a_server_of_its_own(tmp_path: Path) -> None:
    process = script(
        tmp_path,
        "mine = box.run('1').server\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    result = box.run('print(3)')\n"
        "    print(result.stdout.strip(), result.server != mine, flush=True)\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1], box.run('1').server == mine)\n",
    )
    pid = server_pid(process)
    out, err = process.communicate(timeout=180)
    assert (out.splitlines(), err) == (["3 True", "0 True"], "")
    wait_until_gone(pid)


def test_a_forked_child_leaves_the_sessions_of_its_parent_alone(tmp_path: Path) -> None:
    process = script(
        tmp_path,
        "from rstar2 import UserError\n"
        "session = box.session()\n"
        "session.run('x = 41')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    box.run('1')\n"
        "    for use in (session.branch, lambda: session.run('x')):\n"
        "        try:\n"
        "            use()\n"
        "        except UserError as error:\n"
        "            print('refused', session.id in str(error), flush=True)\n"
        "    session.close()\n"
        "    box.close()\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1], session.run('print(x + 1)').stdout.strip())\n",
    )
    pid = server_pid(process)
    out, err = process.communicate(timeout=180)
    assert (out.splitlines(), err) == (["refused True", "refused True", "0 42"], "")
    wait_until_gone(pid)

"""`rstar2 codeenv` and `rstar2 doctor` as a user runs them, with a real server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rstar2.cli import main
from rstar2.descriptors import raise_descriptor_limit
from rstar2.types import Limits, Outcome, ToolResult, decode

pytestmark = pytest.mark.slow
START_S = 600


def rstar2(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from rstar2.cli import main; main()", *args],
        input=stdin, capture_output=True, text=True, timeout=START_S,
        env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Calls `rstar2` in this process; (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


LIMITS = ("--output-chars", "9000", "--max-scratch-mb", "300", "--max-file-mb", "8")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "stderr.txt"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[str]:
    """One served code environment for the tests of this file; stopped by SIGTERM.

    It may open 1,024 files, the usual limit.
    """
    command = [sys.executable, "-c", "from rstar2.cli import main; main()", "codeenv", "serve",
               "--port", "0", "--slots", "2", "--json", *LIMITS]  # fmt: skip
    with log.open("w") as stderr:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh", *command],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    yield ready["url"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    process.stdout.close()


@pytest.mark.timeout(START_S)
def test_run_shows_output_and_summary(server: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('out', input())\nprint('err', file=sys.stderr)")
    given = tmp_path / "in.txt"
    given.write_text("42\n")
    done = rstar2("codeenv", "run", str(program), "--stdin", str(given), "--url", server)
    assert done.returncode == 0
    assert done.stdout == "out 42\n"
    assert "err" in done.stderr
    assert "ok" in done.stderr
    assert "isolation" in done.stderr


def test_run_reads_a_program_from_stdin_and_shows_its_value(server: str) -> None:
    done = rstar2("codeenv", "run", "-", "--url", server, stdin="6 * 7")
    assert (done.returncode, done.stdout) == (0, "42\n")


def test_run_json_is_the_whole_result(server: str, command: Command) -> None:
    code, out, _ = command("codeenv", "run", "-", "--json", "--url", server, stdin="print(1/0)")
    assert code == 1
    result = decode(out, ToolResult)
    assert result.outcome is Outcome.EXCEPTION
    assert "ZeroDivisionError" in result.traceback
    assert result.isolation in ("strict", "portable")


def test_run_keeps_the_limits_it_is_given(server: str, command: Command) -> None:
    words = ("codeenv", "run", "-", "--json", "--wall-s", "0.5", "--url", server)
    _, out, _ = command(*words, stdin="while True: pass")
    assert decode(out, ToolResult).outcome is Outcome.TIMEOUT


def test_limits_above_the_cap_are_one_message(server: str, command: Command) -> None:
    words = ("codeenv", "run", "-", "--wall-s", "1e9", "--url", server)
    code, _, err = command(*words, stdin="1")
    assert code == 2
    assert "limits.wall_s" in err
    assert "Traceback" not in err


def test_a_missing_file_is_one_message(command: Command) -> None:
    code, _, err = command("codeenv", "run", "/no/such/file.py")
    assert code == 2
    assert "/no/such/file.py" in err
    assert "Traceback" not in err


def test_serve_refuses_other_machines_without_a_token(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR2_CODEENV_TOKEN", "")
    code, _, err = command("codeenv", "serve", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "token" in err


def test_serve_names_a_port_that_is_taken(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = command("codeenv", "serve", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "port" in err
    assert "Traceback" not in err


def test_serve_refuses_an_unknown_isolation(command: Command) -> None:
    code, _, err = command("codeenv", "serve", "--isolation", "none")
    assert code == 2
    assert "isolation" in err


def test_an_empty_token_file_is_refused(command: Command, tmp_path: Path) -> None:
    empty = tmp_path / "token"
    empty.write_text("\n")
    code, _, err = command("codeenv", "serve", "--token-file", str(empty))
    assert code == 2
    assert "--token-file" in err


def test_bench_prints_calls_per_second(server: str) -> None:
    done = rstar2(
        "codeenv", "bench", "--seconds", "0.2", "--concurrency", "4", "--json", "--url", server
    )
    assert done.returncode == 0
    rows = json.loads(done.stdout)["rows"]
    assert {row["program"] for row in rows} == {"print", "sympy", "numpy", "exception"}
    assert all(row["calls_per_s"] > 0 and row["infrastructure"] == 0 for row in rows)


def test_health_over_plain_http(server: str) -> None:
    with urllib.request.urlopen(server + "/health", timeout=120) as answer:
        assert json.load(answer)["isolation"] in ("strict", "portable")


def test_serve_takes_every_limit_as_an_option(server: str, command: Command) -> None:
    with urllib.request.urlopen(server + "/health", timeout=120) as answer:
        health = json.load(answer)
    assert health["default"]["output_chars"] == 9000
    assert (health["cap"]["scratch_mb"], health["cap"]["file_mb"]) == (300, 8)
    assert health["default"]["file_mb"] == 8, "a default is lowered to its cap"
    _, out, _ = command("codeenv", "serve", "--help")
    options = set(re.findall(r"--[a-z-]+", out))
    for field in Limits.__dataclass_fields__:
        name = field.replace("_", "-")
        assert {f"--{name}", f"--max-{name}"} <= options
    assert {"--sessions", "--session-ttl-s", "--session-memory-mb", "--queue"} <= options


@pytest.mark.parametrize(
    ("option", "value"),
    [("--wall-s", "100"), ("--max-wall-s", "nan"), ("--memory-mb", "0"), ("--session-ttl-s", "-1")],
)
def test_serve_names_a_limit_it_cannot_have(command: Command, option: str, value: str) -> None:
    code, _, err = command("codeenv", "serve", option, value, "--port", "0")
    assert code == 2
    assert option.removeprefix("--").replace("-", "_") in err.replace("-", "_")
    assert "Traceback" not in err


def test_1100_idle_connections_leave_the_service_alone(server: str, log: Path) -> None:
    raise_descriptor_limit()
    host, port = server.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(1100):
            idle = stack.enter_context(socket.create_connection((host, int(port)), 120))
            if number % 2:
                idle.sendall(b"POST /v1/run HTTP/1.1\r\nhost:")
        done = rstar2("codeenv", "run", "-", "--url", server, stdin="6 * 7")
        assert (done.returncode, done.stdout) == (0, "42\n")
        assert log.stat().st_size < 10_000, log.read_text()[:2000]


def test_help_teaches(command: Command) -> None:
    _, out, _ = command("codeenv", "run", "--help")
    assert "--memory-mb" in out
    assert "rstar2 codeenv run" in out


def test_doctor_reports_the_level_and_why() -> None:
    done = rstar2("doctor", "--json")
    findings = json.loads(done.stdout)
    assert set(findings) == {"machine", "kernel", "isolation", "python"}
    level = findings["isolation"]["level"]
    assert done.returncode == (0 if level else 1)
    assert findings["isolation"]["reason"]
    assert findings["python"]["packages"]["sympy"]
    shown = rstar2("doctor").stdout
    assert "isolation" in shown
    assert str(level or "none") in shown


def test_commands_of_the_code_environment_load_no_torch() -> None:
    code = (
        "import sys, rstar2.cli.codeenv, rstar2.cli.doctor, rstar2.codeenv.server.serve;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0

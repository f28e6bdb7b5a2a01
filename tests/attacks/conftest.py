"""One cell per variant for all attacks; every attack ends with a look at the canaries."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
VARIANTS = {
    "strict": ("root", "strict"),
    "strict-user": ("user", "strict"),
    "portable": ("user", "portable"),
}
"""Name -> (who starts the pool, isolation level). As root there are cgroups, as user there are
none, so the last is the weakest that is ever served. A module may name a subset in `VARIANTS`."""
PATIENCE_S = 60.0


class Cell:
    """The test's end of the line to a pool inside a cell."""

    def __init__(self, variant: str) -> None:
        user, self.level = VARIANTS[variant]
        self.variant = variant
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cell.py"), user],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._buffer = b""
        self.send({"level": self.level})
        self.facts: dict[str, Any] = self.receive()
        self.forks = variant == "strict"
        """Calls may start processes: namespaces and cgroups are there."""

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"the cell was silent for {PATIENCE_S} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise ConnectionError(f"the cell ended: {self.last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        assert self.process.stderr is not None
        return self.process.stderr.read1().decode("utf-8", "replace")[-2000:]

    def ask(self, op: str, **fields: Any) -> Any:
        self.send({"op": op, **fields})
        answer = self.receive()
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def run(self, code: str, stdin: str = "", session: str | None = None, **limits: Any) -> Any:
        """Run a program in the jail. Names in angle brackets stand for facts of the cell."""
        limits.setdefault("wall_s", 4.0)
        return self.ask("run", code=self.fill(code), stdin=stdin, session=session, limits=limits)

    def fill(self, code: str) -> str:
        for name, value in self.facts.items():
            code = code.replace(f"<{name}>", str(value))
        return code

    def gets_nothing(self, code: str, **limits: Any) -> Any:
        """An attack that prints PWNED if it works, and must not see or print the secret."""
        result = self.run(code, **limits)
        shown = result["stdout"] + result["stderr"] + (result["value"] or "")
        assert "PWNED" not in shown, result
        assert self.facts["secret"] not in json.dumps(result), result
        return result

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.left = self.receive()["left"]
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(20)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every attack runs in every variant, unless its module names some."""
    if "shared_cell" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "VARIANTS", tuple(VARIANTS))
        metafunc.parametrize("shared_cell", wanted, indirect=True, scope="session")


@pytest.fixture(scope="session")
def shared_cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    try:
        cell = Cell(request.param)
    except (ConnectionError, OSError, TimeoutError) as error:
        if os.environ.get("RSTAR2_REQUIRE_ATTACKS"):
            pytest.fail(f"attacks need a disposable cell ({request.param}): {error}")
        pytest.skip(f"attacks need a disposable cell ({request.param}): {error}")
    yield cell
    cell.close()
    assert cell.left == []


@pytest.fixture
def cell(shared_cell: Cell) -> Iterator[Cell]:
    """The cell, checked after the attack: the pool still serves, nothing was harmed or left."""
    yield shared_cell
    after = shared_cell.run("print(6 * 7)")
    assert (after["outcome"], after["stdout"]) == ("ok", "42\n")
    assert shared_cell.ask("damage") == []

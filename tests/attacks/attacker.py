"""The attacker's side of a cell: sends programs to the executor inside and reads their results."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NEWEST = 99
VARIANTS = {
    "strict": ("root", "strict", NEWEST),
    "strict-user": ("user", "strict", NEWEST),
    "portable": ("user", "portable", NEWEST),
    "portable-abi5": ("user", "portable", 5),
}
"""The deployments under attack: the user that starts the code environment, the isolation level, and
the newest ABI of Landlock. Root has control groups, an ordinary user has none. ABI 5 (kernels
before 6.12) does not restrict signals: "portable-abi5" is the weakest deployment that is served."""
PATIENCE_S = 150.0
"""How long a test waits for the cell. It only bounds a hang; a busy machine may need a minute."""
LONG: dict[str, float] = {"wall_s": 60.0, "cpu_s": 60.0}
"""Limits of programs that end by themselves."""

MARK = (
    "import ctypes\nprctl = ctypes.CDLL(None).prctl\n"
    "def mark():\n    prctl(15, b'marked', 0, 0, 0)\n"
)
"""`mark()` changes the name of a program's process, which the cell can see from outside."""

Result = dict[str, Any]
"""A `ToolResult` as JSON."""


class Cell:
    """The test's end of the pipe to a code environment inside a cell."""

    def __init__(self, variant: str) -> None:
        user, self.level, abi = VARIANTS[variant]
        self.variant = variant
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cell.py"), user],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "RSTAR2_TEST_LANDLOCK_ABI": str(abi)},
        )
        self._buffer = b""
        # One deployment warms up all interpreters, as by default; the others those they need.
        warm_up = "before" if variant == "strict" else "never"
        self.send({"level": self.level, "warm_up": warm_up})
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
                raise TimeoutError(f"the cell did not answer within {PATIENCE_S} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise ConnectionError(f"the cell ended: {self.error_output()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def error_output(self) -> str:
        """What the cell wrote to stderr before it closed its output."""
        self.process.wait(PATIENCE_S)
        assert self.process.stderr is not None
        return self.process.stderr.read1().decode("utf-8", "replace")[-2000:]  # type: ignore[attr-defined,no-any-return]

    def ask(self, op: str, **fields: Any) -> Any:
        self.send({"op": op, **fields})
        answer = self.receive()
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def run(
        self, code: str, stdin: str = "", session: str | None = None, **limits: float
    ) -> Result:
        """Run a program in the jail. Names in angle brackets stand for facts of the cell.

        Time limits are long unless a test is about time: a slow machine must not change an outcome.
        """
        order = {"code": self.fill(code), "stdin": stdin, "session": session}
        result: Result = self.ask("run", **order, limits={**LONG, **limits})
        return result

    def fill(self, code: str) -> str:
        for name, value in self.facts.items():
            code = code.replace(f"<{name}>", str(value))
        return code

    def gets_nothing(self, code: str, **limits: float) -> Result:
        """An attack that prints PWNED if it works, and must not see or print the secret."""
        result = self.run(code, "", None, **limits)
        shown = result["stdout"] + result["stderr"] + (result["value"] or "")
        assert "PWNED" not in shown, result
        assert self.facts["secret"] not in json.dumps(result), result
        return result

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.left = self.receive()["left"]
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()

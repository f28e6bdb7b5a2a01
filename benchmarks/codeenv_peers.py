"""Other sandboxes for benchmarks/codeenv.py, and programs wrapped as the paper's client sends them.

A peer is a server that is already running; start it on the measured core (`taskset -c CORE ...`).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

_WRAPPER = '''
import ast
import base64
import io
import linecache
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from types import CodeType
from typing import Any, Optional


class CellError(Exception):
    """An error of a cell, with the line that raised it."""

    def __init__(self, error: BaseException, code: str) -> None:
        number = getattr(error, "lineno", None)
        trace = error.__traceback__
        while number is None and trace is not None:
            if trace.tb_next is None:
                number = trace.tb_lineno
            trace = trace.tb_next
        lines = code.splitlines()
        text = f"{type(error).__name__}: {error}"
        if number is not None and 0 < number <= len(lines):
            text = f"{text} (line {number})\\n  {lines[number - 1]}"
        super().__init__(text)


class Cells:
    """Runs cells in one namespace; the value of a last expression is printed."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}

    def split(self, code: str) -> tuple[str, Optional[str]]:
        tree = ast.parse(code)
        if not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return code, None
        last = tree.body[-1]
        lines = code.splitlines()
        first, end = last.lineno, last.end_lineno or last.lineno
        return "\\n".join(lines[: first - 1]), "\\n".join(lines[first - 1 : end])

    def run(self, code: str, quiet: bool) -> None:
        out, err = (io.StringIO(), io.StringIO()) if quiet else (sys.stdout, sys.stderr)
        try:
            body, last = self.split(code)
            with redirect_stdout(out), redirect_stderr(err):
                exec(compile(body, "<string>", "exec"), self.space)
                if last:
                    value = eval(compile(last, "<string>", "eval"), self.space)
                    if value is not None:
                        print(repr(value))
        except Exception as error:
            if not quiet:
                print(CellError(error, code), file=sys.stderr)
                os._exit(1)


cells = Cells()
'''


def as_release(code: str) -> str:
    """A program in the form in which rStar2-Agent's released client sends it: a wrapper that
    decodes base64, runs the text with `exec` and prints the value of its last expression."""
    text = base64.b64encode(code.encode()).decode()
    return (
        f'{_WRAPPER}\ncode = base64.b64decode("{text}".encode()).decode()\ncells.run(code, False)\n'
    )


class CodeJudge:
    """A code-judge server, through the request that the paper's trainer sends."""

    name = "code-judge"

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600.0)

    def rate(self, programs: Sequence[str]) -> float:
        """Calls per second of one batch."""
        submissions = [{"type": "python", "solution": code, "input": None} for code in programs]
        start = time.perf_counter()
        answer = self._client.post(
            "/run/long-batch", json={"type": "batch", "submissions": submissions}
        )
        elapsed_s = time.perf_counter() - start
        results = answer.raise_for_status().json()["results"]
        lost = [result for result in results if result["reason"] not in ("", "unspecified")]
        if lost or len(results) != len(programs):
            raise SystemExit(f"code-judge did not run every program: {lost[:1]}")
        return len(programs) / elapsed_s


class SandboxFusion:
    """A SandboxFusion server: one request per call, four at a time."""

    name = "SandboxFusion"

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600.0)

    def rate(self, programs: Sequence[str]) -> float:
        """Calls per second."""
        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._run, programs))
        return len(programs) / (time.perf_counter() - start)

    def _run(self, code: str) -> None:
        body = {"code": code, "language": "python", "run_timeout": 60}
        answer = self._client.post("/run_code", json=body).raise_for_status().json()
        if answer["status"] == "SandboxError":
            raise SystemExit(f"SandboxFusion did not run a program: {answer['message']}")

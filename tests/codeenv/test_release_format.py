"""Calls as rStar2-Agent's released client sends them, through the code-judge API, end to end.

Its tool wraps every program in base64: earlier cells of the conversation are replayed without
output, the last cell shows its value, and errors go to stderr with exit code 1. The wrapper here
does the same and is ours.
"""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

SETUP = """
import ast, base64, io, os, sys
from contextlib import redirect_stderr, redirect_stdout

space = {"__name__": "__main__"}

def cell(text, quiet):
    code = base64.b64decode(text).decode()
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        out = io.StringIO() if quiet else sys.stdout
        err = io.StringIO() if quiet else sys.stderr
        with redirect_stdout(out), redirect_stderr(err):
            exec(compile(tree, "<string>", "exec"), space)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<string>", "eval"), space)
                if value is not None and not quiet:
                    print(repr(value))
    except Exception as error:
        if quiet:
            return
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
"""


def wrapped(code: str, *history: str) -> str:
    cells = [*((text, True) for text in history), (code, False)]
    calls = [f'cell("{base64.b64encode(c.encode()).decode()}", {quiet})' for c, quiet in cells]
    return "\n".join([SETUP, *calls, ""])


def submit(url: str, *programs: str | dict[str, Any]) -> list[dict[str, Any]]:
    submissions = [
        program if isinstance(program, dict)
        else {"type": "python", "solution": program, "input": None}
        for program in programs
    ]  # fmt: skip
    body = {"type": "batch", "submissions": submissions}
    answer = httpx.post(url + "/run/long-batch", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def test_cells_show_values_output_errors_and_history(served_url: str) -> None:
    value, shown, sympy, later, error, stdin, refused = submit(
        served_url,
        wrapped("6 * 7"),
        wrapped("for i in range(3):\n    print(i)"),
        wrapped("import sympy\nsympy.factorint(91)"),
        wrapped("x + 1", "x = 41\nprint('not shown')", "1/0"),
        wrapped("print('before', flush=True)\n1/0"),
        {"type": "python", "solution": wrapped("print(input() * 2)"), "input": "ab\n"},
        {"type": "python", "solution": "x" * 2_000_000, "input": None},
    )
    assert (value["stdout"], value["success"], value["run_success"]) == ("42\n", True, True)
    assert shown["stdout"] == "0\n1\n2\n"
    assert sympy["stdout"] == "{7: 1, 13: 1}\n"
    assert later["stdout"] == "42\n"
    assert (error["run_success"], error["stdout"]) == (False, "before\n")
    assert "ZeroDivisionError" in error["stderr"]
    assert stdin["stdout"] == "abab\n"
    assert refused["reason"] == "invalid_input"


def test_a_program_may_take_ten_seconds(served_url: str) -> None:
    """code-judge's limit is 10 s, not the 5 s of our own API.

    The kernel's own limit of CPU time, which a program can read, is one second above it.
    """
    (shown,) = submit(
        served_url, wrapped("import resource\nresource.getrlimit(resource.RLIMIT_CPU)")
    )
    assert shown["stdout"] == "(11, 11)\n"

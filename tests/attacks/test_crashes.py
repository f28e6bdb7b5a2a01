"""Crashes: the interpreter may die, the executor may not."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell


def test_segmentation_fault_is_reported(cell: Cell) -> None:
    result = cell.run("import ctypes\nctypes.string_at(0)")
    assert (result["outcome"], result["signal"]) == ("killed", 11)


def test_abort_is_reported(cell: Cell) -> None:
    result = cell.run("import os\nos.abort()")
    assert (result["outcome"], result["signal"]) == ("killed", 6)


def test_illegal_instruction_is_reported(cell: Cell) -> None:
    assert cell.run("import os, signal\nos.kill(os.getpid(), signal.SIGILL)")["signal"] == 4


def test_recursion_is_an_exception_with_a_short_traceback(cell: Cell) -> None:
    result = cell.run("def f():\n    f()\nf()")
    assert result["outcome"] == "exception"
    assert "RecursionError" in result["message"]
    assert "more frames" in result["traceback"]
    assert len(result["traceback"]) < 3000


def test_stack_overflow_in_c_is_reported(cell: Cell) -> None:
    result = cell.run(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f():\n    return repr(f())\n"
        "class A:\n    def __getattr__(self, n):\n        return getattr(self, n)\nA().x",
        wall_s=8.0,
        memory_mb=1024,
    )
    assert result["outcome"] in ("killed", "memory", "timeout", "exception")


def test_deeply_nested_source_is_refused(cell: Cell) -> None:
    result = cell.run("(" * 5000 + ")" * 5000)
    assert result["outcome"] in ("syntax_error", "exception", "memory", "killed")


def test_deeply_nested_expression_is_survived(cell: Cell) -> None:
    result = cell.run("-" * 50_000 + "1")
    assert result["outcome"] in ("syntax_error", "exception", "memory", "killed")


def test_compile_bomb_is_contained(cell: Cell) -> None:
    result = cell.run("(1,) * 10 ** 9 ** 0 + (0,) * (1 << 40)", wall_s=2.0)
    assert result["outcome"] in ("exception", "memory", "timeout")


def test_code_object_bomb_is_contained(cell: Cell) -> None:
    result = cell.run("exec('x = 1\\n' * 3_000_000)", wall_s=2.0, memory_mb=256)
    assert result["outcome"] in ("memory", "timeout", "no_output", "exception")


def test_corrupt_bytecode_is_contained(cell: Cell) -> None:
    result = cell.run(
        "def f(): pass\nf.__code__ = f.__code__.replace(co_code=bytes([100, 255] * 50))\nf()"
    )
    assert result["outcome"] in ("killed", "exception", "memory", "no_output", "timeout", "ok")


def test_source_with_nul_bytes_is_an_error(cell: Cell) -> None:
    assert cell.run("print(1)\0")["outcome"] in ("syntax_error", "exception")


def test_source_that_is_empty_is_no_output(cell: Cell) -> None:
    assert cell.run("")["outcome"] == "no_output"


def test_source_with_lone_surrogates_is_an_error_or_runs(cell: Cell) -> None:
    assert cell.run("x = '\ud800'")["outcome"] in ("no_output", "syntax_error", "exception")


@pytest.mark.parametrize("number", [15, 2, 1, 13, 24, 25, 31])
def test_suicide_by_signal_is_reported(cell: Cell, number: int) -> None:
    result = cell.run(
        f"import os, signal\nsignal.signal({number}, signal.SIG_DFL)\n"
        f"os.kill(os.getpid(), {number})"
    )
    assert (result["outcome"], result["signal"]) == ("killed", number)

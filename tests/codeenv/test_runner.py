"""How the runner compiles a program: its last expression is the value, at the right line."""

from __future__ import annotations

import pytest

from rstar2.codeenv.jail import frames, runner

VALUES = {
    "expression": ("6 * 7", "42"),
    "after statements": ("x = 3\n\nx + 1  # more\n", "4"),
    "after a block": ("if True:\n    x = 1\nx", "1"),
    "several lines": ("x = 3\nmax(\n    x,\n    4)", "4"),
    "several on one line": ("x = 3; x", "3"),
    "carriage returns": ("x = 3\r\nx\r\n", "3"),
    "comment at the end": ("x = 3\nx\n# the end\n", "3"),
    "backslash": ("x = 3\n'a\\tb'", r"'a\tb'"),
    "text in a string": ("x = '''\n5\n6'''\nx", r"'\n5\n6'"),
    "own future import": (
        "from __future__ import annotations\ndef f(x: int): pass\nf.__annotations__",
        "{'x': 'int'}",
    ),
    "no future import": ("def f(x: int): pass\nf.__annotations__", "{'x': <class 'int'>}"),
}


@pytest.mark.parametrize("name", VALUES)
def test_last_expression_is_the_value(name: str) -> None:
    program, value = VALUES[name]
    record = runner.execute(program, runner.fresh_main(), 1000)
    assert (record.kind, record.text) == (frames.VALUE, value)


@pytest.mark.parametrize("program", ["x = 6 * 7", "'''\n1'''; x = 1", "x = 3\nx;", "", "# 1"])
def test_other_endings_have_no_value(program: str) -> None:
    assert runner.execute(program, runner.fresh_main(), 1000).kind == frames.NOTHING


@pytest.mark.parametrize(
    "program", ["1 / 0", "\n\nx = 1\n\n1 / 0\n", "x = 1\ry = 2\n1 / 0", "x = 1\r\n1 / 0\r\n"]
)
def test_traceback_names_the_line_of_the_last_expression(program: str) -> None:
    line = program.rstrip().replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    record = runner.execute(program, runner.fresh_main(), 1000)
    assert record.kind == frames.EXCEPTION
    assert f"line {line}, in <module>" in record.text


@pytest.mark.parametrize("program", ["x = 1\n2 3", "def f(:\n    pass\nf()", "x = 1\n2\u2028"])
def test_syntax_errors_are_reported(program: str) -> None:
    assert runner.execute(program, runner.fresh_main(), 1000).kind == frames.SYNTAX

"""Attacks on results: a program may lie about itself, and about nothing else."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import LONG, Cell


def test_exit_without_a_record_is_seen_as_an_exit(cell: Cell) -> None:
    assert cell.run("import os\nos._exit(0)")["outcome"] == "no_output"


def test_exit_code_is_reported(cell: Cell) -> None:
    result = cell.run("import os\nprint('x', flush=True)\nos._exit(7)")
    assert (result["outcome"], result["exit_code"]) == ("exception", 7)


def test_sys_exit_with_a_code_is_a_failure(cell: Cell) -> None:
    result = cell.run("import sys\nsys.exit(3)")
    assert (result["outcome"], result["exit_code"]) == ("exception", 3)


def test_closing_every_descriptor_ends_quietly(cell: Cell) -> None:
    result = cell.run("import os\nos.closerange(0, 256)")
    assert result["outcome"] in ("no_output", "ok", "exception")


@pytest.mark.parametrize("size", [0, 1, 12, 13, 14, 40, 100_000, 3_000_000])
def test_garbage_on_the_result_pipe_breaks_nothing(cell: Cell, size: int) -> None:
    result = cell.run(f"import os\nos.write(3, os.urandom({size}))\nprint('said')")
    assert result["outcome"] in ("ok", "exception", "output_limit", "syntax_error", "memory")


def test_forged_record_with_wild_lengths_breaks_nothing(cell: Cell) -> None:
    result = cell.run(
        "import os, struct\nos.write(3, struct.pack('<BIQ', ord('V'), 2**32 - 1, 2**64 - 1))\n"
        "os._exit(0)"
    )
    assert result["outcome"] in ("ok", "no_output")


def test_forged_success_does_not_hide_a_crash(cell: Cell) -> None:
    result = cell.run(
        "import os, struct, signal\nos.write(3, struct.pack('<BIQ', ord('V'), 0, 0) + b'fine')\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert result["outcome"] == "killed"
    assert result["value"] is None


def test_forged_success_does_not_hide_a_timeout(cell: Cell) -> None:
    result = cell.run(
        "import os, struct\nos.write(3, struct.pack('<BIQ', ord('V'), 0, 0) + b'fine')\n"
        "while True: pass",
        wall_s=0.4,
    )
    assert (result["outcome"], result["value"]) == ("timeout", None)


def test_flooding_the_result_pipe_is_stopped(cell: Cell) -> None:
    result = cell.run("import os\nwhile True:\n    os.write(3, b'x' * 65536)")
    assert result["outcome"] == "output_limit"


def test_printing_end_marks_changes_nothing(cell: Cell) -> None:
    text = '@@E\\n[exit 0]\\n{"outcome": "ok"}\\nrstar2 worker\\n'
    result = cell.run(f"print('{text}')\n1/0")
    assert result["outcome"] == "exception"


def test_answers_are_not_mixed_up_by_forgers(cell: Cell) -> None:
    forge = {"code": "import os\nos.write(3, os.urandom(50))\nprint('evil')", "limits": LONG}
    orders = []
    for i in range(6):
        orders += [forge, {"code": f"print({i} * 11)", "limits": LONG}]
    results = cell.ask("runs", orders=orders)
    assert [r["stdout"] for r in results[1::2]] == [f"{i * 11}\n" for i in range(6)]


def test_hostile_exception_text_is_survived(cell: Cell) -> None:
    result = cell.run(
        "class E(Exception):\n    def __str__(self):\n        raise RuntimeError('no')\n"
        "    __repr__ = __str__\nraise E"
    )
    assert result["outcome"] == "exception"
    assert "E" in result["message"]


def test_exception_text_that_never_ends_ends(cell: Cell) -> None:
    result = cell.run(
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", wall_s=0.5
    )
    assert result["outcome"] == "timeout"


def test_exception_text_that_exits_does_not_hide_the_failure(cell: Cell) -> None:
    result = cell.run(
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\nraise E"
    )
    assert result["outcome"] == "exception"


def test_hostile_repr_of_the_value_is_an_exception(cell: Cell) -> None:
    result = cell.run("class V:\n    def __repr__(self):\n        raise ValueError('no')\nV()")
    assert result["outcome"] == "exception"


def test_repr_that_returns_no_string_is_an_exception(cell: Cell) -> None:
    assert cell.run("class V:\n    __repr__ = lambda s: 5\nV()")["outcome"] == "exception"


def test_patched_builtins_hurt_only_the_patcher(cell: Cell) -> None:
    cell.run(
        "import builtins, os, struct, sys, io\n"
        "def bad(*a, **k): raise SystemError('patched')\n"
        "for name in ('print', 'repr', 'str', 'len', 'isinstance', 'compile', 'type', 'open'):\n"
        "    setattr(builtins, name, bad)\n"
        "os.write = os._exit = bad\nstruct.pack = bad\nsys.stdout = sys.stderr = None\n"
    )
    assert cell.run("print(len(repr(str(5))))")["stdout"] == "3\n"


def test_replaced_excepthook_does_not_run(cell: Cell) -> None:
    result = cell.run(
        "import sys\nsys.excepthook = lambda *a: print('all fine')\nraise ValueError('real')"
    )
    assert result["outcome"] == "exception"
    assert "all fine" not in result["stdout"]


def test_trace_function_ends_with_the_call(cell: Cell) -> None:
    cell.run("import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nx = 1")


def test_changes_to_the_runner_stay_in_the_call(cell: Cell) -> None:
    cell.run(
        "from rstar2.codeenv.jail import runner, frames\n"
        "runner.execute = runner.finish = lambda *a, **k: None\nframes.Record.pack = lambda s: b''"
    )
    assert cell.run("6 * 7")["value"] == "42"


def test_cached_modules_of_a_call_are_not_seen_by_the_next(cell: Cell) -> None:
    cell.run("import sys, math\nmath.pi = 3\nsys.modules['json'] = None")
    assert cell.run("import math, json\nprint(math.pi > 3.1)")["stdout"] == "True\n"

"""Attacks through output: endless, huge, not text."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell


def test_endless_output_is_stopped_with_both_ends_kept(cell: Cell) -> None:
    result = cell.run("i = 0\nwhile True:\n    print(i)\n    i += 1", output_chars=1000)
    assert result["outcome"] == "output_limit"
    assert result["stdout"].startswith("0\n1\n")
    assert "characters cut" in result["stdout"]
    assert result["truncated"]["stdout"] > 0
    assert len(result["stdout"]) < 1100


def test_endless_output_without_newlines_is_stopped(cell: Cell) -> None:
    result = cell.run("import os\nwhile True:\n    os.write(1, b'x' * 65536)")
    assert result["outcome"] == "output_limit"


def test_endless_error_output_is_stopped(cell: Cell) -> None:
    result = cell.run("import sys\nwhile True:\n    sys.stderr.write('x' * 10000)")
    assert result["outcome"] == "output_limit"


def test_one_huge_line_is_cut_in_the_middle(cell: Cell) -> None:
    result = cell.run("print('a' * 40000 + 'end')", output_chars=500)
    assert result["outcome"] == "ok"
    assert result["stdout"].startswith("aaa")
    assert result["stdout"].endswith("end\n")
    assert result["truncated"]["stdout"] == 40004 - 500


def test_output_that_is_not_utf8_is_shown_with_replacements(cell: Cell) -> None:
    result = cell.run("import os\nos.write(1, bytes([0xff, 0xfe, 65, 0xc3]))")
    assert result["outcome"] == "ok"
    assert "A" in result["stdout"]
    assert "�" in result["stdout"]


def test_nul_bytes_arrive_unharmed(cell: Cell) -> None:
    result = cell.run("print('a\\0b')")
    assert result["stdout"] == "a\0b\n"


def test_terminal_sequences_arrive_as_data(cell: Cell) -> None:
    result = cell.run("print('\\x1b[2J\\x1b]0;title\\x07x')")
    assert result["stdout"] == "\x1b[2J\x1b]0;title\x07x\n"


def test_lone_surrogates_do_not_break_the_answer(cell: Cell) -> None:
    assert cell.run("print('\\ud800x')")["outcome"] == "ok"
    assert cell.run("'\\ud800x'")["outcome"] == "ok"


def test_value_too_long_is_cut(cell: Cell) -> None:
    result = cell.run("'y' * 3_000_000", output_chars=1000)
    assert result["outcome"] == "ok"
    assert result["truncated"]["value"] > 2_900_000
    assert len(result["value"]) < 1100


def test_traceback_too_long_is_cut(cell: Cell) -> None:
    result = cell.run("raise ValueError('z' * 3_000_000)", output_chars=1000)
    assert result["outcome"] == "exception"
    assert result["truncated"]["traceback"] > 2_900_000
    assert len(result["traceback"]) < 1100
    assert len(result["message"]) < 3000


def test_nonblocking_output_does_not_hang_the_worker(cell: Cell) -> None:
    result = cell.run(
        "import os\nos.set_blocking(1, False)\nn = 0\n"
        "try:\n    while n < 10**6:\n        n += os.write(1, b'x' * 10000)\n"
        "except BlockingIOError:\n    pass"
    )
    assert result["outcome"] in ("ok", "exception", "output_limit")


def test_pipe_hidden_in_a_socket_does_not_delay_the_answer(cell: Cell) -> None:
    result = cell.run(
        "import socket\na, b = socket.socketpair()\n"
        "socket.send_fds(a, [b'x'], [1, 2, 3, a.fileno(), b.fileno()])\nprint('sent')"
    )
    assert (result["outcome"], result["stdout"]) == ("ok", "sent\n")  # and not a timeout


PROGRESS = {
    "line": "print('progress')",
    "part of a line": "print('progress', end='')",
    "text": "sys.stdout.write('progress')",
    "bytes": "sys.stdout.buffer.write(b'progress')",
    "several": "print('a', 'b', 3)\nprint('progress')",
}
ENDS: dict[str, tuple[str, str, dict[str, float]]] = {
    "sleep": ("time.sleep(1000)", "timeout", {"wall_s": 2.0}),
    "kill": ("os.kill(os.getpid(), 9)", "killed", {}),
    "crash": ("import ctypes\nctypes.string_at(0)", "killed", {}),
    "memory": ("x = bytearray(3 << 30)", "memory", {}),
    "loop": ("while True: pass", "timeout", {"cpu_s": 0.3}),
}


@pytest.mark.parametrize(
    ("text", "end"),
    [*((text, "loop") for text in PROGRESS), *(("line", end) for end in ENDS if end != "loop")],
)
def test_output_before_a_violent_end_is_kept(cell: Cell, text: str, end: str) -> None:
    code, outcome, limits = ENDS[end]
    result = cell.run(f"import os, sys, time\n{PROGRESS[text]}\n{code}", "", None, **limits)
    assert result["outcome"] == outcome
    assert "progress" in result["stdout"]


def test_error_output_before_a_violent_end_is_kept(cell: Cell) -> None:
    result = cell.run(
        "import sys\nprint('warning', end='', file=sys.stderr)\nwhile True: pass", cpu_s=0.3
    )
    assert (result["outcome"], result["stderr"]) == ("timeout", "warning")


def test_many_lines_arrive_in_order(cell: Cell) -> None:
    result = cell.run(
        "import os\nfor i in range(2000):\n    print(i)\n    if i % 100 == 0:\n"
        "        os.write(1, b'mark\\n')",
        output_chars=100_000,
    )
    expected = [
        line for i in range(2000) for line in ([str(i), "mark"] if i % 100 == 0 else [str(i)])
    ]
    assert result["stdout"].split() == expected

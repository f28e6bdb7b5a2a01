"""A program that is killed, or ends without cleaning up, has shown every piece that it wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.attacker import Cell

PIECES = {
    "one print": ("print('checking', 7, end=' ')", "checking 7 "),
    "several prints": ("for i in range(5): print(i, end=' ')", "0 1 2 3 4 "),
    "texts": ("sys.stdout.write('a')\nsys.stdout.write('b')", "ab"),
    "bytes": ("sys.stdout.buffer.write(b'a')\nsys.stdout.buffer.write(b'b')", "ab"),
    "lines and a part": ("print('x')\nprint('y')\nprint('z', end='')", "x\ny\nz"),
    "kept method": ("write = sys.stdout.buffer.write\nfor _ in range(3): write(b'k')", "kkk"),
}
ENDS: dict[str, tuple[str, str, dict[str, float]]] = {
    "loop": ("while True: pass", "timeout", {"cpu_s": 0.3}),
    "exit": ("os._exit(3)", "exception", {}),
    "kill": ("os.kill(os.getpid(), 9)", "killed", {}),
}
STREAMS = ("stdout", "stderr")


@pytest.fixture(scope="module", params=["plain", "session"])
def place(shared_cell: Cell, request: pytest.FixtureRequest) -> Iterator[str | None]:
    name = shared_cell.ask("open") if request.param == "session" else None
    yield name
    if name is not None:
        shared_cell.ask("close_session", session=name)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stream", STREAMS)
def test_every_piece_is_shown(shared_cell: Cell, place: str | None, stream: str, end: str) -> None:
    last, outcome, limits = ENDS[end]
    for name, (code, text) in PIECES.items():
        if end == "loop" and name not in ("one print", "several prints"):
            continue  # each takes its whole time limit
        if stream == "stderr":
            code = code.replace("sys.stdout", "sys.stderr").replace(
                "print(", "functools.partial(print, file=sys.stderr)("
            )
        program = f"import functools, os, sys\n{code}\n{last}"
        result = shared_cell.run(program, "", place, **limits)
        assert (result["outcome"], result[stream]) == (outcome, text), (name, result)


def test_fatal_message_in_two_writes_is_complete(shared_cell: Cell) -> None:
    result = shared_cell.run(
        "import os, sys\nsys.stderr.write('fatal: ')\nsys.stderr.write('bad')\nos._exit(3)"
    )
    assert (result["exit_code"], result["stderr"]) == (3, "fatal: bad")


def test_value_is_shown_only_if_nothing_was_printed(shared_cell: Cell) -> None:
    loud = "class Loud:\n    def __repr__(self):\n        raise ValueError('shown')\n"
    printed = shared_cell.run(f"{loud}print(1, end='')\nLoud()")
    assert (printed["outcome"], printed["stdout"]) == ("ok", "1")
    assert shared_cell.run(f"{loud}Loud()")["outcome"] == "exception"

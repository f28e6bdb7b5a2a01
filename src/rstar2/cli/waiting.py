"""A line on the terminal that says what a command waits for; it is erased when the wait ends.

It needs no import beyond the standard library, so that it can be shown while others are imported.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TextIO

ERASE = "\r\x1b[2K"
EVERY_S = 1.0

WaitText = str | Callable[[], str]


def start_of_line() -> str:
    """What to write before a line while a wait may be shown: it erases the wait on a terminal."""
    return ERASE if sys.stderr is not None and sys.stderr.isatty() else ""


@contextmanager
def waiting(text: WaitText, *, after_s: float = 0.0) -> Iterator[None]:
    """Show `text` and the seconds that have passed, from `after_s` on, while the block runs.

    A function is called for the text once a second. Nothing is written if stderr is not a terminal.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    ended = threading.Event()
    writer = threading.Thread(target=_write, args=(stream, text, after_s, ended), daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _write(stream: TextIO, text: WaitText, after_s: float, ended: threading.Event) -> None:
    """Write the line until the wait ends, then erase it."""
    started = monotonic()
    if ended.wait(after_s):
        return
    while True:
        seconds = round(monotonic() - started)
        line = text if isinstance(text, str) else text()
        shown = f"{line} ..." if seconds < 1 else f"{line} ... {seconds} s"
        stream.write(ERASE + shown[: shutil.get_terminal_size().columns - 1])
        stream.flush()
        if ended.wait(EVERY_S):
            break
    stream.write(ERASE)
    stream.flush()

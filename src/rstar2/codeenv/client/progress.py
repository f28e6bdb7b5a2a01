"""A progress bar on the terminal for many calls that take longer than two seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_PROGRESS_S = 2.0


class ProgressLine:
    """Counts finished programs, and shows a bar once it is told to."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.bar: Progress | None = None

    def advance(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.bar.add_task("programs", total=self.total, completed=self.done)
        self.bar.start()


@asynccontextmanager
async def show_progress(total: int, wanted: bool) -> AsyncIterator[ProgressLine]:
    """A bar on a terminal for a `map` that takes longer than two seconds."""
    line = ProgressLine(total)
    timer = None
    if wanted and sys.stderr is not None and sys.stderr.isatty():
        timer = asyncio.get_running_loop().call_later(SHOW_PROGRESS_S, line.show)
    try:
        yield line
    finally:
        if timer is not None:
            timer.cancel()
        if line.bar is not None:
            line.bar.stop()

"""Run the miniature in a process of its own and kill it, -9, at a chosen moment.

    python -m tests.e2e.drive DATA RUN MOMENT [evaluated]   (from the repository's root)

MOMENT: `never`; `step:STAGE:N` in the middle of the N-th step of a stage; `checkpoint:N` while the
N-th checkpoint is half written; `stage:NAME` at the start of a stage or evaluation; `term:STAGE:N`
sends SIGTERM instead of dying. `evaluated` also evaluates before SFT and after every RL step, and
lets the first stage end at a plateau.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar2.learner import checkpoint
from rstar2.pipeline.controller import run
from rstar2.pipeline.progress import QuietView, StageKind
from rstar2.record import RunDirectory
from tests.e2e.miniature import evaluated, miniature


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(QuietView):
    """A view that ends its process when it sees the moment come."""

    def __init__(self, moment: str) -> None:
        self.kind, _, self.where = moment.partition(":")
        self.at, self.done = "", 0

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        self.at, self.done = name, done
        if self.kind == "stage" and self.where == name:
            die()

    def step(self, step: int, values: Any) -> None:
        self.done = step

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        if self.kind in ("step", "term") and self.where == f"{self.at}:{self.done + 1}":
            os.kill(os.getpid(), signal.SIGTERM if self.kind == "term" else signal.SIGKILL)

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def half_written(original: Callable[..., None], number: int) -> Callable[..., None]:
    """A write of checkpoint metadata that does not come back the `number`-th time."""
    count = 0

    def write(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            path.write_text(text[: len(text) // 2])
            die()
        original(path, text)

    return write


async def supervised(recipe: Any, directory: RunDirectory, view: Killer) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run(recipe, directory, view)


def main() -> None:
    data, path, moment, *kind = sys.argv[1:]
    if moment.startswith("checkpoint:"):
        number = int(moment.partition(":")[2])
        checkpoint.write_meta = half_written(checkpoint.write_meta, number)
    recipe = miniature(Path(data))
    if kind:
        recipe = evaluated(recipe)
    with RunDirectory.create_or_resume(path, recipe) as directory:
        try:
            asyncio.run(supervised(recipe, directory, Killer(moment)))
        except asyncio.CancelledError:
            sys.exit(3)
        directory.event("finished")


if __name__ == "__main__":
    main()

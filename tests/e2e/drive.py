"""The program of a process that runs the miniature and is killed, -9, at a chosen moment.

A moment is `never`; `step:STAGE:N` in the middle of the N-th step of a stage; `checkpoint:N` while
the N-th checkpoint is half written; `stage:NAME` at the start of a stage or evaluation;
`term:STAGE:N` sends SIGTERM instead of dying, in SFT after its N-th step. The kind `evaluated` also
evaluates before SFT and after every RL step, and lets the first stage end at a plateau; `rare`
takes no checkpoint within a stage.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
        if self.kind == "term" and self.where == f"sft:{step}" and self.at == "sft":
            os.kill(os.getpid(), signal.SIGTERM)

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        if self.kind in ("step", "term") and self.where == f"{self.at}:{self.done + 1}":
            number = signal.SIGTERM if self.kind == "term" else signal.SIGKILL
            self.kind = ""  # once: a second signal would interrupt the saving
            os.kill(os.getpid(), number)

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


def main(data: Path, path: Path, moment: str, kind: str = "") -> None:
    """Output goes to a file beside the run; children are marked as descendants of the run."""
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {"OMP_NUM_THREADS": "1", "RSTAR2_TEST_RUN": str(path)}
    torch.set_num_threads(1)
    if moment.startswith("checkpoint:"):
        number = int(moment.partition(":")[2])
        checkpoint.write_meta = half_written(checkpoint.write_meta, number)
    recipe = miniature(data)
    if kind == "evaluated":
        recipe = evaluated(recipe)
    elif kind == "rare":
        record = recipe.record.model_copy(update={"checkpoint_every": 100})
        recipe = recipe.model_copy(update={"record": record})
    with RunDirectory.create_or_resume(path, recipe) as directory:
        try:
            asyncio.run(supervised(recipe, directory, Killer(moment)))
        except asyncio.CancelledError:
            sys.exit(3)
        directory.event("finished")

"""What the pipeline tells the person who watches: the seam between controller and terminal.

Calls are cheap, never block and never fail a run; the mappings are those that RunDirectory gets
(names in record.py). `LiveView` paints a terminal, `PlainView` prints lines, `Quiet` does neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from rstar2.config import Recipe
from rstar2.types import Evaluation


class StageKind(StrEnum):
    """What a stage does; decides what is worth showing of it."""

    SFT = "sft"
    RL = "rl"
    FILTER = "filter"
    EVALUATION = "evaluation"


class View(Protocol):
    """What the controller calls, in this order; `stage` to `note` repeat."""

    def open(self, recipe: Recipe, run: Path) -> None:
        """The run begins, or goes on."""
        ...

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None:
        """A stage begins with `done` of `total` steps (or problems) behind it."""
        ...

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None:
        """Within a step: so many of `total` rollouts (groups, problems) are finished."""
        ...

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """A step is complete; `values` are its metrics."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete."""
        ...

    def note(self, text: str) -> None:
        """Something worth one line happened: resumed, checkpoint, collapse, stop."""
        ...

    def close(self) -> None:
        """The run ended, well or not; the terminal is as it was. Idempotent."""
        ...


class Quiet:
    """A view that shows nothing."""

    def open(self, recipe: Recipe, run: Path) -> None: ...

    def stage(self, name: str, kind: StageKind, total: int, done: int = 0) -> None: ...

    def progress(self, done: int, total: int, unit: str = "rollouts") -> None: ...

    def step(self, step: int, values: Mapping[str, Any]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...

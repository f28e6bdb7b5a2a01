"""Reading a run directory, also while its run is writing: all that report and viewer use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from rstar2.errors import UserError
from rstar2.types import Evaluation, Group, Selection

T = TypeVar("T")


class GroupLine(msgspec.Struct, frozen=True):
    """One line of trajectories/<stage>.jsonl."""

    stage: str
    step: int
    time: float
    group: Group
    selection: Selection | None = None


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The whole lines of a JSONL file; a torn last line (a run is writing) is left out."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All recorded steps, in order."""
    return list(read_lines(run / "metrics.jsonl", dict[str, Any]))


def read_groups(run: Path, stage: str) -> Iterator[GroupLine]:
    """The recorded groups of a stage, one at a time."""
    return read_lines(run / "trajectories" / f"{stage}.jsonl", GroupLine)


def read_evaluations(run: Path) -> list[Evaluation]:
    """The recorded evaluations, in order; of several with equal stage and mode the last."""
    found: dict[tuple[str, str], Evaluation] = {}
    for evaluation in read_lines(run / "evaluations.jsonl", Evaluation):
        found[evaluation.stage, evaluation.mode] = evaluation
    return list(found.values())


def read_events(run: Path) -> list[dict[str, Any]]:
    """All events, in order."""
    return list(read_lines(run / "events.jsonl", dict[str, Any]))


def read_recipe(run: Path) -> dict[str, Any]:
    """The resolved recipe as plain values (it may be of another version of rstar2)."""
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{run} is not a run directory: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{run / 'recipe.yaml'} holds no recipe")
    return recipe


def read_environment(run: Path) -> dict[str, Any]:
    """What environment.json holds."""
    try:
        about = msgspec.json.decode((run / "environment.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{run} is not a run directory: {error}") from error
    return about


def is_finished(run: Path) -> bool:
    """Whether a run in this directory came to its end."""
    return any(event.get("event") == "finished" for event in read_events(run))

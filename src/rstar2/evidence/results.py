"""The recorded numbers of a cell: one small JSON file, equal to the last digit when repeated.

The evaluations of a cell are files of their own beside it (`evaluations.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar2.errors import UserError
from rstar2.evidence.claim import Cell
from rstar2.evidence.evaluations import CellEvaluation, read_evaluations_of
from rstar2.files import write_file
from rstar2.record import read_evaluations, read_metrics

COLUMNS = (
    *("reward", "failing_calls_in_correct", "tool_errors", "response_length", "sampled_length"),
    *("calls", "truncated", "max_turns", "no_answer", "entropy"),
    *("rollouts/drawn", "rollouts/kept", "groups/dropped", "staleness/mean"),
)
"""What a cell records of each step; a missing value is null."""
CURVES = ("evaluation/greedy", "evaluation/sampled")
"""Accuracy on held-out problems between the steps, recorded if the recipe measures it."""

Columns = dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class CellNumbers:
    """What must be equal when a cell is repeated."""

    columns: Columns
    heldout: dict[str, dict[str, float | None]]
    """By stage and mode, as `rl/sampled`: accuracy, tool-error rate in correct rollouts, length."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The file of a cell."""

    claim: str
    arm: str
    seed: int
    recipe: str
    """Fingerprint of the settings of the RL run."""
    sft: str | None
    """Fingerprint of the SFT run it started from."""
    numbers: CellNumbers
    made: dict[str, Any]
    """Machine, versions, arithmetic and core-seconds; may differ when repeated."""
    evaluations: dict[str, CellEvaluation] = field(default_factory=dict)
    """From their own files."""


def read_numbers(run: Path) -> CellNumbers:
    """The numbers of a finished run directory."""
    lines = [line for line in read_metrics(run) if "reward" in line]
    measured = [name for name in CURVES if any(name in line for line in lines)]
    columns = {name: [line.get(name) for line in lines] for name in (*COLUMNS, *measured)}
    heldout = {
        f"{e.stage}/{e.mode}": {
            "accuracy": e.accuracy.mean,
            "failing_calls_in_correct": e.failing_calls_in_correct,
            "response_length": e.mean_length,
        }
        for e in read_evaluations(run)
    }
    return CellNumbers(columns, heldout)


def result_path(results: Path, cell: Cell) -> Path:
    """Where the numbers of a cell are."""
    return results / cell.claim / f"{cell.name}.json"


def write_result(results: Path, result: CellResult) -> Path:
    """Write a cell's file: one line per column, so that a diff shows what changed."""
    path = result_path(results, Cell(result.claim, result.arm, result.seed))
    values = asdict(result)
    del values["evaluations"]
    columns = values["numbers"].pop("columns")
    text = json.dumps(values, indent=1)
    lines = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in columns.items())
    text = text.replace('"numbers": {', '"numbers": {\n  "columns": {\n' + lines + "\n  },", 1)
    json.loads(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text + "\n")
    return path


def read_result(results: Path, cell: Cell) -> CellResult | None:
    """The recorded cell; None if it was not run yet."""
    path = result_path(results, cell)
    try:
        values = json.loads(path.read_text())
        evaluations = read_evaluations_of(results, cell)
        numbers = CellNumbers(**values["numbers"])
        return CellResult(**{**values, "numbers": numbers, "evaluations": evaluations})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not the result of a cell: {error}; delete it") from error


@dataclass(frozen=True, slots=True)
class Repetition:
    """A recorded cell that was run again alone, and whether every number was equal."""

    cell: str
    """As `roc/3`."""
    equal: bool
    commit: str
    cpu: str
    torch: str


def read_repetitions(results: Path, claim: str) -> list[Repetition]:
    """The repetitions of a claim's cells."""
    path = results / claim / "repeated.json"
    try:
        return [Repetition(**values) for values in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a list of repeated cells: {error}; delete it") from error


def write_repetition(results: Path, result: CellResult, *, equal: bool) -> None:
    """Add a repetition to the record; a later one of the same cell replaces it."""
    made = {name: str(result.made[name]) for name in ("commit", "cpu", "torch")}
    new = Repetition(f"{result.arm}/{result.seed}", equal, **made)
    kept = [r for r in read_repetitions(results, result.claim) if r.cell != new.cell]
    values = [asdict(r) for r in sorted([*kept, new], key=lambda r: r.cell)]
    write_file(results / result.claim / "repeated.json", json.dumps(values, indent=1) + "\n")


def difference(first: CellNumbers, second: CellNumbers) -> str | None:
    """Where two results differ first, in a sentence; None if all numbers are equal."""
    for name in first.columns:
        ours, theirs = first.columns[name], second.columns.get(name)
        if theirs is None or len(ours) != len(theirs):
            return f"{name} has {len(ours)} steps against {len(theirs or ())}"
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
            if a != b:
                return f"{name} of step {step} is {a} against {b}"
    for stage, values in first.heldout.items():
        other: Mapping[str, float | None] = second.heldout.get(stage, {})
        for name, a in values.items():
            if a != other.get(name):
                return f"held-out {name} after {stage} is {a} against {other.get(name)}"
    return None

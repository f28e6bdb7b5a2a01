"""The progress of a difficulty filter: one short line for every group that has ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rstar2.record.directory import filter_stage
from rstar2.record.read import read_lines
from rstar2.types import WeightVersion


class SolvedLine(msgspec.Struct, frozen=True):
    """How often one problem was solved with the weights of a version."""

    version: WeightVersion
    index: int
    correct: int
    graded: int


def solved_file(run: Path, stage: str) -> Path:
    """The lines of the filter before a stage; it exists until the filter has ended."""
    return run / f"{filter_stage(stage)}.jsonl"


def unfinished_filters(run: Path, stages: Iterable[str], version: WeightVersion) -> set[str]:
    """The filters that were interrupted with these weights: they resume with their groups."""
    return {
        filter_stage(stage)
        for stage in stages
        if any(x.version == version for x in read_lines(solved_file(run, stage), SolvedLine))
    }

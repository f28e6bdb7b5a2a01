"""Trajectories to analyse: those a run has on record, with the entropies it recorded, or computed
again by the learner's own model code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2.entropy.classes import Token, tokens_of
from rstar2.errors import UserError
from rstar2.record import evaluation_stage, read_evaluations, read_groups, read_recipe
from rstar2.types import Trajectory

COUNT = 64
"""Trajectories of one table, as in the paper."""

Pieces = Callable[[Sequence[int]], list[str]]
Values = list[list[float]]
"""One value per sampled token, by turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Trajectories under one name."""

    label: str
    trajectories: tuple[Trajectory, ...]


def stages_of(run: Path) -> list[str]:
    """`sft` and the RL stages of a run's recipe."""
    rl = read_recipe(run).get("rl") or {}
    return ["sft", *(str(stage["name"]) for stage in rl.get("stages") or [])]


def evaluations(run: Path, count: int, seed: int = 0) -> list[Sample]:
    """The sampled answers to the held-out problems, after SFT and after each stage.

    The same problems at every stage: what differs between two samples is the policy.
    """
    done = {(e.stage, e.mode) for e in read_evaluations(run)}
    found = []
    for stage in stages_of(run):
        if (stage, "sampled") in done:
            name = evaluation_stage(stage, "sampled")
            chosen = _choose(
                (g.group.trajectories[:1] for g in read_groups(run, name)), count, seed
            )
            if chosen:
                found.append(Sample(stage, chosen))
    return found


def course(run: Path, count: int, points: int, seed: int = 0) -> Iterator[tuple[str, int, Sample]]:
    """(stage, step, sample) over RL: about `points` steps of each stage, evenly."""
    for stage in stages_of(run)[1:]:
        by_step: dict[int, list[Trajectory]] = {}
        wanted: set[int] | None = None
        steps = sorted({line.step for line in _heads(run, stage)})
        if steps:
            spread = [round(i * (len(steps) - 1) / max(1, points - 1)) for i in range(points)]
            wanted = {steps[i] for i in spread if i < len(steps)}
        for line in read_groups(run, stage):
            if wanted and line.step in wanted:
                by_step.setdefault(line.step, []).extend(line.group.trajectories)
        for step, trajectories in sorted(by_step.items()):
            chosen = _choose([tuple(trajectories)], count, seed)
            yield stage, step, Sample(f"{stage} {step}", chosen)


def _heads(run: Path, stage: str) -> Iterator[Any]:
    from rstar2.record.files import Head
    from rstar2.record.read import read_lines

    return read_lines(run / "trajectories" / f"{stage}.jsonl", Head)


def _choose(groups: Any, count: int, seed: int) -> tuple[Trajectory, ...]:
    """As many trajectories as asked, drawn by the seed, in their order."""
    found = [t for part in groups for t in part if t.sampled_tokens]
    if count and len(found) > count:
        places = sorted(random.Random(seed).sample(range(len(found)), count))
        found = [found[i] for i in places]
    return tuple(found)


# --------------------------------------------------------------------------- entropies


def recorded(trajectory: Trajectory) -> Values | None:
    """What the engine reported; None if a turn has nothing."""
    if any(turn.entropies is None for turn in trajectory.turns):
        return None
    return [list(turn.entropies or ()) for turn in trajectory.turns]


def classed(
    sample: Sample, pieces: Pieces, exact: Callable[[Sequence[Trajectory]], list[Values]] | None
) -> list[list[Token]]:
    """The tokens of each trajectory, with recorded entropies unless `exact` computes them."""
    if exact is not None:
        values: list[Values] = exact(sample.trajectories)
    else:
        values = []
        for trajectory in sample.trajectories:
            found = recorded(trajectory)
            if found is None:
                raise UserError(
                    f"{trajectory.id}: its engine reported no entropies; have them computed by the "
                    "model with --model DIR"
                )
            values.append(found)
    return [
        tokens_of(trajectory, [pieces(turn.sampled_ids) for turn in trajectory.turns], entropies)
        for trajectory, entropies in zip(sample.trajectories, values, strict=True)
    ]

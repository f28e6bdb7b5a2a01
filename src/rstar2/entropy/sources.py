"""Trajectories to analyse: those a run has on record, with the entropies it recorded, or computed
again by the learner's own model code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rstar2.entropy.classes import Token, tokens_of
from rstar2.errors import UserError
from rstar2.record import evaluation_stage, read_evaluations, read_groups, read_recipe
from rstar2.record.files import StepHead
from rstar2.record.read import read_lines
from rstar2.types import Trajectory

COUNT = 64
"""Trajectories of one table, as in the paper."""

Pieces = Callable[[Sequence[int]], list[str]]
Values = list[list[float]]
"""One value per sampled token, by turn."""
Exact = Callable[[Sequence[Trajectory]], list[Values]]
"""Computes the entropies of trajectories."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Trajectories under one name, each with what it was asked."""

    label: str
    trajectories: tuple[Trajectory, ...]
    prompts: tuple[str, ...]


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
            lines = read_groups(run, evaluation_stage(stage, "sampled"))
            asked = [(t, g.group.problem.prompt) for g in lines for t in g.group.trajectories[:1]]
            if sample := _draw(stage, asked, count, seed):
                found.append(sample)
    return found


def course(run: Path, count: int, points: int, seed: int = 0) -> Iterator[tuple[str, int, Sample]]:
    """(stage, step, sample) over RL: about `points` steps of each stage, evenly."""
    for stage in stages_of(run)[1:]:
        file = run / "trajectories" / f"{stage}.jsonl"
        steps = sorted({head.step for head in read_lines(file, StepHead)})
        wanted = {
            steps[round(i * (len(steps) - 1) / max(1, points - 1))]
            for i in range(points if steps else 0)
        }
        by_step: dict[int, list[tuple[Trajectory, str]]] = {}
        for line in read_groups(run, stage):
            if line.step in wanted:
                asked = [(t, line.group.problem.prompt) for t in line.group.trajectories]
                by_step.setdefault(line.step, []).extend(asked)
        for step, found in sorted(by_step.items()):
            if sample := _draw(f"{stage} {step}", found, count, seed):
                yield stage, step, sample


def _draw(
    label: str, found: Sequence[tuple[Trajectory, str]], count: int, seed: int
) -> Sample | None:
    """As many trajectories as asked, drawn by the seed, in their order; None if there are none."""
    usable = [pair for pair in found if pair[0].sampled_tokens]
    if len(usable) > count:
        places = sorted(random.Random(seed).sample(range(len(usable)), count))
        usable = [usable[place] for place in places]
    if not usable:
        return None
    trajectories, prompts = zip(*usable, strict=True)
    return Sample(label, trajectories, prompts)


# --------------------------------------------------------------------------- entropies


def recorded(trajectory: Trajectory) -> Values | None:
    """What the engine reported; None if a turn has nothing."""
    if any(turn.entropies is None for turn in trajectory.turns):
        return None
    return [list(turn.entropies or ()) for turn in trajectory.turns]


def classed(sample: Sample, pieces: Pieces, exact: Exact | None) -> list[list[Token]]:
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

"""Trajectories to analyse, and the entropies of their tokens: recorded by the engine, or computed
from the token ids by the learner's model code.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rstar2.entropy.classes import Token, TokenEntropies, recorded_entropies, tokens_of
from rstar2.errors import UserError
from rstar2.learner.model import load_policy
from rstar2.learner.pack import input_length, make_pack, make_row, plan
from rstar2.record import evaluation_stage, read_evaluations, read_groups, read_recipe
from rstar2.record.files import StepHead
from rstar2.record.read import read_lines, rl_stage_names
from rstar2.types import Trajectory

COUNT = 64
"""Trajectories per table, as in the paper."""
TOKENS_PER_PACK = 8192

Pieces = Callable[[Sequence[int]], list[str]]
ExactEntropies = Callable[[Sequence[Trajectory]], list[TokenEntropies]]
"""Computes the entropies of trajectories."""


@dataclass(frozen=True, slots=True)
class LabelledRollouts:
    """Trajectories with a common label, each with its prompt."""

    label: str
    trajectories: tuple[Trajectory, ...]
    prompts: tuple[str, ...]


def stages_of(run: Path) -> list[str]:
    """`sft` and the RL stages of a run's recipe."""
    return ["sft", *rl_stage_names(read_recipe(run))]


def evaluations(run: Path, count: int, seed: int = 0) -> list[LabelledRollouts]:
    """The sampled answers to the held-out problems, after SFT and after each stage.

    The problems are the same at every stage, so two samples differ only in the policy.
    """
    done = {(e.stage, e.mode) for e in read_evaluations(run)}
    samples = []
    for stage in stages_of(run):
        if (stage, "sampled") in done:
            lines = read_groups(run, evaluation_stage(stage, "sampled"))
            asked = [(t, g.group.problem.prompt) for g in lines for t in g.group.trajectories[:1]]
            if sample := _draw(stage, asked, count, seed):
                samples.append(sample)
    return samples


def course(
    run: Path, count: int, points: int, seed: int = 0
) -> Iterator[tuple[str, int, LabelledRollouts]]:
    """(stage, step, sample) over RL: about `points` steps of each stage, evenly spaced."""
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
        for step, asked in sorted(by_step.items()):
            if sample := _draw(f"{stage} {step}", asked, count, seed):
                yield stage, step, sample


def _draw(
    label: str, asked: Sequence[tuple[Trajectory, str]], count: int, seed: int
) -> LabelledRollouts | None:
    """`count` trajectories, chosen by the seed, in their order; None if there are none."""
    usable = [pair for pair in asked if pair[0].sampled_tokens]
    if len(usable) > count:
        places = sorted(random.Random(seed).sample(range(len(usable)), count))
        usable = [usable[place] for place in places]
    if not usable:
        return None
    trajectories, prompts = zip(*usable, strict=True)
    return LabelledRollouts(label, trajectories, prompts)


# --------------------------------------------------------------------------- entropies


def classed(
    sample: LabelledRollouts, pieces: Pieces, exact: ExactEntropies | None
) -> list[list[Token]]:
    """The tokens of each trajectory, with recorded entropies unless `exact` computes them."""
    if exact is not None:
        values: list[TokenEntropies] = exact(sample.trajectories)
    else:
        values = []
        for trajectory in sample.trajectories:
            entropies = recorded_entropies(trajectory)
            if entropies is None:
                raise UserError(
                    f"{trajectory.id}: its engine reported no entropies; use --exact to compute "
                    "them from the exported weights"
                )
            values.append(entropies)
    return [
        tokens_of(
            trajectory, [pieces(turn.sampled_ids) for turn in trajectory.all_turns], entropies
        )
        for trajectory, entropies in zip(sample.trajectories, values, strict=True)
    ]


def exact_entropies(model_dir: Path) -> ExactEntropies:
    """A function that computes entropies from token ids with the learner's model code.

    They are exact: over the whole vocabulary, at temperature 1.
    """
    policy = load_policy(model_dir, "cpu")
    policy.eval()

    @torch.inference_mode()
    def compute(trajectories: Sequence[Trajectory]) -> list[TokenEntropies]:
        rows = [(s.token_ids, s.mask) for t in trajectories for s in t.segments]
        by_row: dict[int, list[float]] = {}
        for (bins,) in plan([input_length(mask) for _, mask in rows], TOKENS_PER_PACK):
            pack = make_pack([make_row(i, *rows[i]) for i in bins])
            _, entropy_T = policy(pack)
            parts = entropy_T.split([len(row.predict) for row in pack.rows])
            by_row |= {row.index: part.tolist() for row, part in zip(pack.rows, parts, strict=True)}
        numbers = itertools.count()
        return [
            _by_turn([value for _ in t.segments for value in by_row.get(next(numbers), [])], t)
            for t in trajectories
        ]

    return compute


def _by_turn(values: Sequence[float], trajectory: Trajectory) -> TokenEntropies:
    left = iter(values)
    return [[next(left) for _ in turn.sampled_ids] for turn in trajectory.all_turns]

"""Two evaluations problem by problem: of two runs, or of two stages of one run.

Problems are the pairs, matched by id and prompt; the test and the intervals are those of
`rstar2 eval compare`. A problem that only one side has, or that has another text there, is
counted and left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rstar2.evaluate.compare import paired_values
from rstar2.evaluate.metrics import bootstrap, shares
from rstar2.record import evaluation_stage
from rstar2.report.latex import formulas
from rstar2.viewer import overview
from rstar2.viewer.catalog import GroupRef
from rstar2.viewer.run import NotRecordedError, ViewedRun

MOST_PROBLEMS = 400
"""Problems listed one by one; the figures cover all."""


@dataclass(frozen=True, slots=True)
class ProblemRollouts:
    """The graded rollouts of one problem in one evaluation."""

    group: GroupRef
    rewards: tuple[float, ...]
    tokens: float
    """Mean tokens of a rollout."""

    @property
    def mean_reward(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)


def compare_runs(
    first: ViewedRun, second: ViewedRun, stages: tuple[str, str], mode: str
) -> dict[str, Any]:
    """The comparison of two evaluations; an empty stage or mode takes a default."""
    known = (_evaluated(first), _evaluated(second))
    modes = [name for name in ("sampled", "greedy") if all(name in side for side in known)]
    mode = mode or next(iter(modes), "")
    if mode not in modes:
        raise NotRecordedError(
            f"{first.name} and {second.name} have no {mode or 'held-out'} evaluation in common"
        )
    left = stages[0] or known[0][mode][0 if first is second else -1]
    right = stages[1] or known[1][mode][-1]
    sides = (_rollouts(first, left, mode), _rollouts(second, right, mode))
    matched = [
        problem
        for problem, ours in sides[0].items()
        if problem in sides[1] and sides[1][problem].group.prompt == ours.group.prompt
    ]
    if not matched:
        raise NotRecordedError(
            f"{first.name} after {left} and {second.name} after {right} have no problem in common"
        )
    return {
        "mode": mode,
        "modes": modes,
        "a": {"run": first.name, "stage": left, "stages": known[0][mode]},
        "b": {"run": second.name, "stage": right, "stages": known[1][mode]},
        "unmatched": len(sides[0].keys() | sides[1].keys()) - len(matched),
        **_figures(sides, matched),
    }


def _evaluated(run: ViewedRun) -> dict[str, list[str]]:
    """The stages whose evaluation has recorded rollouts, by mode, in order."""
    with run.lock:
        by_mode: dict[str, list[str]] = {}
        for evaluation in overview.evaluations(run):
            stage, mode = str(evaluation["stage"]), str(evaluation.get("mode"))
            if run.catalog.steps(evaluation_stage(stage, mode)):
                by_mode.setdefault(mode, []).append(stage)
        return by_mode


def _rollouts(run: ViewedRun, stage: str, mode: str) -> dict[str, ProblemRollouts]:
    """The graded rollouts of the newest evaluation after a stage, by problem."""
    name = evaluation_stage(stage, mode)
    with run.lock:
        steps = run.catalog.steps(name)
        if not steps:
            raise NotRecordedError(f"{run.name} has no {mode} evaluation after {stage!r} on record")
        problems = {}
        for group in run.catalog.groups_of_step(name, steps[-1]):
            rows = [r for r in run.catalog.rollouts_of(group) if r["reward"] is not None]
            if rows:
                tokens = math.fsum(r["tokens"] for r in rows) / len(rows)
                rewards = tuple(float(r["reward"]) for r in rows)
                problems[group.problem] = ProblemRollouts(group, rewards, tokens)
        return problems


def _figures(
    sides: tuple[Mapping[str, ProblemRollouts], Mapping[str, ProblemRollouts]], matched: list[str]
) -> dict[str, Any]:
    pairs = {problem: (sides[0][problem], sides[1][problem]) for problem in matched}
    rewards = [(a.mean_reward, b.mean_reward) for a, b in pairs.values()]
    tokens = [(a.tokens, b.tokens) for a, b in pairs.values()]
    kinds: dict[str, list[tuple[float, float]]] = {}
    for (a, _), values in zip(pairs.values(), rewards, strict=True):
        kinds.setdefault(a.group.kind, []).append(values)
    rows = [_row(problem, a, b) for problem, (a, b) in pairs.items()]
    rows.sort(key=lambda row: -abs(row["difference"]))
    return {
        "paired": paired_values("", rewards, tokens),
        "first": shares([a for a, _ in rewards]),
        "second": shares([b for _, b in rewards]),
        "kinds": [
            {
                "kind": kind,
                "first": shares([a for a, _ in values]),
                "second": shares([b for _, b in values]),
                "difference": bootstrap([b - a for a, b in values]),
            }
            for kind, values in kinds.items()
        ],
        "problems": rows[:MOST_PROBLEMS],
    }


def _row(problem: str, first: ProblemRollouts, second: ProblemRollouts) -> dict[str, Any]:
    return {
        "problem": problem,
        "kind": first.group.kind,
        "prompt": first.group.prompt,
        "prompt_math": formulas(first.group.prompt),
        "groups": (first.group.id, second.group.id),
        "rewards": (first.rewards, second.rewards),
        "difference": second.mean_reward - first.mean_reward,
    }

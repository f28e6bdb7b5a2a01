"""Which trajectories the report shows: the same held-out problem before RL and after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rstar2.record import evaluation_stage, read_groups
from rstar2.report.segments import Segment, segments
from rstar2.report.summary import Summary
from rstar2.types import Problem, Trajectory

LEARNT, STILL_WRONG = 4, 1


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory, ready to be shown."""

    stage: str
    correct: bool
    answer: str | None
    stop: str
    tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One problem, before and after."""

    problem: Problem
    before: Rollout
    after: Rollout


def choose_examples(summary: Summary) -> list[Example]:
    """Problems learnt, each of another kind, then one that is still wrong, if there is any."""
    mode = next((m for m in summary.modes if summary.first_and_last(m)), None)
    ends = summary.first_and_last(mode) if mode else None
    if mode is None or ends is None:
        return []
    first, last = ends[0].stage, ends[1].stage
    before = dict(_by_problem(summary.path, evaluation_stage(first, mode)))
    learnt: dict[str, Example] = {}
    wrong: list[Example] = []
    for problem_id, (problem, after) in _by_problem(summary.path, evaluation_stage(last, mode)):
        if problem_id not in before:
            continue
        earlier = before[problem_id][1]
        example = Example(problem, _rollout(first, earlier), _rollout(last, after))
        if after.correct and not earlier.correct:
            learnt.setdefault(problem.kind or problem_id, example)
        elif not after.correct and len(wrong) < STILL_WRONG:
            wrong.append(example)
    return [*_varied(list(learnt.values())), *wrong]


def _varied(examples: list[Example]) -> list[Example]:
    """Those first whose failures before differ: a tool error says more than a wrong answer."""
    failed = [e for e in examples if any(s.failed for s in e.before.segments)]
    others = [e for e in examples if e not in failed]
    half = LEARNT // 2
    chosen = failed[:half] + others[: LEARNT - min(half, len(failed))]
    return (chosen + failed[half:])[:LEARNT]


def _by_problem(run: Path, stage: str) -> Iterator[tuple[str, tuple[Problem, Trajectory]]]:
    for line in read_groups(run, stage):
        if line.group.trajectories:
            yield line.group.problem.id, (line.group.problem, line.group.trajectories[0])


def _rollout(stage: str, trajectory: Trajectory) -> Rollout:
    return Rollout(
        stage=stage,
        correct=trajectory.correct,
        answer=trajectory.reward.answer if trajectory.reward else None,
        stop=trajectory.stop.value.replace("_", " "),
        tokens=len(trajectory.completion_ids),
        segments=tuple(segments(trajectory)),
    )

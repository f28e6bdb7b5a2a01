"""From a directory of answers to its results: the verdicts on record, or fresh ones (--rescore).

Reads answers one at a time and keeps of each what the figures need, so that an evaluation of any
length fits into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rstar2.errors import DataError, InfrastructureError
from rstar2.evaluate.scores import AnswerSummary, BenchmarkScore, GradedAnswer, score, verdict
from rstar2.evaluate.store import elapsed, read_answers, read_problems
from rstar2.reward.grade import Verifier, grade
from rstar2.rollout.groups import GRADE_DEADLINE_S, together
from rstar2.types import Problem

AT_ONCE = 256
"""Verdicts that are asked for at the same time."""


def assess(path: Path, benchmarks: Sequence[str], samples: int) -> dict[str, BenchmarkScore]:
    """The figures of each benchmark, by the verdicts on record."""
    scores = {}
    for name in benchmarks:
        problems = read_problems(path, name)
        graders = {problem.id: problem.grader for problem in problems}
        found = [verdict(a, graders[a.problem_id]) for a in read_answers(path, name)]
        scores[name] = score(name, problems, found, samples=samples, wall_s=elapsed(path, name))
    return scores


async def rescore(
    path: Path,
    benchmarks: Mapping[str, Sequence[Problem] | None],
    samples: int,
    verifier: Verifier,
    on_answer: Callable[[GradedAnswer], None] = lambda answer: None,
) -> dict[str, BenchmarkScore]:
    """The figures by the graders and truths of today; None takes the problems on record.

    What the model answered is what was read from its text when it was generated.
    """
    return {
        name: await _rescore_one(
            path, name, given or read_problems(path, name), samples, verifier, on_answer
        )
        for name, given in benchmarks.items()
    }


async def _rescore_one(
    path: Path,
    name: str,
    problems: Sequence[Problem],
    samples: int,
    verifier: Verifier,
    on_answer: Callable[[GradedAnswer], None],
) -> BenchmarkScore:
    by_id = {problem.id: problem for problem in problems}
    changes: Counter[str] = Counter()
    answers = read_answers(path, name)
    found: list[AnswerSummary] = []

    async def worker() -> None:
        for answer in answers:
            if answer.problem_id not in by_id:
                raise DataError(f"{name} has no problem {answer.problem_id}, which was answered")
            problem = by_id[answer.problem_id]
            fresh = await regrade(answer, problem, verifier)
            if fresh.trajectory.correct != answer.trajectory.correct:
                changes["to_right" if fresh.trajectory.correct else "to_wrong"] += 1
            found.append(verdict(fresh, problem.grader))
            on_answer(fresh)

    await together(worker() for _ in range(AT_ONCE))
    wall_s = elapsed(path, name)
    return score(name, problems, found, samples=samples, wall_s=wall_s, settled=changes)


async def regrade(answer: GradedAnswer, problem: Problem, verifier: Verifier) -> GradedAnswer:
    """The answer with a fresh verdict."""
    bare = replace(answer.trajectory, reward=None, failure=None)
    graded = await grade(bare, problem, verifier, GRADE_DEADLINE_S)
    if graded.failure is not None:
        raise InfrastructureError(
            f"{problem.id}, sample {answer.sample}: {graded.failure.name}: {graded.failure.message}"
        )
    return replace(answer, trajectory=graded)

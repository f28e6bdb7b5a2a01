"""Compute the score of one benchmark from its answers. Pure; resampling is seeded.

- avg@k: the mean over problems of their mean reward; with rewards of 0 and 1, the share of right
  answers. For the other figures an answer is right if its reward is above 0.5.
- pass@j: the unbiased estimate that one of j answers is right, from all k answers.
- maj@k: whether the most frequent answer is right. Tied answers share the vote; a rollout without
  an answer does not vote. Two answers are the same vote if they are spelt alike after spacing,
  \\left, \\right, $ and similar are removed (integers and choices: if their values are equal).
  Equivalent algebra that only the grader would recognise splits the vote, right or wrong.

Every figure except the tool-call rates weights problems equally, with intervals over problems.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rstar2.evaluate.metrics import at_least_one, bootstrap, mean, ratio, shares
from rstar2.reward.grade import as_choice, as_integer
from rstar2.types import Estimate, Outcome, Problem, StopReason, Trajectory

_NOISE = re.compile(r"\\(?:left|right|!|,|;|:| )|\s+|\$|\.$")


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One rollout of one problem; `tokens` is its completion, tool responses included."""

    benchmark: str
    problem_id: str
    sample: int
    tokens: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """The part of one graded answer that the figures need."""

    problem_id: str
    sample: int
    correct: bool
    vote: str | None
    tokens: int
    turns: int
    stop: StopReason
    outcomes: Mapping[str, int]
    reward: float


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """The score of one problem."""

    id: str
    kind: str
    answers: int
    correct: int
    majority: float
    """1 if the most frequent answer is right, 0 if not; in a tie, the share that is right."""
    mean_tokens: float
    reward: float | None = None
    """Mean reward; None in results of version 0.2, whose rewards are 0 and 1."""

    @property
    def mean_reward(self) -> float:
        return self.correct / self.answers if self.reward is None else self.reward


@dataclass(frozen=True, slots=True)
class BenchmarkScore:
    """The score of one policy on one benchmark."""

    benchmark: str
    samples: int
    average: Estimate
    majority: Estimate
    passes: Mapping[str, Estimate]
    """pass@j by j."""
    tokens: Estimate
    mean_turns: float
    tool_use: float
    """Share of answers with at least one call."""
    calls: float
    """Calls per answer."""
    tool_errors: float | None
    """Failed calls / calls. None if there was no call; the same holds for the next two."""
    failing_calls_in_correct: float | None
    valid_calls: float | None
    """Calls that could be executed / calls."""
    truncated: float
    stops: Mapping[str, int]
    outcomes: Mapping[str, int]
    kinds: Mapping[str, Estimate]
    problems: tuple[ProblemScore, ...]
    missing: int = 0
    """Answers that were lost to infrastructure or not generated yet."""
    wall_s: float = 0.0
    settled: Mapping[str, int] = field(default_factory=dict)
    """Grades that a rescoring changed: `to_right`, `to_wrong`."""


NOTHING = Estimate(0.0, 0.0, 1.0, 0)
"""The estimate over no problem: no information (and JSON has no NaN)."""


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one share per problem; NOTHING if there is no problem."""
    return shares(values) if values else NOTHING


def summarise_answer(answer: GradedAnswer, grader: str) -> AnswerSummary:
    """Reduce a graded answer to what the figures need."""
    trajectory = answer.trajectory
    assert trajectory.reward is not None
    return AnswerSummary(
        problem_id=answer.problem_id,
        sample=answer.sample,
        correct=trajectory.correct,
        vote=vote(trajectory.answer, grader),
        tokens=answer.tokens,
        turns=len(trajectory.all_turns),
        stop=trajectory.stop,
        outcomes=Counter(result.outcome.value for result in trajectory.results),
        reward=trajectory.reward.value,
    )


def vote(answer: str | None, grader: str) -> str | None:
    """The normal form of an answer that majority voting compares."""
    if answer is None:
        return None
    known = as_choice(answer) if grader == "choice" else as_integer(answer)
    if known is not None:
        return known
    return _NOISE.sub("", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def majority(summaries: Iterable[AnswerSummary]) -> float:
    """Share of right answers among the most frequent answers to one problem."""
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for one in summaries:
        if one.vote is not None:
            votes[one.vote].append(one.correct)
    most = max(map(len, votes.values()), default=0)
    winners = [cast for cast in votes.values() if len(cast) == most]
    # Grades of one spelling can differ: a rollout may be cut off after its answer.
    return mean(2 * sum(cast) > len(cast) for cast in winners)


def powers(samples: int) -> list[int]:
    """The values of j for pass@j: powers of two up to k, and k itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def score(
    benchmark: str,
    problems: Sequence[Problem],
    summaries: Iterable[AnswerSummary],
    *,
    samples: int,
    wall_s: float = 0.0,
    settled: Mapping[str, int] | None = None,
) -> BenchmarkScore:
    """The score of one benchmark; problems without an answer only count as missing."""
    by_id: defaultdict[str, list[AnswerSummary]] = defaultdict(list)
    for one in summaries:
        if one.sample < samples:
            by_id[one.problem_id].append(one)
    rows = [_problem(p, by_id[p.id]) for p in problems if by_id[p.id]]
    scored = [one for problem in problems for one in by_id[problem.id]]
    outcomes = _sum(one.outcomes for one in scored)
    calls = sum(n for name, n in outcomes.items() if name != Outcome.INFRASTRUCTURE)
    return BenchmarkScore(
        benchmark=benchmark,
        samples=samples,
        average=estimate([row.mean_reward for row in rows]),
        majority=estimate([row.majority for row in rows]),
        passes={
            str(k): estimate(
                [at_least_one(r.answers, r.correct, k) for r in rows if r.answers >= k]
            )
            for k in powers(samples)
        },
        tokens=bootstrap([row.mean_tokens for row in rows]) if rows else NOTHING,
        mean_turns=mean(one.turns for one in scored),
        tool_use=mean(bool(one.outcomes) for one in scored),
        calls=calls / len(scored) if scored else 0.0,
        tool_errors=failing(outcomes),
        failing_calls_in_correct=failing(_sum(one.outcomes for one in scored if one.correct)),
        valid_calls=ratio(calls - _count(outcomes, lambda outcome: outcome.malformed), calls),
        truncated=mean(one.stop is StopReason.MAX_LENGTH for one in scored),
        stops=dict(Counter(one.stop.value for one in scored).most_common()),
        outcomes=dict(outcomes.most_common()),
        kinds=_kinds(rows),
        problems=tuple(rows),
        missing=len(problems) * samples - len(scored),
        wall_s=wall_s,
        settled=settled or {},
    )


def _problem(problem: Problem, summaries: Sequence[AnswerSummary]) -> ProblemScore:
    return ProblemScore(
        id=problem.id,
        kind=problem.kind,
        answers=len(summaries),
        correct=sum(one.correct for one in summaries),
        majority=majority(summaries),
        mean_tokens=math.fsum(one.tokens for one in summaries) / len(summaries),
        reward=math.fsum(one.reward for one in summaries) / len(summaries),
    )


def _kinds(rows: Sequence[ProblemScore]) -> dict[str, Estimate]:
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.kind:
            by_kind[row.kind].append(row.mean_reward)
    return {kind: shares(values) for kind, values in sorted(by_kind.items())}


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def failing(outcomes: Mapping[str, int]) -> float | None:
    """Failed calls / calls."""
    calls = sum(n for name, n in outcomes.items() if name != Outcome.INFRASTRUCTURE)
    return ratio(_count(outcomes, lambda outcome: outcome.failed), calls)


def _count(outcomes: Mapping[str, int], counts: Callable[[Outcome], bool]) -> int:
    return sum(n for name, n in outcomes.items() if counts(Outcome(name)))

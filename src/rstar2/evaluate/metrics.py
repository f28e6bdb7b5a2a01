"""Figures with confidence intervals from graded rollouts. Pure; resampling is seeded.

Problems are the independent units: the k answers to one problem are averaged first (avg@k), and the
interval is over problems. If every problem is either solved or not, it is a Wilson interval.
Otherwise it is a percentile bootstrap over problems, which makes no assumption about how the k
answers correlate.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rstar2.types import Estimate, Evaluation, Group, Outcome, Trajectory

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""
RESAMPLES = 2000


def wilson(successes: float, count: int) -> Estimate:
    """A share with Wilson's 95% interval, which stays inside [0, 1] and has width at 0 and 1."""
    if count == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share = successes / count
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half), count)


def bootstrap(values: Sequence[float]) -> Estimate:
    """A mean with its 95% percentile bootstrap interval over the values."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if len(set(values)) == 1:
        return Estimate(mean, mean, mean, count)
    rng = random.Random(0)
    means = sorted(math.fsum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    tail = int(0.025 * RESAMPLES)
    return Estimate(mean, means[tail], means[-tail - 1], count)


def average_at_k(groups: Iterable[Group]) -> Estimate:
    """Mean over problems of their mean reward (with rewards of 0 and 1: the share of correct
    answers); problems without a reward are excluded."""
    return shares([math.fsum(g.rewards) / len(g.rewards) for g in groups if g.rewards])


def shares(values: Sequence[float]) -> Estimate:
    """Mean of one value per problem: Wilson if all are 0 or 1 or equal shares, else bootstrap."""
    whole = all(value in (0.0, 1.0) for value in values)
    equal = len(set(values)) == 1 and 0.0 <= values[0] <= 1.0
    if whole or equal:  # a bootstrap of equal values has no width
        return wilson(math.fsum(values), len(values))
    return bootstrap(values)


def at_least_one(count: int, correct: int, k: int) -> float:
    """Probability that k of `count` answers, drawn without replacement, include a correct one."""
    return 1.0 - math.comb(count - correct, k) / math.comb(count, k)


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, or None if the denominator is 0."""
    return numerator / denominator if denominator else None


def failing_calls(trajectories: Iterable[Trajectory]) -> float | None:
    """Failed calls / calls; None if there was no call."""
    listed = tuple(trajectories)
    return ratio(sum(t.failed_calls for t in listed), sum(t.calls for t in listed))


def valid_calls(trajectories: Iterable[Trajectory]) -> float | None:
    """Calls that could be executed / calls; None if there was no call."""
    outcomes = [result.outcome for t in trajectories for result in t.results]
    counted = [outcome for outcome in outcomes if outcome is not Outcome.INFRASTRUCTURE]
    return ratio(sum(not outcome.malformed for outcome in counted), len(counted))


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0.0 for no values."""
    listed = tuple(values)
    return math.fsum(listed) / len(listed) if listed else 0.0


def summarise(
    groups: Sequence[Group], *, stage: str, step: int, mode: str, wall_s: float = 0.0
) -> Evaluation:
    """All figures of one policy in one mode, as the final table shows them."""
    by_kind: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.problem.kind:
            by_kind[group.problem.kind].append(group)
    graded = [t for g in groups for t in g.trajectories if t.reward is not None]
    return Evaluation(
        stage=stage,
        step=step,
        mode=mode,
        accuracy=average_at_k(groups),
        kinds={kind: average_at_k(of_kind) for kind, of_kind in sorted(by_kind.items())},
        failing_calls_in_correct=failing_calls(t for t in graded if t.correct),
        tool_errors=failing_calls(graded),
        mean_length=mean(t.completion_tokens for t in graded),
        mean_turns=mean(len(t.all_turns) for t in graded),
        truncated=mean(t.truncated for t in graded),
        wall_s=wall_s,
        valid_calls=valid_calls(graded),
    )

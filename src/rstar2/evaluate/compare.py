"""Compare two evaluations of the same problems with a paired test.

Problems are the pairs. The test is a sign-flip permutation test on the differences: under the null
hypothesis both policies are exchangeable on each problem. With one answer per problem it equals
McNemar's exact test. Up to 2^16 sign patterns are enumerated; beyond that, 20,000 are drawn with a
fixed seed. The interval of the mean difference is a percentile bootstrap over problems. It does not
cover the choice of the problems, which both evaluations share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rstar2.errors import UserError
from rstar2.evaluate.metrics import bootstrap
from rstar2.evaluate.scores import BenchmarkScore
from rstar2.evaluate.store import EvalResults
from rstar2.types import Estimate

EXACT_PAIRS = 16
DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class Paired:
    """B compared with A on one benchmark; differences are B - A."""

    benchmark: str
    problems: int
    first: float
    second: float
    difference: Estimate
    p: float
    better: int
    """Number of problems that B solves more often."""
    worse: int
    tokens: Estimate
    """Difference in completion tokens per answer."""


def compare(first: EvalResults, second: EvalResults) -> list[Paired]:
    """One row per common benchmark, over the problems that both evaluations answered."""
    names = [name for name in first.scores if name in second.scores]
    if not names:
        raise UserError(
            f"no benchmark in common: A has {', '.join(first.scores)}, "
            f"B has {', '.join(second.scores)}"
        )
    for name in names:
        if first.settings.benchmarks.get(name) != second.settings.benchmarks.get(name):
            raise UserError(
                f"{name}: A and B used different problems (another version, count or order of "
                "the set): evaluate both on the same file"
            )
    return [paired(first.scores[name], second.scores[name]) for name in names]


def paired(first: BenchmarkScore, second: BenchmarkScore) -> Paired:
    """The paired test on one benchmark."""
    theirs = {row.id: row for row in second.problems}
    pairs = [(row, theirs[row.id]) for row in first.problems if row.id in theirs]
    if not pairs:
        raise UserError(f"{first.benchmark}: A and B answered no problem in common")
    return paired_values(
        first.benchmark,
        [(a.mean_reward, b.mean_reward) for a, b in pairs],
        [(a.mean_tokens, b.mean_tokens) for a, b in pairs],
    )


def paired_values(
    benchmark: str, rewards: Sequence[tuple[float, float]], tokens: Sequence[tuple[float, float]]
) -> Paired:
    """The paired test on the mean reward and the mean tokens of A and B for each problem."""
    differences = [b - a for a, b in rewards]
    return Paired(
        benchmark=benchmark,
        problems=len(rewards),
        first=math.fsum(a for a, _ in rewards) / len(rewards),
        second=math.fsum(b for _, b in rewards) / len(rewards),
        difference=bootstrap(differences),
        p=sign_flip_p(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        tokens=bootstrap([b - a for a, b in tokens]),
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean difference under random signs."""
    moved = [d for d in differences if d]
    if not moved:
        return 1.0
    observed = abs(math.fsum(moved)) - 1e-9
    count = len(moved)
    if count <= EXACT_PAIRS:
        hits = sum(
            abs(math.fsum(d if pattern >> i & 1 else -d for i, d in enumerate(moved))) >= observed
            for pattern in range(1 << count)
        )
        return hits / (1 << count)
    rng = random.Random(0)
    hits = 0
    for _ in range(DRAWS):
        bits = rng.getrandbits(count)
        flipped = math.fsum(d if bits >> i & 1 else -d for i, d in enumerate(moved))
        hits += abs(flipped) >= observed
    return (hits + 1) / (DRAWS + 1)  # the observed pattern is one of them

"""Two evaluations of the same problems, side by side: is one better, or is it chance?

Problems are the pairs. The test flips the signs of their differences (a permutation test: under
the null hypothesis both policies are exchangeable on each problem); with one answer a problem it
is McNemar's exact test. Up to 2^16 sign patterns are counted in full, beyond that 20,000 are drawn
by a fixed seed. The interval of the mean difference is a percentile bootstrap over problems. It
says nothing about how lucky the choice of problems was for both alike.
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
    """B against A on one benchmark; differences are B - A."""

    benchmark: str
    problems: int
    first: float
    second: float
    difference: Estimate
    p: float
    better: int
    """Problems that B solves more often."""
    worse: int
    tokens: Estimate
    """Difference in completion tokens an answer."""


def compare(first: EvalResults, second: EvalResults) -> list[Paired]:
    """One row per benchmark that both have, over the problems that both have answered."""
    names = [name for name in first.scores if name in second.scores]
    if not names:
        raise UserError(
            f"nothing to compare: one has {', '.join(first.scores)}, "
            f"the other {', '.join(second.scores)}"
        )
    for name in names:
        if first.settings.benchmarks.get(name) != second.settings.benchmarks.get(name):
            raise UserError(
                f"{name}: the two were evaluated on different problems (another version, count or "
                "order of the set)"
            )
    return [paired(first.scores[name], second.scores[name]) for name in names]


def paired(first: BenchmarkScore, second: BenchmarkScore) -> Paired:
    """The paired test on one benchmark."""
    theirs = {row.id: row for row in second.problems}
    pairs = [(row, theirs[row.id]) for row in first.problems if row.id in theirs]
    if not pairs:
        raise UserError(f"{first.benchmark}: no problem was answered by both")
    shares = [(a.correct / a.answers, b.correct / b.answers) for a, b in pairs]
    differences = [b - a for a, b in shares]
    return Paired(
        benchmark=first.benchmark,
        problems=len(pairs),
        first=math.fsum(a for a, _ in shares) / len(pairs),
        second=math.fsum(b for _, b in shares) / len(pairs),
        difference=bootstrap(differences),
        p=sign_flip_p(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        tokens=bootstrap([b.mean_tokens - a.mean_tokens for a, b in pairs]),
    )


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of a mean difference this far from 0, if signs were a coin's."""
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
    rng = random.Random(seed)
    hits = 0
    for _ in range(DRAWS):
        bits = rng.getrandbits(count)
        flipped = math.fsum(d if bits >> i & 1 else -d for i, d in enumerate(moved))
        hits += abs(flipped) >= observed
    return (hits + 1) / (DRAWS + 1)  # the observed pattern is one of them

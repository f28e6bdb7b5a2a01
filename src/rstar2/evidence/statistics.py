"""Tests of contrasts over seeds, and the rule that turns them into a verdict. Pure.

A contrast has one value per seed. It is tested against 0 with Student's t. The p-values of the
primary contrasts of a claim are corrected by Holm's method.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Word = Literal["confirmed", "refuted", "open"]


@dataclass(frozen=True, slots=True)
class ContrastTest:
    """Mean of a contrast over seeds with its interval, and the p-value against 0."""

    mean: float
    low: float
    high: float
    p: float
    sd: float
    count: int


def t_test(values: Sequence[float], alpha: float = 0.05) -> ContrastTest:
    """Student's t over seeds; with fewer than two seeds only the mean is known."""
    count = len(values)
    mean = fmean(values) if values else math.nan
    if count < 2:
        return ContrastTest(mean, math.nan, math.nan, math.nan, math.nan, count)
    from scipy.stats import t  # imported on use: it takes a second

    sd = stdev(values)
    error = sd / math.sqrt(count)
    if error == 0:
        return ContrastTest(mean, mean, mean, 1.0 if mean == 0 else 0.0, 0.0, count)
    half = float(t.ppf(1 - alpha / 2, count - 1)) * error
    p = 2 * float(t.sf(abs(mean) / error, count - 1))
    return ContrastTest(mean, mean - half, mean + half, p, sd, count)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values by Holm's step-down method, in the order given."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def decide(
    test: ContrastTest, adjusted_p: float, expect: str, smallest: float, alpha: float
) -> Word:
    """The verdict of one primary contrast.

    confirmed: significant after correction, with the predicted sign
    refuted: significant with the opposite sign, or the interval excludes an effect of `smallest`
    open: anything else; also a metric that is equal in every seed
    """
    if test.mean == test.sd == 0.0:
        return "open"
    sign = -1.0 if expect == "less" else 1.0
    if adjusted_p < alpha:
        return "confirmed" if sign * test.mean > 0 else "refuted"
    largest_effect = max(sign * test.low, sign * test.high)
    return "refuted" if largest_effect < smallest else "open"


def combine(words: Sequence[Word]) -> str:
    """The word of all primary contrasts of a claim, or `mixed` with how many have which."""
    counts = Counter(sorted(words))
    if len(counts) == 1:
        return words[0]
    return f"mixed: {', '.join(f'{count} {word}' for word, count in counts.items())}"


def power(effect: float, sd: float, count: int, alpha: float) -> float:
    """The chance that a two-sided t-test over `count` seeds finds an effect."""
    from scipy.stats import nct, t

    bound = float(t.ppf(1 - alpha / 2, count - 1))
    shift = effect / sd * math.sqrt(count)
    return float(nct.sf(bound, count - 1, shift) + nct.cdf(-bound, count - 1, shift))

"""Tests over seeds and the rule of a verdict, by hand."""

from __future__ import annotations

import math
import random

import pytest

from rstar2.evidence.statistics import ContrastTest, combine, decide, holm, power, t_test


def test_interval_and_p_by_hand() -> None:
    """Values 0.8, 0.9, 1.0: sd 0.1, t with two degrees of freedom: 4.3027 * 0.1 / sqrt(3)."""
    test = t_test([0.8, 0.9, 1.0])
    assert test.mean == pytest.approx(0.9)
    assert test.high - test.mean == pytest.approx(0.24841, abs=1e-4)
    # for two degrees of freedom P(|T| > t) = 1 - t / sqrt(t^2 + 2), t = 9 * sqrt(3)
    t = 9 * math.sqrt(3)
    assert test.p == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-9)


def test_one_seed_has_no_interval_and_equal_values_no_width() -> None:
    assert math.isnan(t_test([0.5]).low)
    assert t_test([]).count == 0
    assert t_test([0.0, 0.0]).p == 1.0
    assert t_test([0.1, 0.1]) == ContrastTest(0.1, 0.1, 0.1, 0.0, 0.0, 2)


def test_holm_by_hand() -> None:
    """Sorted .01 .02 .04: x3, x2, x1 = .03, .04, .04; never below an earlier one."""
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.03, 0.02, 0.5]) == pytest.approx([0.06, 0.06, 0.5])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("mean", "half", "p", "expect", "word"),
    [
        (-0.07, 0.03, 0.001, "less", "confirmed"),
        (0.07, 0.03, 0.001, "less", "refuted"),  # significant, other sign
        (0.07, 0.03, 0.001, "greater", "confirmed"),
        (-0.01, 0.015, 0.3, "less", "open"),  # the interval reaches -0.025
        (0.0, 0.01, 0.9, "less", "refuted"),  # no effect of 0.02 is left in the interval
        (0.0, 0.01, 0.9, "greater", "refuted"),
        (-0.01, 0.005, 0.001, "less", "confirmed"),  # smaller than 0.02, but there
    ],
)
def test_the_rule(mean: float, half: float, p: float, expect: str, word: str) -> None:
    test = ContrastTest(mean, mean - half, mean + half, p, 0.1, 12)
    assert decide(test, p, expect, smallest=0.02, alpha=0.05) == word


def test_a_metric_that_is_equal_in_every_seed_settles_nothing() -> None:
    test = t_test([0.0] * 8)
    assert decide(test, test.p, "greater", smallest=0.02, alpha=0.05) == "open"


def test_one_word_for_several_contrasts() -> None:
    assert combine(["confirmed", "confirmed"]) == "confirmed"
    assert combine(["open", "confirmed", "open"]) == "mixed: 1 confirmed, 2 open"


def test_power_against_a_table() -> None:
    """n = 34 for d = 0.5, two-sided 5%: 80.8% (Cohen 1988; G*Power gives 0.8077)."""
    assert power(0.5, 1.0, 34, 0.05) == pytest.approx(0.8077, abs=2e-4)
    assert power(1e-9, 1.0, 12, 0.05) == pytest.approx(0.05, abs=1e-4)


def test_null_contrasts_are_significant_at_the_stated_rate() -> None:
    rng = random.Random(1)
    rounds = 400
    wrong = sum(t_test([rng.gauss(0, 1) for _ in range(12)]).p < 0.05 for _ in range(rounds))
    assert 6 <= wrong <= 36, "5% of 400 is 20; this many are out of 99.9% of cases"

"""The paired test against exact values."""

from __future__ import annotations

import math

import pytest

from rstar2.errors import UserError
from rstar2.evaluate.compare import compare, sign_flip_p
from rstar2.evaluate.scores import score
from rstar2.evaluate.store import EvalResults
from tests.evaluate.evaluate_helpers import problem, said, settings


def results(rights: list[bool], **changes: object) -> EvalResults:
    problems = [problem(str(n)) for n in range(len(rights))]
    summaries = [said(p.id, 0, "1", r) for p, r in zip(problems, rights, strict=True)]
    asked = settings(samples=1, **changes)
    return EvalResults(asked, {"set": score("set", problems, summaries, samples=1)}, True)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided binomial test on discordant pairs."""
    n, k = better + worse, max(better, worse)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k, n + 1)) / (1 << n))


@pytest.mark.parametrize(("better", "worse"), [(9, 1), (5, 5), (3, 0), (1, 0), (12, 3)])
def test_with_one_answer_a_problem_it_is_mcnemars_exact_test(better: int, worse: int) -> None:
    assert sign_flip_p([1.0] * better + [-1.0] * worse + [0.0] * 50) == pytest.approx(
        mcnemar(better, worse)
    )


def test_beyond_sixteen_pairs_signs_are_drawn() -> None:
    drawn = sign_flip_p([1.0] * 18 + [-1.0] * 6)
    assert drawn == sign_flip_p([1.0] * 18 + [-1.0] * 6), "seeded"
    assert drawn == pytest.approx(mcnemar(18, 6), abs=0.006)


def test_no_difference_is_no_evidence() -> None:
    assert sign_flip_p([0.0] * 10) == 1.0


def test_compare_reports_both_and_the_difference() -> None:
    first = results([True] * 10 + [False] * 10)
    second = results([True] * 18 + [False] * 2)
    (row,) = compare(first, second)
    assert (row.first, row.second) == (0.5, 0.9)
    assert row.difference.mean == pytest.approx(0.4)
    assert row.difference.low < 0.4 < row.difference.high
    assert (row.better, row.worse, row.problems) == (8, 0, 20)
    assert row.p == pytest.approx(2 / 2**8)
    (back,) = compare(second, first)
    assert back.difference.mean == pytest.approx(-0.4)
    assert back.p == row.p


def test_other_problems_are_not_compared() -> None:
    with pytest.raises(UserError, match="different problems"):
        compare(results([True]), results([True], benchmarks={"set": "other"}))

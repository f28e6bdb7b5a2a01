"""Figures of a benchmark against hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rstar2.evaluate.compare import paired
from rstar2.evaluate.scores import majority, powers, score, summarise_answer, vote
from rstar2.types import Outcome
from tests.evaluate.evaluate_helpers import given, problem, said


def test_avg_pass_and_maj_by_hand() -> None:
    problems = [problem("a", kind="x"), problem("b", kind="x"), problem("c", kind="y")]
    summaries = [
        *(said("a", n, "1", True) for n in (0, 1, 2)),
        said("a", 3, "7"),
        said("b", 0, "1", True),
        *(said("b", n, "9") for n in (1, 2, 3)),
        *(said("c", n, None) for n in range(4)),
    ]
    scored = score("set", problems, summaries, samples=4)
    assert scored.average.mean == pytest.approx((0.75 + 0.25 + 0.0) / 3)
    assert scored.majority.mean == pytest.approx(1 / 3)
    # pass@2 from 4: 1 - C(1,2)/C(4,2) = 1, 1 - C(3,2)/C(4,2) = 1/2, 0
    assert scored.passes["2"].mean == pytest.approx(1.5 / 3)
    assert scored.passes["1"].mean == pytest.approx(scored.average.mean)
    assert scored.passes["4"].mean == pytest.approx(2 / 3)
    assert {kind: e.mean for kind, e in scored.kinds.items()} == {"x": 0.5, "y": 0.0}
    assert scored.tokens.mean == 25
    assert scored.missing == 0
    assert [row.correct for row in scored.problems] == [3, 1, 0]


def test_the_average_is_the_mean_reward() -> None:
    rewards = {"a": (1.0, 0.75), "b": (0.5, 0.25)}
    answers = [
        replace(said(id, sample, "1", reward > 0.5), reward=reward)
        for id, both in rewards.items()
        for sample, reward in enumerate(both)
    ]
    result = score("set", [problem("a"), problem("b")], answers, samples=2)
    assert result.average.mean == (1.75 + 0.75) / 4
    assert result.passes["2"].mean == 0.5
    assert paired(result, result).first == result.average.mean
    assert replace(result.problems[0], reward=None).mean_reward == 1.0  # of version 0.2


def test_intervals_are_over_problems_and_hold_the_mean() -> None:
    problems = [problem(str(n)) for n in range(40)]
    rights = {(p.id, s): (n + s) % 3 == 0 for n, p in enumerate(problems) for s in (0, 1)}
    summaries = [said(id, s, "1" if right else "2", right) for (id, s), right in rights.items()]
    scored = score("set", problems, summaries, samples=2)
    for estimate in (scored.average, scored.majority, *scored.passes.values()):
        assert estimate.low < estimate.mean < estimate.high
        assert estimate.count == 40


def test_answers_that_are_not_there_are_missing_and_not_wrong() -> None:
    summaries = [said("a", 0, "1", True), said("a", 1, "1", True), said("b", 0, "1", True)]
    scored = score("set", [problem("a"), problem("b"), problem("c")], summaries, samples=2)
    assert scored.missing == 3
    assert scored.average.mean == 1.0
    assert scored.average.count == 2
    assert scored.passes["2"].count == 1, "a problem with one answer says nothing about pass@2"


def test_samples_beyond_those_asked_for_do_not_count() -> None:
    summaries = [said("a", 0, "1", True), said("a", 1, "2"), said("a", 2, "2")]
    assert score("set", [problem("a")], summaries, samples=1).average.mean == 1.0


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("1", True), ("1", True), ("2", False)], 1.0),
        ([("1", True), ("2", False)], 0.5),
        ([("1", True), ("2", False), ("3", False)], 1 / 3),
        ([(None, False), (None, False), ("1", True)], 1.0),
        ([(None, False)], 0.0),
    ],
)
def test_majority_shares_ties_and_ignores_silence(
    votes: list[tuple[str | None, bool]], expected: float
) -> None:
    cast = [said("a", n, text, correct) for n, (text, correct) in enumerate(votes)]
    assert majority(cast) == pytest.approx(expected)


def test_a_vote_is_the_answer_without_its_spelling() -> None:
    assert vote("1,000", "integer") == vote("$1000$", "math") == "1000"
    assert vote("(c)", "choice") == vote("\\text{C}", "choice") == "C"
    assert vote("\\left( 3, \\dfrac{1}{2} \\right)", "math") == vote("(3,\\frac{1}{2})", "math")
    assert vote("x+1", "math") != vote("x+2", "math")
    assert vote(None, "math") is None


def test_tool_use_is_counted_by_typed_outcome() -> None:
    answers = [
        given("a", 0, "1", correct=True, outcomes=(Outcome.EXCEPTION, Outcome.OK)),
        given("a", 1, "2", correct=False, outcomes=(Outcome.BAD_JSON, Outcome.TIMEOUT)),
        given("b", 0, "1", correct=True),
    ]
    summaries = [summarise_answer(answer, "integer") for answer in answers]
    scored = score("set", [problem("a"), problem("b")], summaries, samples=2)
    assert scored.tool_errors == 0.75
    assert scored.failing_calls_in_correct == 0.5
    assert scored.valid_calls == 0.75
    assert scored.tool_use == pytest.approx(2 / 3)
    assert scored.calls == pytest.approx(4 / 3)
    assert scored.outcomes == {"exception": 1, "ok": 1, "bad_json": 1, "timeout": 1}
    assert scored.stops == {"answered": 3}


def test_nothing_answered_is_nothing_known() -> None:
    scored = score("set", [problem("a")], [], samples=2)
    assert scored.missing == 2
    assert scored.average.count == 0
    assert scored.tool_errors is None


def test_powers_of_two_and_k() -> None:
    assert powers(1) == [1]
    assert powers(16) == [1, 2, 4, 8, 16]
    assert powers(6) == [1, 2, 4, 6]

"""Intervals and shares against hand-computed values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rstar2.evaluate.metrics import at_least_one, average_at_k, bootstrap, summarise, wilson
from rstar2.pipeline.step_metrics import rollout_metrics
from rstar2.types import (
    Group,
    Outcome,
    Problem,
    Reward,
    StopReason,
    TokenSegment,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


def rollout(
    value: float, outcomes: tuple[Outcome, ...] = (), *, stop: StopReason = StopReason.ANSWERED
) -> Trajectory:
    calls = tuple(ToolCall(str(i), "python") for i in range(len(outcomes)))
    results = tuple(ToolResult(str(i), o) for i, o in enumerate(outcomes))
    turn = Turn((5, 6), (-1.0, -1.0), ((0, 2),), calls, results, response_ids=(7,))
    return Trajectory(
        "t", "p", "g", 0, (1, 2), (turn,), stop, reward=Reward(value, None, "integer")
    )


def group(kind: str, *members: Trajectory) -> Group:
    return Group("g", Problem("p", "q", "1", kind=kind), 1, members)


def test_wilson_by_hand() -> None:
    # 8 of 10: the published interval is (0.490, 0.943)
    estimate = wilson(8, 10)
    assert estimate.mean == 0.8
    assert estimate.low == pytest.approx(0.4902, abs=1e-4)
    assert estimate.high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0, 20).high == pytest.approx(0.1611, abs=1e-4)
    assert wilson(20, 20).high == 1.0
    assert math.isnan(wilson(0, 0).mean)


def test_bootstrap_is_seeded_and_brackets_the_mean() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 25
    estimate = bootstrap(values)
    assert estimate == bootstrap(values)
    assert estimate.mean == 0.4375
    # standard error of the mean is 0.0370 (sd 0.3697 over 100)
    assert estimate.low == pytest.approx(0.4375 - 1.96 * 0.037, abs=0.02)
    assert estimate.high == pytest.approx(0.4375 + 1.96 * 0.037, abs=0.02)


def test_average_at_k_weighs_problems_equally() -> None:
    groups = [group("a", *[rollout(1.0)] * 4), group("a", rollout(0.0), rollout(0.0))]
    assert average_at_k(groups).mean == 0.5
    assert average_at_k(groups).count == 2
    assert average_at_k([*groups, group("a")]).count == 2, "nothing graded says nothing"


def test_pass_at_k_is_unbiased() -> None:
    one_of_four = {"count": 4, "correct": 1}
    assert at_least_one(**one_of_four, k=1) == pytest.approx(0.25)
    assert at_least_one(**one_of_four, k=2) == pytest.approx(0.5)
    assert at_least_one(**one_of_four, k=4) == 1.0


def test_summary_counts_calls_by_typed_outcome() -> None:
    groups = [
        group("gcd", rollout(1.0, (Outcome.EXCEPTION, Outcome.OK))),
        group("gcd", rollout(0.0, (Outcome.TIMEOUT,), stop=StopReason.MAX_LENGTH)),
        group("lcm", rollout(1.0, (Outcome.NO_OUTPUT, Outcome.OK))),
    ]
    made = summarise(groups, stage="sft", step=3, mode="greedy")
    assert made.accuracy.mean == pytest.approx(2 / 3)
    assert {k: e.mean for k, e in made.kinds.items()} == {"gcd": 0.5, "lcm": 1.0}
    assert made.failing_calls_in_correct == 0.25
    assert made.tool_errors == 0.4
    assert made.truncated == pytest.approx(1 / 3)
    assert (made.mean_length, made.mean_turns) == (3.0, 1.0)


def test_summary_without_calls_has_no_share() -> None:
    made = summarise([group("", rollout(1.0))], stage="sft", step=0, mode="sampled")
    assert made.failing_calls_in_correct is None
    assert made.tool_errors is None
    assert made.kinds == {}


def test_valid_calls_are_those_that_could_be_executed() -> None:
    mixed = rollout(1.0, (Outcome.OK, Outcome.TIMEOUT, Outcome.BAD_JSON, Outcome.INFRASTRUCTURE))
    made = summarise([group("a", mixed)], stage="sft", step=1, mode="greedy")
    assert made.valid_calls == pytest.approx(2 / 3)


@pytest.mark.parametrize(("rewards", "mean"), [((2.5, 2.5), 2.5), ((-1.0, -1.0), -1.0)])
def test_equal_rewards_outside_of_0_to_1_have_a_mean(
    rewards: tuple[float, ...], mean: float
) -> None:
    estimate = average_at_k([group("k", rollout(reward)) for reward in rewards])
    assert (estimate.mean, estimate.low, estimate.high) == (mean, mean, mean)


def test_any_rewards_have_an_interval() -> None:
    estimate = average_at_k([group("k", rollout(reward)) for reward in (-2.0, 0.5, 3.0)])
    assert estimate.mean == 0.5
    assert estimate.low < 0.5 < estimate.high


def test_all_segments_of_a_rollout_count() -> None:
    """An agent program that rewrites its history: its rollout has several segments."""
    single = rollout(1.0)
    whole = replace(single, more_segments=(TokenSegment((3,), single.turns * 2),))
    assert (whole.completion_tokens, len(whole.all_turns)) == (9, 3)
    figures = summarise([group("", whole)], stage="s", step=0, mode="greedy")
    assert (figures.mean_length, figures.mean_turns) == (9, 3)
    metrics = rollout_metrics([single, whole])
    assert (metrics["response_length"], metrics["turns"]) == (6, 2)

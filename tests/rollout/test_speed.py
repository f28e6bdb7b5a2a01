"""What the scheduler learns about time: the speed of engines and the waits of tools."""

from __future__ import annotations

import random

import pytest

from rstar2.rollout.speed import EngineSpeed, ToolWaits
from rstar2.types import EngineLoad

STEP_S, TOKEN_S, PREFILL_S = 0.012, 2e-8, 9e-5


def test_coefficients_are_learnt_from_reports() -> None:
    speed, draw = EngineSpeed(), random.Random(0)
    now, steps, prefilled, used = 0.0, 0, 0, 0
    for _ in range(200):
        speed.report(EngineLoad(used, 5, 0, 0, 0, steps=steps, prefilled=prefilled), now)
        before, used = used, draw.randrange(50_000, 400_000)
        more, prompt = draw.randrange(20, 80), draw.choice([0, 0, 2000, 6000])
        steps, prefilled = steps + more, prefilled + prompt
        now += more * (STEP_S + TOKEN_S * (before + used) / 2) + prompt * PREFILL_S
    assert speed.step_s == pytest.approx(STEP_S, rel=0.05)
    assert speed.token_s == pytest.approx(TOKEN_S, rel=0.1)
    assert speed.prefill_s == pytest.approx(PREFILL_S, rel=0.1)


def test_idle_time_restarts_and_engines_that_do_not_count_teach_nothing() -> None:
    speed = EngineSpeed()
    first = speed.step_s
    speed.report(EngineLoad(10, 1, 0, 0, 0, steps=100), 10.0)
    speed.report(EngineLoad(10, 0, 0, 0, 0, steps=110), 20.0)
    speed.report(EngineLoad(10, 1, 0, 0, 0, steps=120), 30.0)
    speed.report(EngineLoad(10, 1, 0, 0, 0, steps=5), 40.0)
    speed.report(EngineLoad(10, 1, 0, 0, 0), 1.0)
    speed.report(EngineLoad(10, 1, 0, 0, 0), 2.0)
    assert speed.step_s == first
    assert not speed.learnt


def test_step_longer_than_the_interval_of_reports_counts_as_a_whole() -> None:
    speed = EngineSpeed()
    now, steps, prefilled = 0.0, 0, 0
    for _ in range(40):
        for second in range(4):  # three reports see the same step under way
            speed.report(
                EngineLoad(1000, 2, 0, 0, 0, steps=steps, prefilled=prefilled), now + second
            )
        now, steps, prefilled = now + 4.0, steps + 1, prefilled + 8000
        for _ in range(3):
            speed.report(EngineLoad(1000, 2, 0, 0, 0, steps=steps, prefilled=prefilled), now)
            now, steps = now + 1.0, steps + 100
    assert speed.prefill_s == pytest.approx(4.0 / 8000, rel=0.1)


def test_prefix_is_held_through_short_waits_and_dropped_in_long_ones() -> None:
    waits = ToolWaits()
    assert waits.hold_s(10.0, default=7.0) == 7.0, "nothing is known yet"
    for index in range(400):
        waits.observe(60.0 if index % 4 == 0 else 0.2)
    assert 0.2 <= waits.hold_s(10.0, default=7.0) < 0.3
    assert waits.hold_s(1000.0, default=7.0) >= 60.0, "recomputing costs more than any wait"


def test_mean_wait_is_that_of_the_buckets() -> None:
    waits = ToolWaits()
    assert waits.mean == 0.0
    waits.observe(0.02)
    waits.observe(0.08)  # two doublings of the first bucket
    assert waits.mean == pytest.approx((0.998 * 0.02 + 0.08) / 1.998)

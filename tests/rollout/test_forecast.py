"""The length model, computed by hand and by counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2.rollout.forecast import (
    POINTS,
    KvDemand,
    KvForecast,
    LengthModel,
    bucket,
    shortest_in,
)


def survival(model: LengthModel, completion: int, further: int) -> float:
    return float(model.survival(completion, further))


def test_nothing_known_ends_nowhere() -> None:
    model = LengthModel()
    model.refresh()
    assert survival(model, 0, 10_000) == 1.0
    assert model.quantile(0.5, completion=3, longest=500) == 500


def test_share_of_those_that_got_as_far() -> None:
    model = LengthModel(least=2, half_life=10**9)
    for length in (10, 10, 20, 20):
        model.observe(length)
    model.refresh()
    # of 4 (+1 for caution) that reached 10 two ended there; of 2 (+1) that reached 20 two did
    assert survival(model, 0, 11) == pytest.approx(1 - 2 / 5)
    assert survival(model, 11, 10) == pytest.approx(1 - 2 / 3)
    assert survival(model, 0, 21) == pytest.approx((1 - 2 / 5) * (1 - 2 / 3))
    # nothing is known beyond 21: it continues
    assert survival(model, 21, 1000) == 1.0


def test_running_rollouts_correct_the_haste_of_the_short_ones() -> None:
    hasty, fair = LengthModel(least=2), LengthModel(least=2)
    for model in (hasty, fair):
        for _ in range(8):
            model.observe(10)
    hasty.refresh()
    fair.refresh(running=[30] * 72)
    assert survival(hasty, 0, 11) < 0.15
    assert survival(fair, 0, 11) == pytest.approx(1 - 8 / 81, abs=0.01)


def test_truncated_rollouts_want_more() -> None:
    model = LengthModel(least=2)
    for _ in range(50):
        model.observe(100, truncated=True)
    model.refresh()
    assert survival(model, 0, 101) == 1.0
    assert model.quantile(0.9, completion=0, longest=12_000) == 12_000


def test_few_rollouts_say_nothing() -> None:
    model = LengthModel(least=16)
    for _ in range(15):
        model.observe(10)
    model.refresh()
    assert survival(model, 0, 11) == 1.0
    model.observe(10)
    model.refresh()
    assert survival(model, 0, 11) < 0.1


def test_old_rollouts_fade() -> None:
    model = LengthModel(least=2, half_life=10)
    for _ in range(100):
        model.observe(10)
    for _ in range(100):
        model.observe(30)
    model.refresh()
    assert survival(model, 0, 11) > 0.98


def test_quantile_of_equal_chances() -> None:
    model = LengthModel(least=1, half_life=10**9)
    for length in range(30):
        for _ in range(100):
            model.observe(length)
    model.refresh()
    assert model.quantile(0.5, completion=0, longest=1000) == pytest.approx(15, abs=1)
    assert model.quantile(0.5, completion=20, longest=1000) == pytest.approx(25, abs=1)
    assert model.quantile(0.999, completion=0, longest=20) == 20, "never above the limit"


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_buckets_are_narrow_and_in_order(length: int) -> None:
    index = bucket(length)
    assert shortest_in(index) <= length < shortest_in(index + 1)
    assert shortest_in(index + 1) - shortest_in(index) <= max(1, length / 15)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=20, max_size=80),
    running=st.lists(st.integers(0, 400), max_size=20),
    completion=st.integers(0, 500),
    further=st.integers(0, 500),
)
def test_survival_is_a_probability_that_falls(
    lengths: list[int], running: list[int], completion: int, further: int
) -> None:
    model = LengthModel(least=3)
    for length in lengths:
        model.observe(length, truncated=length > 350)
    model.refresh(running)
    here, further_on = (
        survival(model, completion, further),
        survival(model, completion, further + 9),
    )
    assert 0.0 <= further_on <= here + 1e-12 <= 1.0 + 2e-12
    assert survival(model, completion, 0) == 1.0


def test_room_comes_with_the_first_interval_after_which_it_lasts() -> None:
    """A rollout that starts with 5 tokens; intervals of 10 steps."""
    forecast = KvForecast(width=10, made_at=0, table=0)
    mean = np.zeros(POINTS)
    mean[:4] = [12, 18, 15, 14]
    forecast.add(KvDemand(mean, np.zeros(POINTS), np.ones(POINTS)))
    more = KvDemand(np.full(POINTS, 5.0), np.zeros(POINTS), np.ones(POINTS))
    assert forecast.steps_until_room(more, 20.0) == 20
    assert forecast.steps_until_room(more, 23.0) == 0
    assert forecast.steps_until_room(more, 18.0) == 40


def test_what_is_never_full_costs_nothing() -> None:
    """A mean of 60 with a deviation of 0.5: 40 deviations above it are 80 tokens."""
    forecast = KvForecast(width=10, made_at=0, table=0)
    forecast.add(KvDemand(np.full(POINTS, 50.0), np.full(POINTS, 0.16), np.ones(POINTS)))
    more = KvDemand(np.full(POINTS, 10.0), np.full(POINTS, 0.09), np.ones(POINTS))
    assert forecast.never_full(more, 80.1)
    assert not forecast.never_full(more, 79.9)
    assert forecast.if_added(more, 80.1, again=2.0) == (10 * POINTS, 0.0)
    steps, lost = forecast.if_added(more, 61.0, again=2.0)
    assert steps < 10 * POINTS
    assert lost > 0

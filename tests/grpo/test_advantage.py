from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.grpo import advantages


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], []),
        ([1.0], [0.0]),
        ([1.0, 1.0], [0.0, 0.0]),
        ([0.1] * 3, [0.0] * 3),
        ([1.0, 0.0], [1.0, -1.0]),
        ([1.0, 0.0, 0.0, 0.0], [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
    ],
)
def test_table(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=64))
def test_zero_mean_and_unit_variance(rewards: list[float]) -> None:
    values = advantages(rewards)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-9)
    if len(set(rewards)) > 1:
        assert math.fsum(a * a for a in values) / len(values) == pytest.approx(1.0)

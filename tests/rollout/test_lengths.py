"""What the length model expects, by hand and against a sorted list."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from rstar2.rollout.lengths import LengthModel


def test_nothing_known_expects_the_limit() -> None:
    assert LengthModel(0.9).expect(prompt=10, completion=0, limit=500) == 500


def test_quantile_of_those_that_got_further() -> None:
    model = LengthModel(0.5, least=2)
    for length in (10, 20, 30, 40):
        model.observe(length)
    assert model.expect(prompt=5, completion=0, limit=1000) == 25
    # 30 and 40 are left; the median rank of two is the first
    assert model.expect(prompt=5, completion=20, limit=1000) == 35
    # only 40 is left: too few to say anything
    assert model.expect(prompt=5, completion=30, limit=1000) == 1000


def test_truncated_rollouts_count_as_endless() -> None:
    model = LengthModel(0.9, least=2)
    for _ in range(5):
        model.observe(100, truncated=True)
    assert model.expect(prompt=0, completion=0, limit=12_000) == 12_000


def test_window_forgets_the_oldest() -> None:
    model = LengthModel(1.0, window=3, least=1)
    for length in (900, 1, 2, 3):
        model.observe(length)
    assert len(model) == 3
    assert model.expect(prompt=0, completion=0, limit=1000) == 3


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    completion=st.integers(0, 60),
    limit=st.integers(61, 100),
    quantile=st.floats(0.01, 1.0),
)
def test_equals_a_sorted_list(
    lengths: list[int], completion: int, limit: int, quantile: float
) -> None:
    model = LengthModel(quantile, window=40, least=3)
    for length in lengths:
        model.observe(length)
    expected = model.expect(prompt=1, completion=completion, limit=limit)
    survivors = sorted(x for x in lengths[-40:] if x > completion)
    if len(survivors) < 3:
        assert expected == limit
    else:
        rank = max(1, ceil(quantile * len(survivors)))
        assert expected == min(limit, 1 + survivors[rank - 1])
        assert expected > 1 + completion - 1

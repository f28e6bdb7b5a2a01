"""Mixtures: shares as asked for, no row twice, the same draw for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from rstar2.errors import UserError
from rstar2.problems.sft.prepare import draw_mixture, plan_mixture

HAVE = {"a": 100, "b": 30, "c": 1000}


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        (None, None, HAVE),
        (None, 113, {"a": 10, "b": 3, "c": 100}),
        ({"a": 1, "b": 1, "c": 1}, None, {"a": 30, "b": 30, "c": 30}),
        ({"a": 0.5, "b": 0.1, "c": 0.4}, None, {"a": 100, "b": 20, "c": 80}),
        ({"a": 5, "b": 1, "c": 4}, 50, {"a": 25, "b": 5, "c": 20}),
        ({"a": 1, "b": 0.3, "c": 10}, 10_000, {"a": 100, "b": 30, "c": 1000}),
    ],
)
def test_the_scarcest_source_decides_the_size(
    weights: dict[str, float] | None, total: int | None, counts: dict[str, int]
) -> None:
    assert plan_mixture(HAVE, weights, total) == counts


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1, "b": 1}, "c have none"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "no source is called d"),
        ({"a": 1, "b": 0, "c": 1}, "b: a weight is a number above 0"),
        ({"a": 1, "b": float("nan"), "c": 1}, "b: a weight is a number above 0"),
    ],
)
def test_weights_that_make_no_mixture_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_mixture(HAVE, weights, None)


def test_a_source_without_rows_is_an_error_only_if_it_has_a_share() -> None:
    with pytest.raises(UserError, match="no row of b"):
        plan_mixture({"a": 5, "b": 0}, {"a": 1, "b": 1}, None)
    assert plan_mixture({"a": 5, "b": 0}, None, None) == {"a": 5, "b": 0}
    assert plan_mixture({"a": 0}, None, None) == {"a": 0}


def test_no_row_is_drawn_twice_and_sources_are_interleaved() -> None:
    counts = {"a": 60, "b": 30, "c": 500}
    sources, rows = draw_mixture(HAVE, counts, seed=1)
    drawn = list(zip(sources.tolist(), rows.tolist(), strict=True))
    assert len(set(drawn)) == len(drawn) == 590
    assert np.bincount(sources).tolist() == [60, 30, 500]
    assert all(row < list(HAVE.values())[source] for source, row in drawn)
    assert 5 <= int((sources[:295] == 1).sum()) <= 25


def test_a_draw_depends_on_its_seed_alone() -> None:
    counts = {"a": 10, "b": 10, "c": 10}
    first, again, other = (draw_mixture(HAVE, counts, seed) for seed in (1, 1, 2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert not (first[1] == other[1]).all()

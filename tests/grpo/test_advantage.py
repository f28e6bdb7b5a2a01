from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.errors import RecipeError, UserError
from rstar2.grpo import advantages
from rstar2.grpo.advantage import group_advantages


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


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1.0, 0.0], [1.0, -1.0]),
        ("dr_grpo", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", [2.0, -1.0], [1.5, -1.5]),
        ("dr_grpo", [1.0, 1.0], [0.0, 0.0]),
        ("rloo", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [3.0, 1.0, 2.0], [1.5, -1.5, 0.0]),
        ("rloo", [1.0], [0.0]),
    ],
)
def test_by_name(name: str, rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(name, rewards) == pytest.approx(expected)


OWN = """
def squared(rewards):
    return [r * r for r in rewards]
def short(rewards):
    return [0.0]
def bad(rewards):
    return [float("nan") for _ in rewards]
"""


def test_an_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_advantage.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert group_advantages("own_advantage:squared", [2.0, -3.0]) == [4.0, 9.0]
    for name in ("short", "bad"):
        with pytest.raises(UserError, match="one finite number per reward"):
            group_advantages(f"own_advantage:{name}", [1.0, 0.0])
    with pytest.raises(RecipeError, match="no function sqared: did you mean squared"):
        group_advantages("own_advantage:sqared", [1.0])
    with pytest.raises(RecipeError, match="own_broken cannot be imported: ZeroDivisionError"):
        group_advantages("own_broken:f", [1.0])
    with pytest.raises(RecipeError, match="own_missing cannot be imported: ModuleNotFound"):
        group_advantages("own_missing:f", [1.0])
    with pytest.raises(RecipeError, match=r"did you mean rloo\? \(use grpo, dr_grpo, rloo, or"):
        group_advantages("rlo", [1.0])

"""Batches: what a sample is made of, which groups take part, how mini-batches are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rstar2.config import LossConfig, RocConfig
from rstar2.errors import InvariantError
from rstar2.grpo import make_batch, resample_groups, select, split_minibatches, teaches
from rstar2.grpo.batch import repeated_share
from rstar2.types import Group, Sample, Selection, StopReason, TokenSegment, Turn

if TYPE_CHECKING:
    from tests.grpo.conftest import MakeGroup, MakeTrajectory

PLAIN = RocConfig(variant="none", drawn=4, kept=4)


def pair(group: Group) -> tuple[Group, Selection]:
    return group, select(group, PLAIN, 0)


def test_sample_carries_the_trajectory(trajectory: MakeTrajectory, group: MakeGroup) -> None:
    made = group([trajectory(0, 1.0), trajectory(1, 0.0)])
    first, second = make_batch(7, [pair(made)], LossConfig()).samples
    assert (first.advantage, second.advantage) == (1.0, -1.0)
    assert first.token_ids == (1, 2, 3, 5, 6, 8, 9, 5, 6)
    assert first.mask == (0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert first.logprobs == (0, 0, 0, -0.5, -0.5, 0, 0, -0.25, -0.25)
    assert (first.group_id, first.trajectory_id, first.version) == ("g", "t0", 3)


def test_a_rollout_of_several_segments_counts_once_and_trains_each_segment(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    """Two rollouts, one of them with two segments: the advantages are those of two rollouts."""
    more = (TokenSegment((1, 2), (Turn((7, 8), (-0.5, -0.5), ((4, 2),)),)),)
    made = group([replace(trajectory(0, 1.0), more_segments=more), trajectory(1, 0.0)])
    first, second, third = make_batch(7, [pair(made)], LossConfig()).samples
    assert [s.advantage for s in (first, second, third)] == [1.0, 1.0, -1.0]
    assert [s.trajectory_id for s in (first, second, third)] == ["t0", "t0#1", "t1"]
    assert second.token_ids == (1, 2, 7, 8)
    assert second.mask == (0, 0, 1, 1)
    assert second.version == 4
    assert made.trajectories[0].sampled_tokens == first.trained_tokens + second.trained_tokens


def test_advantages_are_over_the_kept_only(trajectory: MakeTrajectory, group: MakeGroup) -> None:
    made = group([trajectory(i, float(i < 3)) for i in range(8)])
    chosen = select(made, RocConfig(variant="none", drawn=8, kept=4), 0)
    samples = make_batch(0, [(made, chosen)], LossConfig()).samples
    assert [s.advantage for s in samples] == pytest.approx([1 / 3**0.5] * 3 + [-(3**0.5)])


def test_resampling_a_step_selects_group_by_group(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    config = RocConfig(drawn=8, kept=4)
    groups = [group([trajectory(i, float(i < n)) for i in range(8)], f"g{n}") for n in (2, 5)]
    selections = resample_groups(groups, config, seed=3)
    assert selections == tuple(select(each, config, 3) for each in groups)
    batch = make_batch(1, zip(groups, selections, strict=True), LossConfig())
    assert [s.group_id for s in batch.samples] == ["g2"] * 4 + ["g5"] * 4


def test_group_that_teaches_nothing_is_left_out(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    same = group([trajectory(0, 1.0), trajectory(1, 1.0)])
    assert not teaches(pair(same)[1])
    assert make_batch(0, [pair(same)], LossConfig()).samples == ()


def test_truncated_rollouts_stay_unless_filtered(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    made = group([trajectory(0, 1.0), trajectory(1, 0.0, stop=StopReason.MAX_LENGTH)])
    assert len(make_batch(0, [pair(made)], LossConfig()).samples) == 2
    (kept,) = make_batch(0, [pair(made)], LossConfig(overlong_filter=True)).samples
    assert kept.advantage == 1.0, "the truncated rollout still counts in the group's statistics"


def test_ngram_penalty_scales_repetitive_successes_only(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    loop = tuple([5, 6] * 30)
    made = group([trajectory(0, 1.0, (), sampled=loop), trajectory(1, 0.0, (), sampled=loop)])
    share = repeated_share(made.trajectories[0], 20)
    assert share == pytest.approx(39 / 41)
    first, second = make_batch(0, [pair(made)], LossConfig(ngram_penalty=0.5)).samples
    assert (first.advantage, second.advantage) == pytest.approx((1 - 0.5 * share, -1.0))


def test_selection_of_another_group_is_refused(
    trajectory: MakeTrajectory, group: MakeGroup
) -> None:
    made = group([trajectory(0, 1.0), trajectory(1, 0.0)])
    with pytest.raises(InvariantError, match="given for group"):
        make_batch(0, [(replace(made, id="h"), pair(made)[1])], LossConfig())


@pytest.mark.parametrize(("groups", "count"), [(5, 2), (4, 4), (3, 8), (1, 1), (7, 3)])
def test_minibatches_never_split_a_group(groups: int, count: int) -> None:
    samples = [
        Sample((1, 2), (0, 1), (0.0, -1.0), 1.0, f"g{g}", f"{g}.{i}", 0)
        for i in range(3)
        for g in range(groups)
    ]
    parts = split_minibatches(samples, count)
    assert len(parts) == min(count, groups)
    names = [{s.group_id for s in part} for part in parts]
    assert sum(len(n) for n in names) == groups == len(set().union(*names))
    assert max(map(len, names)) - min(map(len, names)) <= 1
    assert sorted(s.trajectory_id for part in parts for s in part) == sorted(
        s.trajectory_id for s in samples
    )

"""RoC against hand-computed and Monte-Carlo values; edge cases as tables."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.config import RocConfig
from rstar2.errors import UserError
from rstar2.grpo import roc, teaches
from rstar2.grpo.roc import draw, error_penalty, quotas, resample_on_correct, select
from rstar2.types import Group, Outcome, StopReason

if TYPE_CHECKING:
    from tests.grpo.conftest import MakeGroup, MakeTrajectory

ROC = RocConfig(drawn=8, kept=4)


def inclusion(weights: list[float], count: int) -> list[float]:
    """Exact probability that each item is among `count` successive draws, by enumeration."""
    inclusion = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), count):
        left, probability = sum(weights), 1.0
        for item in order:
            probability *= weights[item] / left
            left -= weights[item]
        for item in order:
            inclusion[item] += probability
    return inclusion


class TestPenalties:
    @pytest.mark.parametrize(
        ("failed", "calls", "expected"),
        [(0, 0, 0.5), (0, 3, 0.0), (1, 4, 0.25), (3, 3, 1.0)],
    )
    def test_error(self, failed: int, calls: int, expected: float) -> None:
        assert error_penalty(failed, calls) == expected

    @pytest.mark.parametrize(
        ("outcome", "p_err"),
        [
            (o, 0.0 if o in (Outcome.OK, Outcome.NO_OUTPUT) else 1.0)
            for o in Outcome
            if o is not Outcome.INFRASTRUCTURE
        ]
        + [(Outcome.INFRASTRUCTURE, 0.5)],
    )
    def test_every_outcome_is_counted_by_its_type(
        self, trajectory: MakeTrajectory, outcome: Outcome, p_err: float
    ) -> None:
        assert roc.penalties(trajectory(outcomes=(outcome,)))[0] == p_err

    def test_one_clean_turn_has_no_format_penalty(self, trajectory: MakeTrajectory) -> None:
        """The released code misses the first turn and gives it 1."""
        assert roc.penalties(trajectory(outcomes=(), turns=1, tags=1)) == (0.5, 0.0)

    def test_all_turns_are_counted(self, trajectory: MakeTrajectory) -> None:
        made = trajectory(outcomes=(Outcome.OK, Outcome.TIMEOUT, Outcome.OK), tags=3)
        assert roc.penalties(made) == (1 / 3, 2 / 4)

    def test_text_is_not_read(self, trajectory: MakeTrajectory) -> None:
        made = trajectory()
        assert roc.penalties(replace(made, text="max error 0.1")) == roc.penalties(made)


class TestQuotas:
    @pytest.mark.parametrize(
        ("positives", "negatives", "keep", "minima", "expected"),
        [
            (16, 16, 16, (1, 1), (8, 8)),
            (31, 1, 16, (1, 1), (15, 1)),  # floor(1 / 2) = 0, raised to the minimum
            (31, 1, 16, (1, 0), (16, 0)),
            (1, 31, 16, (1, 1), (1, 15)),
            (29, 3, 16, (1, 1), (15, 1)),  # odd: floor(3 / 2)
            (29, 3, 16, (2, 2), (14, 2)),
            (3, 29, 16, (1, 1), (2, 14)),
            (32, 0, 16, (1, 1), (16, 0)),
            (0, 32, 16, (1, 1), (0, 16)),
            (0, 0, 16, (1, 1), (0, 0)),
            (20, 10, 16, (1, 1), (11, 5)),  # two members lost: floor(10 * 16 / 30)
            (10, 3, 16, (1, 1), (10, 3)),  # not larger than G: all
            (6, 18, 6, (1, 1), (2, 4)),  # kept / drawn other than one half
            (1, 5, 2, (2, 2), (1, 1)),  # minima that do not fit: successes first
            (5, 5, 2, (2, 2), (2, 0)),
        ],
    )
    def test_table(
        self,
        positives: int,
        negatives: int,
        keep: int,
        minima: tuple[int, int],
        expected: tuple[int, int],
    ) -> None:
        assert quotas(positives, negatives, keep, *minima) == expected

    @pytest.mark.parametrize(
        ("positives", "negatives", "keep", "expected"),
        [
            (17, 15, 16, (8, 8)),  # round(7.5) = 8; the floor would keep 7
            (19, 13, 16, (10, 6)),  # round(6.5) = 6: halves go to even
            (21, 11, 16, (10, 6)),  # round(5.5) = 6
            (23, 9, 16, (12, 4)),  # round(4.5) = 4
            (31, 1, 16, (15, 1)),  # round(0.5) = 0, raised to what exists
            (29, 3, 16, (14, 2)),  # round(1.5) = 2
            (1, 31, 16, (1, 15)),  # round(15.5) = 16, lowered for the one success
            (3, 29, 16, (2, 14)),
            (20, 10, 16, (11, 5)),  # two members lost: round(5.33)
            (8, 20, 16, (5, 11)),  # round(11.43)
            (32, 0, 16, (16, 0)),
        ],
    )
    def test_the_released_code_rounds(
        self, positives: int, negatives: int, keep: int, expected: tuple[int, int]
    ) -> None:
        assert quotas(positives, negatives, keep, 2, 2, nearest=True) == expected

    @given(
        st.integers(0, 40),
        st.integers(0, 40),
        st.integers(1, 40),
        st.integers(0, 4),
        st.integers(0, 4),
        st.booleans(),
    )
    def test_is_always_possible_and_full(
        self, positives: int, negatives: int, keep: int, low: int, high: int, nearest: bool
    ) -> None:
        k_pos, k_neg = quotas(positives, negatives, keep, low, high, nearest=nearest)
        assert 0 <= k_pos <= positives
        assert 0 <= k_neg <= negatives
        assert k_pos + k_neg == min(keep, positives + negatives)
        assert k_pos >= min(low, positives, keep)


class TestDraw:
    def test_two_successes_by_hand(self) -> None:
        """Penalties 0 and 0.5, epsilon 0.05: weights 20 and 1 / 0.55, so 11 / 12 and 1 / 12."""
        counts: Counter[int] = Counter()
        for seed in range(20_000):
            kept = resample_on_correct([1, 1, 0, 0], [0.0, 0.5, 0, 0], 2, seed)
            counts.update(i for i in kept if i < 2)
        assert counts[0] / 20_000 == pytest.approx(11 / 12, abs=0.008)
        assert counts[1] / 20_000 == pytest.approx(1 / 12, abs=0.008)

    def test_enumeration_agrees_with_hand_values(self) -> None:
        """Weights 2, 1, 1 and two draws: 1 - P(not 0) = 1 - 2 * (1/4 * 1/3) = 5/6, others 7/12."""
        assert inclusion([2.0, 1.0, 1.0], 2) == pytest.approx([5 / 6, 7 / 12, 7 / 12])

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_monte_carlo_matches_successive_sampling(self, count: int) -> None:
        penalties = [0.0, 0.1, 0.5, 1.0, 1.5]
        weights = [1 / (0.05 + p) for p in penalties]
        rng, trials = random.Random(count), 20_000
        counts = Counter(i for _ in range(trials) for i in draw(weights, count, rng))
        expected = inclusion(weights, count)
        for item, probability in enumerate(expected):
            error = 4.5 * (probability * (1 - probability) / trials) ** 0.5 + 1e-9
            assert counts[item] / trials == pytest.approx(probability, abs=error)

    def test_failures_are_uniform(self) -> None:
        counts: Counter[int] = Counter()
        for seed in range(10_000):
            kept = resample_on_correct(
                [0, 0, 0, 0, 1, 1, 1, 1], [1.5, 0, 1, 0.3] + [0.5] * 4, 4, seed
            )
            counts.update(i for i in kept if i < 4)
        assert all(counts[i] / 10_000 == pytest.approx(0.5, abs=0.025) for i in range(4))

    @given(
        st.lists(st.tuples(st.booleans(), st.floats(0, 2)), min_size=1, max_size=40),
        st.integers(1, 32),
    )
    def test_keeps_distinct_members(self, members: list[tuple[bool, float]], keep: int) -> None:
        rewards = [float(r) for r, _ in members]
        kept = resample_on_correct(rewards, [p for _, p in members], keep, 7)
        assert len(kept) == len(set(kept)) == min(keep, len(members))
        assert kept == sorted(kept)

    def test_refuses_arrays_that_do_not_fit(self) -> None:
        with pytest.raises(UserError, match="2 rewards but 1 penalties"):
            resample_on_correct([1, 0], [0.0], 1, 0)

    def test_needs_no_torch(self) -> None:
        code = "import sys, rstar2.grpo; sys.exit('torch' in sys.modules)"
        assert (
            subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
        )


class TestSelect:
    def mixed(
        self, trajectory: MakeTrajectory, group: MakeGroup, positives: int, negatives: int
    ) -> Group:
        kinds = [1.0] * positives + [0.0] * negatives
        return group([trajectory(i, reward) for i, reward in enumerate(kinds)])

    def test_is_a_function_of_group_and_seed(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        made = self.mixed(trajectory, group, 5, 5)
        assert select(made, ROC, 1) == select(made, ROC, 1)
        picks = {select(made, ROC, seed).kept for seed in range(30)}
        assert len(picks) > 5
        other = replace(made, id="h")
        assert any(select(made, ROC, s).kept != select(other, ROC, s).kept for s in range(10))

    @pytest.mark.parametrize("variant", ["roc", "flat", "uniform", "none", "release"])
    def test_every_choice_has_a_reason(
        self, trajectory: MakeTrajectory, group: MakeGroup, variant: str
    ) -> None:
        made = self.mixed(trajectory, group, 4, 4)
        chosen = select(made, ROC.model_copy(update={"variant": variant}), 3)
        assert len(chosen.kept) == 4
        assert chosen.variant == variant
        assert [c.trajectory_id for c in chosen.choices] == [t.id for t in made.trajectories]
        assert all(c.reason for c in chosen.choices)
        kept = {c.reason for c in chosen.choices if c.kept}
        assert kept.isdisjoint(c.reason for c in chosen.choices if not c.kept)

    def test_weight_is_what_was_drawn_by(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        clean, dirty = trajectory(0), trajectory(1, outcomes=(Outcome.EXCEPTION,))
        made = group([clean, dirty, trajectory(2, 0.0), trajectory(3, 0.0), trajectory(4, 0.0)])
        choices = select(made, ROC, 0).choices
        assert [c.weight for c in choices] == pytest.approx([20.0, 1 / 1.05, 1, 1, 1])

    @pytest.mark.parametrize(
        ("switch", "weight"), [("penalise_errors", 1 / 1.05), ("penalise_format", 1 / 1.05)]
    )
    def test_penalties_switch_off_one_by_one(
        self, trajectory: MakeTrajectory, group: MakeGroup, switch: str, weight: float
    ) -> None:
        dirty = trajectory(0, outcomes=(Outcome.TIMEOUT,), tags=0)
        made = group([dirty] + [trajectory(i, 0.0) for i in range(1, 6)])
        choice = select(made, ROC.model_copy(update={switch: False}), 0).choices[0]
        assert choice.weight == pytest.approx(weight)
        assert (choice.p_err, choice.p_format) == (1.0, 1.0)

    def test_short_group_is_kept_whole(self, trajectory: MakeTrajectory, group: MakeGroup) -> None:
        chosen = select(self.mixed(trajectory, group, 1, 2), ROC, 0)
        assert chosen.kept == (0, 1, 2)
        assert {c.reason for c in chosen.choices} == {roc.WHOLE}

    def test_member_without_reward_is_never_kept(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        lost = trajectory(0, None, stop=StopReason.ENGINE_FAILED)
        made = group([lost] + [trajectory(i, float(i % 2)) for i in range(1, 4)])
        for seed in range(5):
            chosen = select(made, ROC, seed)
            assert chosen.kept == (1, 2, 3)
            assert chosen.choices[0].reason == roc.NO_REWARD

    def test_empty_group(self, group: MakeGroup) -> None:
        assert select(group([]), ROC, 0).choices == ()

    def test_none_takes_the_first(self, trajectory: MakeTrajectory, group: MakeGroup) -> None:
        config = ROC.model_copy(update={"variant": "none"})
        assert select(self.mixed(trajectory, group, 2, 6), config, 5).kept == (0, 1, 2, 3)

    def test_uniform_ignores_rewards_and_penalties(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        config = ROC.model_copy(update={"variant": "uniform"})
        made = group([trajectory(i, float(i < 2), tags=i % 3) for i in range(8)])
        counts = Counter(i for s in range(4000) for i in select(made, config, s).kept)
        assert all(counts[i] / 4000 == pytest.approx(0.5, abs=0.04) for i in range(8))

    def test_release_takes_cleanest_successes_and_first_failures(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        config = ROC.model_copy(update={"variant": "release"})
        made = group(
            [
                trajectory(0, 1.0, (Outcome.EXCEPTION,)),
                trajectory(1, 0.0),
                trajectory(2, 1.0),
                trajectory(3, 0.0),
                trajectory(4, 1.0, ()),
                trajectory(5, 0.0),
                trajectory(6, 0.0),
                trajectory(7, 1.0, (Outcome.OK, Outcome.TIMEOUT)),
            ]
        )
        assert select(made, config, 0).kept == select(made, config, 9).kept == (1, 2, 3, 4)

    def test_release_keeps_rounded_counts_and_the_order_of_failures(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        """7 failures and 5 successes, 6 of 12: round(3.5) = 4 failures, the first, clean or not."""
        config = RocConfig(variant="release", drawn=12, kept=6)
        rewards = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
        dirty = {0, 2, 1, 3, 5}
        made = group(
            [
                trajectory(i, reward, (Outcome.EXCEPTION,) if i in dirty else (Outcome.OK,))
                for i, reward in enumerate(rewards)
            ]
        )
        assert select(made, config, 0).kept == (0, 2, 4, 6, 7, 9)

    def test_flat_has_the_counts_of_roc_and_no_preference(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        """One failure and 7 successes, 4 kept: the failure always, each success 3 times in 7."""
        config = ROC.model_copy(update={"variant": "flat"})
        dirty = (Outcome.EXCEPTION,)
        made = group(
            [trajectory(i, float(i > 0), dirty if i % 2 else (Outcome.OK,)) for i in range(8)]
        )
        chosen = [select(made, config, seed) for seed in range(4000)]
        counts = Counter(i for selection in chosen for i in selection.kept)
        assert counts[0] == 4000
        assert all(counts[i] / 4000 == pytest.approx(3 / 7, abs=0.04) for i in range(1, 8))
        assert {choice.weight for choice in chosen[0].choices} == {1.0}

    @pytest.mark.parametrize(("threshold", "successes"), [(0.5, 2), (0.0, 3), (-1.0, 5)])
    def test_the_threshold_decides_what_a_success_is(
        self, trajectory: MakeTrajectory, group: MakeGroup, threshold: float, successes: int
    ) -> None:
        rewards = [2.5, 0.75, 0.25, -0.5, -0.5, -3.0]
        made = group([trajectory(i, reward) for i, reward in enumerate(rewards)])
        config = RocConfig(drawn=6, kept=5, threshold=threshold)
        reasons = [choice.reason for choice in select(made, config, 0).choices]
        assert sum(reason.startswith("success") for reason in reasons) == successes

    def test_tool_errors_can_cost_reward_and_leave_success_as_it_is(
        self, trajectory: MakeTrajectory, group: MakeGroup
    ) -> None:
        """All four are right; one call of one, one of two and none failed; one has no call."""
        failed, fine = Outcome.EXCEPTION, Outcome.OK
        outcomes = [(failed,), (failed, fine), (fine,), ()]
        made = group([trajectory(i, 1.0, each) for i, each in enumerate(outcomes)])
        chosen = select(made, ROC, 0, tool_errors=0.75)
        assert [c.reward for c in chosen.choices] == [0.25, 0.625, 1.0, 1.0]
        assert teaches(chosen)
        plain = select(made, ROC, 0)
        assert [c.reward for c in plain.choices] == [1.0] * 4
        assert not teaches(plain)
        wide = group([trajectory(i, 1.0, (failed,)) for i in range(6)])
        reasons = {c.reason for c in select(wide, ROC, 0, tool_errors=0.75).choices}
        assert reasons == {roc.POSITIVE, roc.NOT_POSITIVE}

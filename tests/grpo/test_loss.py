"""The loss against hand-computed numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from rstar2.config import LossConfig
from rstar2.grpo.loss import SUMS, Stats, TokenBatch, grpo_loss, importance

OFF = LossConfig(importance_cap=None)


def run(
    config: LossConfig,
    *,
    ratio: Sequence[float],
    advantage: Sequence[float],
    mismatch: Sequence[float] | None = None,
    sequence: Sequence[int] | None = None,
    entropy: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
) -> tuple[float, list[float], dict[str, float], torch.Tensor | None]:
    """Loss with old logprob -1 everywhere, given ratios to it and of it to the rollout policy."""
    n = len(ratio)
    old = torch.full((n,), -1.0, dtype=torch.float64)
    current = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    rollout = old - torch.tensor(mismatch or [1.0] * n, dtype=torch.float64).log()
    batch = TokenBatch(
        rollout_T=rollout,
        old_T=old,
        advantage_T=torch.tensor(advantage, dtype=torch.float64),
        sequence_T=torch.tensor(sequence or [0] * n),
        reference_T=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )
    ent = torch.tensor(entropy or [0.0] * n, dtype=torch.float64, requires_grad=True)
    loss, stats = grpo_loss(current, ent, batch, config, n)
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.tolist(), stats.metrics(config), ent.grad


class TestClip:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "gradient"),
        [
            (1.0, 2.0, -2.0, -2.0),
            (1.2, 2.0, -2.4, -2.4),  # within 1.28
            (1.5, 2.0, -2.56, 0.0),  # clipped high at 1.28
            (0.5, 2.0, -1.0, -1.0),  # a falling ratio of a good token is never clipped
            (0.9, -2.0, 1.8, 1.8),
            (0.5, -2.0, 1.6, 0.0),  # clipped low at 0.8
            (1.5, -2.0, 3.0, 3.0),
            (1.0, 0.0, 0.0, 0.0),
        ],
    )
    def test_one_token(self, ratio: float, advantage: float, loss: float, gradient: float) -> None:
        value, grad, metrics, _ = run(OFF, ratio=[ratio], advantage=[advantage])
        assert value == pytest.approx(loss)
        assert grad == pytest.approx([gradient], abs=1e-12)
        assert metrics["ratio/clip"] == float(gradient == 0.0 and advantage != 0.0)

    def test_shares_of_clipped_tokens(self) -> None:
        _, _, metrics, _ = run(OFF, ratio=[1.5, 1.5, 0.5, 0.5], advantage=[1, -1, -1, 1])
        assert (metrics["ratio/clip_high"], metrics["ratio/clip_low"]) == (0.25, 0.25)
        assert metrics["ratio/mean"] == pytest.approx(1.0)
        assert metrics["ratio/max"] == pytest.approx(1.5)


class TestImportance:
    def test_weights_are_truncated_at_the_cap(self) -> None:
        config = LossConfig(importance_cap=2.0)
        loss, grad, metrics, _ = run(
            config, ratio=[1, 1, 1], advantage=[1, 1, -1], mismatch=[0.5, 3.0, 1.5]
        )
        assert loss == pytest.approx(-(0.5 + 2.0 - 1.5) / 3)
        assert grad == pytest.approx([-0.5 / 3, -2.0 / 3, 1.5 / 3])
        assert metrics["mismatch/capped"] == pytest.approx(1 / 3)

    def test_off_leaves_the_loss_and_still_measures(self) -> None:
        loss, _, metrics, _ = run(OFF, ratio=[1, 1], advantage=[1, 1], mismatch=[0.5, 4.0])
        assert loss == pytest.approx(-1.0)
        k1 = -(math.log(0.5) + math.log(4.0)) / 2
        k3 = ((0.5 - math.log(0.5) - 1) + (4 - math.log(4) - 1)) / 2
        assert metrics["mismatch/kl"] == pytest.approx(k1)
        assert metrics["mismatch/k3"] == pytest.approx(k3)
        assert metrics["mismatch/ratio_max"] == pytest.approx(4.0)
        assert metrics["mismatch/abs_max"] == pytest.approx(math.log(4.0))
        assert metrics["mismatch/ess"] == pytest.approx(4.5**2 / (2 * 16.25))

    def test_sequence_mask_drops_by_geometric_mean(self) -> None:
        """Sequence 0: sqrt(2 * 0.5) = 1, kept; sequence 1: sqrt(2 * 2) = 2, dropped."""
        config = LossConfig(importance_cap=None, sequence_mask=(0.8, 1.25))
        loss, grad, metrics, _ = run(
            config,
            ratio=[1] * 4,
            advantage=[1] * 4,
            mismatch=[2.0, 0.5, 2.0, 2.0],
            sequence=[0, 0, 1, 1],
        )
        assert loss == pytest.approx(-0.5), "dropped tokens stay in the denominator"
        assert grad == pytest.approx([-0.25, -0.25, 0, 0])
        assert metrics["mismatch/dropped"] == 0.5

    def test_broken_logprobs_stay_finite(self) -> None:
        gap = torch.tensor([1000.0, -1000.0]).clamp(-20, 20)
        weight, keep = importance(gap, torch.tensor([0, 1]), LossConfig())
        assert weight.tolist() == pytest.approx([2.0, 0.0], abs=1e-6)
        assert keep.all()


class TestTerms:
    def test_kl_is_k3_against_the_reference(self) -> None:
        config = LossConfig(importance_cap=None, kl=0.1)
        loss, grad, metrics, _ = run(config, ratio=[1.0], advantage=[0.0], reference=[-1.5])
        kl = math.exp(-0.5) + 0.5 - 1
        assert loss == pytest.approx(0.1 * kl)
        assert grad == pytest.approx([0.1 * (1 - math.exp(-0.5))])
        assert metrics["loss"] == pytest.approx(loss)

    def test_entropy_is_a_bonus(self) -> None:
        config = LossConfig(importance_cap=None, entropy=0.01)
        loss, _, metrics, grad = run(config, ratio=[1, 1], advantage=[0, 0], entropy=[2.0, 4.0])
        assert loss == pytest.approx(-0.03)
        assert grad is not None
        assert grad.tolist() == pytest.approx([-0.005, -0.005])
        assert metrics["entropy"] == pytest.approx(3.0)

    def test_entropy_is_only_measured_by_default(self) -> None:
        assert run(LossConfig(), ratio=[1.0], advantage=[1.0], entropy=[2.0])[3] is None


def test_parts_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    current, old, rollout = -torch.rand(3, 10).double() * 2
    advantage, entropy = torch.randn(10).double(), torch.rand(10).double()
    config = LossConfig(clip_low=0.1, clip_high=0.1)

    def part(s: slice) -> tuple[float, Stats]:
        sequence = torch.zeros(len(range(10)[s]), dtype=torch.long)
        batch = TokenBatch(rollout[s], old[s], advantage[s], sequence)
        loss, stats = grpo_loss(current[s], entropy[s], batch, config, 10)
        return loss.item(), stats

    whole, stats = part(slice(0, 10))
    total, summed = 0.0, Stats.empty()
    for s in (slice(0, 3), slice(3, 4), slice(4, 10), slice(10, 10)):
        loss, some = part(s)
        total += loss
        summed.add(some)
    assert total == pytest.approx(whole)
    assert summed.metrics(config) == pytest.approx(stats.metrics(config))
    assert len(SUMS) == stats.sums.numel()

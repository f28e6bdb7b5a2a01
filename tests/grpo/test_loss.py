"""The loss against hand-computed numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rstar2.config import LossConfig, schema
from rstar2.config.schema import LOSSES
from rstar2.errors import UserError
from rstar2.grpo.advantage import ADVANTAGES
from rstar2.grpo.loss import KINDS, SUMS, Stats, TokenBatch, grpo_loss, importance

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
    loss, stats = grpo_loss(current, ent, batch, config, n, len(set(sequence or [0])))
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


class TestSequenceRatio:
    """GSPO, two sequences of two and one token: s_0 = sqrt(r_0 r_1), s_1 = r_2."""

    GSPO = LossConfig(kind="gspo", importance_cap=None, clip_low=0.1, clip_high=0.2)

    def test_by_hand(self) -> None:
        """s = sqrt(1.21 * 1) = 1.1 and 0.95; both within the clip: -(1.1 * 2 - 0.95) / 2.

        d s_0 / d log pi of one of its two tokens is s_0 / 2.
        """
        loss, grad, metrics, _ = run(
            self.GSPO, ratio=[1.21, 1.0, 0.95], advantage=[2, 2, -1], sequence=[0, 0, 1]
        )
        assert loss == pytest.approx(-(2.2 - 0.95) / 2)
        assert grad == pytest.approx([-1.1 / 2, -1.1 / 2, 0.95 / 2])
        assert metrics["loss"] == pytest.approx(loss)
        assert metrics["ratio/clip"] == 0.0

    def test_a_clipped_sequence_has_no_gradient(self) -> None:
        """s_0 = sqrt(4 * 1) = 2 is clipped to 1.2, s_1 = 0.5 with A < 0 to 0.9."""
        loss, grad, metrics, _ = run(
            self.GSPO, ratio=[4.0, 1.0, 0.5], advantage=[1, 1, -1], sequence=[0, 0, 1]
        )
        assert loss == pytest.approx(-(1.2 - 0.9) / 2)
        assert grad == pytest.approx([0.0, 0.0, 0.0])
        assert metrics["ratio/clip_high"] == pytest.approx(2 / 3)
        assert metrics["ratio/clip_low"] == pytest.approx(1 / 3)

    def test_the_weight_is_that_of_the_sequence(self) -> None:
        """Weights sqrt(4 * 1) = 2, capped at 1.5, and 0.5."""
        config = self.GSPO.model_copy(update={"importance_cap": 1.5})
        loss, _, _, _ = run(
            config, ratio=[1] * 3, advantage=[1] * 3, mismatch=[4, 1, 0.5], sequence=[0, 0, 1]
        )
        assert loss == pytest.approx(-(1.5 + 0.5) / 2)

    def test_a_dropped_sequence_stays_in_the_mean(self) -> None:
        config = self.GSPO.model_copy(update={"sequence_mask": (0.8, 1.25)})
        loss, grad, _, _ = run(
            config, ratio=[1] * 3, advantage=[1] * 3, mismatch=[2, 2, 1], sequence=[0, 0, 1]
        )
        assert loss == pytest.approx(-0.5)
        assert grad == pytest.approx([0, 0, -0.5])

    def test_one_token_per_sequence_is_grpo(self) -> None:
        case = {"ratio": [1.5, 0.5, 0.9], "advantage": [1, -1, 2], "sequence": [0, 1, 2]}
        token = run(LossConfig(importance_cap=None, clip_low=0.1, clip_high=0.2), **case)  # type: ignore[arg-type]
        sequence = run(self.GSPO, **case)  # type: ignore[arg-type]
        assert sequence[0] == pytest.approx(token[0])
        assert sequence[1] == pytest.approx(token[1])


class TestClippedWeights:
    CISPO = LossConfig(kind="cispo", importance_cap=None)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "weight"),
        [(1.0, 2.0, 1.0), (1.5, 2.0, 1.28), (1.5, -2.0, 1.28), (0.5, -2.0, 0.8), (0.9, 2.0, 0.9)],
    )
    def test_one_token(self, ratio: float, advantage: float, weight: float) -> None:
        """The gradient of a clipped token stays: -clip(r) A; the loss is -clip(r) A log pi."""
        loss, grad, _, _ = run(self.CISPO, ratio=[ratio], advantage=[advantage])
        assert grad == pytest.approx([-weight * advantage])
        assert loss == pytest.approx(-weight * advantage * (-1.0 + math.log(ratio)))

    def test_mean_over_tokens_with_importance_weights(self) -> None:
        config = LossConfig(kind="cispo", importance_cap=2.0)
        _, grad, _, _ = run(config, ratio=[1, 1], advantage=[1, -1], mismatch=[0.5, 3.0])
        assert grad == pytest.approx([-0.5 / 2, 2.0 / 2])


OWN_LOSS = """
import torch
def reinforce(terms, config):
    return -terms.weight_T * terms.advantage_T * terms.current_T
def scalar(terms, config):
    return terms.current_T.sum()
def number(terms, config):
    return 1.0
"""


class TestOwnLoss:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_loss.py").write_text(OWN_LOSS)
        monkeypatch.syspath_prepend(tmp_path)

    def test_is_summed_and_divided_here(self) -> None:
        config = LossConfig(kind="own_loss:reinforce")
        loss, grad, metrics, _ = run(
            config, ratio=[1, 1], advantage=[1, -2], mismatch=[0.5, 3.0], entropy=[1, 1]
        )
        assert loss == pytest.approx((0.5 - 4.0) / 2)
        assert grad == pytest.approx([-0.25, 2.0])
        assert metrics["ratio/mean"] == pytest.approx(1.0)

    @pytest.mark.parametrize(("name", "got"), [("scalar", r"\[\]"), ("number", "float")])
    def test_another_shape_is_refused(self, name: str, got: str) -> None:
        with pytest.raises(UserError, match=rf"own_loss:{name}: it returned {got}, .* shape \[2\]"):
            run(LossConfig(kind=f"own_loss:{name}"), ratio=[1, 1], advantage=[1, 1])


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_agree_with_differences(kind: str) -> None:
    """autograd against finite differences in float64, away from the corners of the clip."""
    torch.manual_seed(2)
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    old, rollout = -1 - torch.rand(2, 6).double()
    start = (old + 0.4 * torch.randn(6).double()).requires_grad_()
    advantage = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[sequence]
    batch = TokenBatch(rollout, old, advantage, sequence)
    config = LossConfig(kind=kind)
    frozen = (start.detach() - old).exp().clamp(1 - config.clip_low, 1 + config.clip_high)

    def loss(current: torch.Tensor) -> torch.Tensor:
        if kind == "cispo":  # its weights are constants, which differences would not keep
            weight, _ = importance(old - rollout, sequence, config)
            total: torch.Tensor = (-weight * frozen * advantage * current).sum() / 6
            return total
        return grpo_loss(current, torch.zeros(6).double(), batch, config, 6, 3)[0]

    assert torch.autograd.gradcheck(loss, (start,))
    (expected,) = torch.autograd.grad(loss(start), start)
    value, _ = grpo_loss(start, torch.zeros(6).double(), batch, config, 6, 3)
    (gradient,) = torch.autograd.grad(value, start)
    assert gradient.tolist() == pytest.approx(expected.tolist())


def test_names_of_the_recipe_are_those_of_the_code() -> None:
    assert tuple(KINDS) == LOSSES
    assert tuple(ADVANTAGES) == schema.ADVANTAGES


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


def test_sequences_in_parts_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    current, old, rollout = -torch.rand(3, 10).double() * 2
    lengths = [4, 1, 5]
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[sequence]
    config = LossConfig(kind="gspo", clip_low=0.3, clip_high=0.3)

    def part(s: slice) -> float:
        batch = TokenBatch(rollout[s], old[s], advantage[s], sequence[s] - sequence[s].min())
        loss, _ = grpo_loss(current[s], torch.zeros_like(current[s]), batch, config, 10, 3)
        return loss.item()

    parts = [part(s) for s in (slice(0, 4), slice(4, 5), slice(5, 10))]
    assert sum(parts) == pytest.approx(part(slice(0, 10)))


def test_parts_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    current, old, rollout = -torch.rand(3, 10).double() * 2
    advantage, entropy = torch.randn(10).double(), torch.rand(10).double()
    config = LossConfig(clip_low=0.1, clip_high=0.1)

    def part(s: slice) -> tuple[float, Stats]:
        sequence = torch.zeros(len(range(10)[s]), dtype=torch.long)
        batch = TokenBatch(rollout[s], old[s], advantage[s], sequence)
        loss, stats = grpo_loss(current[s], entropy[s], batch, config, 10, 1)
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

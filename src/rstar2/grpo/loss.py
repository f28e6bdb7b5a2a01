"""The GRPO loss over three policies, on flat arrays of sampled tokens only.

    rollout   mu       what the engine sampled from; its logprobs travel with every token
    old       pi_old   the learner's weights when the batch began
    current   pi       the weights being trained

    loss = - 1/N  sum_t  w_t * min(r_t A, clip(r_t, 1 - low, 1 + high) A)
           + kl * 1/N sum_t k3(reference)  -  entropy * 1/N sum_t H_t

    r_t = pi / pi_old          moves away from 1 only over several mini-batches of one batch
    w_t = min(pi_old / mu, cap)    truncated importance sampling: staleness and engine mismatch

Invariants: N is the number of sampled tokens of the whole mini-batch, over all micro-batches and
ranks, known before the first forward pass, so any split gives the same loss and gradient. Arrays
hold masked-in tokens only: nothing else can enter loss, ratios, entropy or metrics (Invariant 1).

Dimensions: `_T` sampled tokens of one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rstar2.config import LossConfig

LOG_RATIO_BOUND = 20.0
"""exp is taken of log ratios within this bound, so that one wrong token cannot give inf."""

SUMS = (
    "tokens",
    "policy",
    "kl",
    "entropy",
    "ratio",
    "clip_low",
    "clip_high",
    "old_kl",
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_abs",
    "weight",
    "weight_squared",
    "capped",
    "dropped",
)
MAXIMA = ("ratio", "mismatch_ratio", "mismatch_abs")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Inputs of the loss per sampled token of a micro-batch, besides the current policy."""

    rollout_T: Tensor
    old_T: Tensor
    advantage_T: Tensor
    sequence_T: Tensor
    """Which sequence of the micro-batch each token belongs to: 0, 0, 1, 2, 2, ..."""
    reference_T: Tensor | None = None


@dataclass(slots=True)
class Stats:
    """Sums and maxima over tokens; adding micro-batches and ranks gives those of the whole."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Stats:
        return cls(
            torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            torch.zeros(len(MAXIMA), dtype=torch.float64, device=device),
        )

    def add(self, other: Stats) -> None:
        """Add the statistics of another micro-batch or rank."""
        self.sums += other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)

    def metrics(self, config: LossConfig) -> dict[str, float]:
        """Means per sampled token, maxima and counts, by metric name."""
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        top = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        tokens = max(total["tokens"], 1.0)
        mean = {name: value / tokens for name, value in total.items()}
        squared = total["weight_squared"]
        return {
            "loss": mean["policy"] + config.kl * mean["kl"] - config.entropy * mean["entropy"],
            "loss/policy": mean["policy"],
            "loss/kl": mean["kl"],
            "entropy": mean["entropy"],
            "tokens": total["tokens"],
            "ratio/mean": mean["ratio"],
            "ratio/max": top["ratio"],
            "ratio/clip_low": mean["clip_low"],
            "ratio/clip_high": mean["clip_high"],
            "ratio/clip": mean["clip_low"] + mean["clip_high"],
            "ratio/kl": mean["old_kl"],
            "mismatch/kl": mean["mismatch_k1"],
            "mismatch/k3": mean["mismatch_k3"],
            "mismatch/abs": mean["mismatch_abs"],
            "mismatch/abs_max": top["mismatch_abs"],
            "mismatch/ratio_max": top["mismatch_ratio"],
            "mismatch/ess": total["weight"] ** 2 / (tokens * squared) if squared else 0.0,
            "mismatch/capped": mean["capped"],
            "mismatch/dropped": mean["dropped"],
        }


def grpo_loss(
    current_T: Tensor, entropy_T: Tensor, batch: TokenBatch, config: LossConfig, tokens: int
) -> tuple[Tensor, Stats]:
    """This micro-batch's share of the loss (already divided by `tokens`), and its statistics."""
    gap_T = (batch.old_T - batch.rollout_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mismatch_T = gap_T.exp()
    weight_T, keep_T = importance(gap_T, batch.sequence_T, config)

    log_ratio_T = (current_T - batch.old_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_T = log_ratio_T.exp()
    advantage_T = batch.advantage_T
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    policy_T = -weight_T * gain_T

    loss_T = policy_T
    kl_T = torch.zeros_like(current_T)
    if batch.reference_T is not None:
        kl_T = k3((batch.reference_T - current_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        loss_T = loss_T + config.kl * kl_T
    if config.entropy:
        loss_T = loss_T - config.entropy * entropy_T

    with torch.no_grad():
        low_T = (advantage_T < 0) & (ratio_T < 1.0 - config.clip_low)
        high_T = (advantage_T > 0) & (ratio_T > 1.0 + config.clip_high)
        cap = math.inf if config.importance_cap is None else config.importance_cap
        columns = (
            torch.ones_like(current_T),
            policy_T,
            kl_T,
            entropy_T,
            ratio_T,
            low_T,
            high_T,
            k3(log_ratio_T),
            -gap_T,
            k3(gap_T),
            gap_T.abs(),
            mismatch_T,
            mismatch_T.square(),
            mismatch_T > cap,
            ~keep_T,
        )
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
        tops = (ratio_T, mismatch_T, gap_T.abs())
        maxima = (
            torch.stack([top.max().double() for top in tops])
            if current_T.numel()
            else torch.zeros(len(tops), dtype=torch.float64, device=current_T.device)
        )
    return loss_T.sum() / tokens, Stats(sums, maxima)


def importance(gap_T: Tensor, sequence_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token against the rollout policy, and whether its sequence takes part.

    A dropped sequence has weight 0 and stays in the denominator, which is known in advance.
    """
    weight_T = torch.ones_like(gap_T)
    if config.importance_cap is not None:
        weight_T = gap_T.exp().clamp(max=config.importance_cap)
    keep_T = torch.ones_like(gap_T, dtype=torch.bool)
    if config.sequence_mask is not None and gap_T.numel():
        low, high = config.sequence_mask
        count = int(sequence_T.max()) + 1
        total = gap_T.new_zeros(count).index_add_(0, sequence_T, gap_T)
        length = gap_T.new_zeros(count).index_add_(0, sequence_T, torch.ones_like(gap_T))
        ratio = (total / length.clamp(min=1)).exp()
        keep_T = ((ratio >= low) & (ratio <= high))[sequence_T]
        weight_T = weight_T * keep_T
    return weight_T, keep_T


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1: an estimate of a KL divergence that is never negative."""
    return torch.expm1(log_ratio) - log_ratio

"""The RL loss over three policies, on flat arrays of sampled tokens only.

    rollout   mu       what the engine sampled from; its logprobs travel with every token
    old       pi_old   the learner's weights when the batch began
    current   pi       the weights being trained

    loss = - 1/N  sum_t  w_t * min(r_t A, clip(r_t, 1 - low, 1 + high) A)
           + kl * 1/N sum_t k3(reference)  -  entropy * 1/N sum_t H_t

    r_t = pi / pi_old          moves away from 1 only over several mini-batches of one batch
    w_t = min(pi_old / mu, cap)    truncated importance sampling: staleness and engine mismatch

That is `rl.loss.kind: clip`. The policy term of the other kinds, for sequences i of n with |i|
tokens each, where sg stops the gradient:

    gspo    - 1/n  sum_i  w_i * min(s_i A, clip(s_i, 1 - low, 1 + high) A)
            s_i, w_i: as r_t, w_t, of the geometric means over the tokens of the sequence
    cispo   - 1/N  sum_t  w_t * sg(clip(r_t, 1 - low, 1 + high)) A log pi
    module:function    your own: PolicyTerms and LossConfig -> loss of each token, summed and
            divided by N here

Invariants: N is the number of sampled tokens of the whole mini-batch, over all micro-batches and
ranks, known before the first forward pass, so any split gives the same loss and gradient. Arrays
hold masked-in tokens only: nothing else can enter loss, ratios, entropy or metrics (Invariant 1).

Dimensions: `_T` sampled tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rstar2.config import LossConfig
from rstar2.errors import UserError
from rstar2.plugins import load_function

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


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a policy term is computed from: values per sampled token, in whole sequences."""

    current_T: Tensor
    """Logprobs under the weights being trained; the gradient flows through this."""
    log_ratio_T: Tensor
    """log(current / old), bounded; the gradient flows through this too."""
    gap_T: Tensor
    """log(old / rollout), bounded."""
    weight_T: Tensor
    """Truncated importance weight of each token; 0 in dropped sequences."""
    keep_T: Tensor
    """False in sequences that `sequence_mask` drops."""
    advantage_T: Tensor
    sequence_T: Tensor
    tokens: int
    """Sampled tokens of the whole mini-batch, over all micro-batches and ranks."""
    sequences: int
    """Sequences of the whole mini-batch."""


PolicyLoss = Callable[[PolicyTerms, LossConfig], tuple[Tensor, Tensor]]
"""Returns the loss and the ratio that is clipped, per token."""


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


def clipped_tokens(terms: PolicyTerms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """GRPO: the clipped gain of each token."""
    ratio_T = terms.log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain_T = torch.minimum(ratio_T * terms.advantage_T, clipped_T * terms.advantage_T)
    return -terms.weight_T * gain_T, ratio_T


def clipped_sequences(terms: PolicyTerms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """GSPO: the clipped gain of each sequence, shared by its tokens; every sequence counts once."""
    length_T = _sequence_sums(torch.ones_like(terms.gap_T), terms.sequence_T)
    ratio_T = (_sequence_sums(terms.log_ratio_T, terms.sequence_T) / length_T).exp()
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain_T = torch.minimum(ratio_T * terms.advantage_T, clipped_T * terms.advantage_T)
    weight_T = terms.keep_T.to(gain_T.dtype)
    if config.importance_cap is not None:
        mismatch_T = (_sequence_sums(terms.gap_T, terms.sequence_T) / length_T).exp()
        weight_T = weight_T * mismatch_T.clamp(max=config.importance_cap)
    share_T = terms.tokens / (
        terms.sequences * length_T
    )  # turns a mean over tokens into one over n
    return -weight_T * gain_T * share_T, ratio_T


def clipped_weights(terms: PolicyTerms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """CISPO: the clipped ratio is a constant weight, so that no token loses its gradient."""
    ratio_T = terms.log_ratio_T.exp()
    clipped_T = ratio_T.detach().clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -terms.weight_T * clipped_T * terms.advantage_T * terms.current_T, ratio_T


KINDS: dict[str, PolicyLoss] = {
    "clip": clipped_tokens,
    "gspo": clipped_sequences,
    "cispo": clipped_weights,
}


def policy_loss(terms: PolicyTerms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Loss and ratio per token by the function that `rl.loss.kind` names."""
    function = load_function("rl.loss.kind", config.kind, KINDS)
    if config.kind in KINDS:
        loss_T, ratio_T = function(terms, config)
        return loss_T, ratio_T
    loss_T = function(terms, config)
    if not isinstance(loss_T, Tensor) or loss_T.shape != terms.current_T.shape:
        got = list(loss_T.shape) if isinstance(loss_T, Tensor) else type(loss_T).__name__
        raise UserError(
            f"rl.loss.kind = {config.kind}: it returned {got}, but it must return a tensor with "
            f"the loss of each token, of shape {list(terms.current_T.shape)}"
        )
    return loss_T, terms.log_ratio_T.detach().exp()


def grpo_loss(
    current_T: Tensor,
    entropy_T: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    tokens: int,
    sequences: int,
) -> tuple[Tensor, Stats]:
    """This micro-batch's share of the loss (already divided by `tokens`), and its statistics.

    `tokens` and `sequences` count the whole mini-batch.
    """
    gap_T = (batch.old_T - batch.rollout_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mismatch_T = gap_T.exp()
    weight_T, keep_T = importance(gap_T, batch.sequence_T, config)

    log_ratio_T = (current_T - batch.old_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantage_T = batch.advantage_T
    terms = PolicyTerms(
        current_T=current_T,
        log_ratio_T=log_ratio_T,
        gap_T=gap_T,
        weight_T=weight_T,
        keep_T=keep_T,
        advantage_T=advantage_T,
        sequence_T=batch.sequence_T,
        tokens=tokens,
        sequences=sequences,
    )
    policy_T, ratio_T = policy_loss(terms, config)

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
        length_T = _sequence_sums(torch.ones_like(gap_T), sequence_T)
        ratio_T = (_sequence_sums(gap_T, sequence_T) / length_T).exp()
        keep_T = (ratio_T >= low) & (ratio_T <= high)
        weight_T = weight_T * keep_T
    return weight_T, keep_T


def _sequence_sums(value_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The sum over its sequence, for each token.

    There is room for as many sequences as tokens, because reading their number from a GPU would
    wait for all of its work.
    """
    return torch.zeros_like(value_T).index_add(0, sequence_T, value_T)[sequence_T]


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1: an estimate of a KL divergence that is never negative."""
    return torch.expm1(log_ratio) - log_ratio

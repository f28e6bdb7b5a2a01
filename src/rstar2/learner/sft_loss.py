"""The loss of SFT, in the form of the GRPO loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rstar2.grpo.loss import Stats
from rstar2.learner.pack import Pack

SftRow = tuple[Sequence[int], Sequence[int]]
"""(token ids, mask): 1 on tokens that enter the SFT loss."""

LossOf = Callable[[Pack, Tensor, Tensor], tuple[Tensor, Stats]]
"""(pack, logprobs, entropies) -> loss and statistics of one micro-batch."""


def mean_logprob_loss(rows: Sequence[SftRow], device: str) -> LossOf:
    """Mean negative logprob, in the statistics of the GRPO loss (where it is the policy term)."""
    tokens = sum(sum(map(bool, mask[1:])) for _, mask in rows)

    def loss_of(pack: Pack, current_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Stats]:
        stats = Stats.empty(device)
        stats.sums[0] = current_T.numel()
        stats.sums[1] = -current_T.detach().sum(dtype=torch.float64)
        stats.sums[3] = entropy_T.detach().sum(dtype=torch.float64)
        return -current_T.sum() / tokens, stats

    return loss_of

"""What a mini-batch adds to its packs: inputs of the loss per token, and what is recorded of it.

All inputs are on the device before the first micro-batch runs, so that the host never waits for the
device between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rstar2.config import LossConfig
from rstar2.grpo.loss import Stats, TokenBatch, grpo_loss
from rstar2.learner.pack import Pack, flat
from rstar2.learner.sft_loss import LossOf
from rstar2.types import Sample, TokenValues

LOGPROB_DIGITS = 6
"""Decimals of the logprobs that are recorded."""


class MiniBatch:
    """Per-token inputs of the GRPO loss for one mini-batch."""

    def __init__(
        self,
        samples: Sequence[Sample],
        packs: Sequence[Pack],
        old: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None,
    ) -> None:
        self.samples, self.packs = samples, packs
        self.old = None if old is None else _by_pack(packs, old)
        self.reference = None if reference is None else _by_pack(packs, reference)
        self._seen: list[tuple[Pack, Tensor, Tensor]] = []

    def loss_of(self, config: LossConfig, tokens: int, sequences: int, device: str) -> LossOf:
        """The loss of a micro-batch; its inputs go to the device before the first of them runs."""
        rollout = _by_pack(self.packs, [self._rollout(pack, device) for pack in self.packs])
        advantage = _by_pack(self.packs, [self._advantage(pack, device) for pack in self.packs])

        def loss_of(pack: Pack, current_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Stats]:
            batch = TokenBatch(
                rollout_T=rollout[id(pack)],
                old_T=current_T.detach() if self.old is None else self.old[id(pack)],
                advantage_T=advantage[id(pack)],
                sequence_T=pack.sequence_T,
                reference_T=None if self.reference is None else self.reference[id(pack)],
            )
            self._seen.append((pack, batch.old_T, current_T.detach()))
            return grpo_loss(current_T, entropy_T, batch, config, tokens, sequences)

        return loss_of

    def _rollout(self, pack: Pack, device: str) -> Tensor:
        return flat([sample.logprobs for sample in self.samples], pack, device)

    def _advantage(self, pack: Pack, device: str) -> Tensor:
        """The advantage of its sample for each predicted token."""
        sizes = [len(row.predict) for row in pack.rows]
        values = [
            self.samples[row.index].advantage if size else 0.0
            for row, size in zip(pack.rows, sizes, strict=True)
        ]
        per_token = np.repeat(np.asarray(values, dtype=np.float32), sizes)
        return torch.from_numpy(per_token).to(device)

    def token_values(self) -> Iterator[TokenValues]:
        """Old and current logprobs of each sample, rounded for the record."""
        for pack, old_T, current_T in self._seen:
            sizes = [len(row.predict) for row in pack.rows]
            for row, old, current in zip(
                pack.rows, old_T.split(sizes), current_T.split(sizes), strict=True
            ):
                if len(row.predict):
                    name = self.samples[row.index].trajectory_id
                    yield TokenValues(name, _rounded(old), _rounded(current))


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, LOGPROB_DIGITS) for value in values.tolist())


def _by_pack(packs: Sequence[Pack], values: Sequence[Tensor]) -> dict[int, Tensor]:
    return {id(pack): value for pack, value in zip(packs, values, strict=True)}

"""From ragged sequences to micro-batches by a token budget, balanced over ranks. Pure planning
first (`plan`), tensors after (`make_pack`).

Invariants: every sequence is in exactly one micro-batch of one rank; all ranks run the same number
of micro-batches, so that collectives always meet (a rank with nothing left runs `empty_pack`); a
sequence is cut after its last predicted token, because earlier tokens do not depend on later ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rstar2.errors import InvariantError
from rstar2.learner.attention import Ragged

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence: ids up to the last predicted one, and the positions of predicted tokens."""

    index: int
    ids: Ids
    predict: Ids
    """Positions t >= 1 of `ids` whose token is predicted (from t - 1)."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch: whole sequences end to end, longest first, no padding."""

    rows: tuple[PackedRow, ...]
    input_ids: Tensor
    position_ids: Tensor
    ragged: Ragged
    lengths: tuple[int, ...]
    bounds: Tensor
    """Where sequences begin and end, int32, as flash attention takes them."""
    source_T: Tensor
    """Positions in the pack whose hidden state predicts a token."""
    target_T: Tensor
    sequence_T: Tensor
    """Index into `rows` of each predicted token."""


def input_length(mask: Sequence[int]) -> int:
    """Tokens of a sequence that must go through the model: all before the last predicted one."""
    last = len(mask) - 1
    while last > 0 and not mask[last]:
        last -= 1
    return max(last, 0)


def make_row(index: int, ids: Sequence[int], mask: Sequence[int]) -> PackedRow:
    """The trainable part of one sequence, which must have a token to predict."""
    if len(ids) != len(mask):
        raise InvariantError(f"sequence {index}: {len(ids)} ids but a mask of {len(mask)}")
    end = input_length(mask) + 1
    if end < 2:
        raise InvariantError(f"sequence {index} has no token to predict")
    predict = np.flatnonzero(np.asarray(mask[1:end])) + 1
    return PackedRow(index, np.asarray(ids[:end], dtype=np.int64), predict)


def plan(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """[micro-batch][rank] -> indices of sequences: the fewest micro-batches within the budget.

    A sequence longer than the budget has a micro-batch of its own. Longest first into the
    emptiest bin, so that the bins of one micro-batch are near equal.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // (budget * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(count * ranks)]
        heap = [(0, b) for b in range(len(bins))]
        fits = True
        for i in order:
            used, b = heapq.heappop(heap)
            fits = fits and (used + lengths[i] <= budget or not bins[b])
            bins[b].append(i)
            heapq.heappush(heap, (used + lengths[i], b))
        if fits:
            break
        count += 1
    bins.sort(key=lambda part: -sum(lengths[i] for i in part))
    return [bins[m * ranks : (m + 1) * ranks] for m in range(count)]


def make_pack(rows: Sequence[PackedRow], device: torch.device | str = "cpu") -> Pack:
    """Lay rows end to end, longest first."""
    ordered = sorted(rows, key=lambda row: (-row.tokens, row.index))
    lengths = tuple(row.tokens for row in ordered)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))

    def tensor(parts: Sequence[Ids]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        rows=tuple(ordered),
        input_ids=tensor([row.ids[:-1] for row in ordered])[None],
        position_ids=tensor([np.arange(length) for length in lengths])[None],
        ragged=Ragged.of(lengths, device),
        lengths=lengths,
        bounds=torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32)).to(device),
        source_T=tensor([row.predict - 1 + at for row, at in zip(ordered, starts, strict=True)]),
        target_T=tensor([row.ids[row.predict] for row in ordered]),
        sequence_T=tensor([np.full(len(row.predict), n) for n, row in enumerate(ordered)]),
    )


def empty_pack(device: torch.device | str = "cpu") -> Pack:
    """A micro-batch that predicts nothing: it only takes part in the collectives."""
    nothing = np.zeros(0, dtype=np.int64)
    return make_pack(
        [PackedRow(index=-1, ids=np.zeros(2, dtype=np.int64), predict=nothing)], device
    )


def flat(values: Sequence[Sequence[float]], pack: Pack, device: torch.device | str) -> Tensor:
    """Per-token values (aligned with the ids of sequence row.index) at the pack's predictions."""
    parts = [
        np.asarray(values[row.index], dtype=np.float32)[row.predict]
        for row in pack.rows
        if len(row.predict)
    ]
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    return torch.from_numpy(joined).to(device)

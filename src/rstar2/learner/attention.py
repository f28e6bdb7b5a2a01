"""Attention over ragged sequences without padding: the linear layers of a model run on one packed
row of tokens; only attention separates the sequences.

Sequences of a pack are sorted by length and split into buckets of similar length. A bucket is
padded on the right to its longest member for the attention call alone: under a causal mask no real
query sees right padding, so no mask is needed and the fused kernel can be used. `MAX_WASTE` bounds
the remaining padding. A dense block-diagonal mask over the pack would cost
(sum L)^2 instead of sum L^2.

`rstar2.learner.model` registers the function with transformers under `NAME`; it finds its
`Ragged` layout among the keyword arguments that every model hands down to its attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rstar2.errors import InvariantError, RecipeError

NAME = "rstar2_ragged"

MAX_WASTE = 0.15
"""Share of a bucket's attention cost (rows x longest^2) that may be padding."""
CALL_COST = 64**2
"""Cost of one more attention call in query-key pairs: very short sequences share a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive sequences of a pack that share one attention call."""

    lengths: tuple[int, ...]
    rows: Tensor | None
    """[b * L] index of each padded slot among the bucket's tokens; None if nothing is padded."""
    slots: Tensor | None
    """[tokens] index of each token among the padded slots; the inverse of `rows`."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Ragged:
    """How the tokens of a pack belong to sequences, longest first."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Ragged:
        """Layout of sequences with these lengths, which must not increase."""
        return cls(tuple(_bucket(part, device) for part in cut(lengths)))


def cut(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Split non-increasing lengths into runs that are cheap to pad to their first member."""
    if any(b > a for a, b in itertools.pairwise(lengths)):
        raise InvariantError("sequences of a pack must be sorted, longest first")
    parts: list[list[int]] = []
    used = 0
    for length in lengths:
        if parts:
            longest = parts[-1][0]
            padded = (len(parts[-1]) + 1) * longest**2
            if padded - used - length**2 <= MAX_WASTE * padded + CALL_COST:
                parts[-1].append(length)
                used += length**2
                continue
        parts.append([length])
        used = length**2
    return [tuple(part) for part in parts]


def _bucket(lengths: tuple[int, ...], device: torch.device | str) -> Bucket:
    longest = lengths[0]
    if lengths[-1] == longest:
        return Bucket(lengths, None, None)
    length = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(length) - length
    column = np.arange(longest)
    real = column < length[:, None]
    rows = np.where(real, start[:, None] + column, start[:, None])
    slots = np.flatnonzero(real)
    return Bucket(lengths, _on(rows.ravel(), device), _on(slots, device))


def _on(indices: npt.NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(indices).to(device)


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged: Ragged | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; query, key, value are [1, heads, tokens, dim]."""
    if ragged is None:
        raise InvariantError(f"{type(module).__name__} did not receive its ragged layout")
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise RecipeError(
                f"model: {type(module).__name__} needs {unsupported!r} in its attention, which "
                "training without padding does not have"
            )
    if value.dtype is torch.bfloat16 and value.device.type == "cpu":
        # torch's kernel for CPUs takes twice as long in bfloat16 as in float32.
        with torch.autocast("cpu", enabled=False):
            wide = query.float(), key.float(), value.float()
            out = _by_bucket(*wide, ragged, scaling, sliding_window).to(value.dtype)
    else:
        out = _by_bucket(query, key, value, ragged, scaling, sliding_window)
    return out.unsqueeze(0), None


def _by_bucket(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ragged: Ragged,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim] for all buckets."""
    sizes = [bucket.tokens for bucket in ragged.buckets]
    out = [
        _attend(q, k, v, bucket, scale, window)
        for q, k, v, bucket in zip(
            query.split(sizes, 2),
            key.split(sizes, 2),
            value.split(sizes, 2),
            ragged.buckets,
            strict=True,
        )
    ]
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: Bucket,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim] for one bucket."""
    count, longest = len(bucket.lengths), bucket.lengths[0]

    def rows(x: Tensor) -> Tensor:
        x = x if bucket.rows is None else x.index_select(2, bucket.rows)
        return x.view(x.shape[1], count, longest, x.shape[3]).transpose(0, 1)

    mask = None
    if window is not None and longest > window:
        age = torch.arange(longest, device=query.device)
        mask = (age[:, None] >= age) & (age[:, None] - age < window)
    out = F.scaled_dot_product_attention(
        rows(query),
        rows(key),
        rows(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    flat = out.transpose(1, 2).reshape(count * longest, out.shape[1], out.shape[3])
    return flat if bucket.slots is None else flat.index_select(0, bucket.slots)

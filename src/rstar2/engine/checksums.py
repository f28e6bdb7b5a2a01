"""Checksums of weights that are the same in the learner and in an engine, to the last bit.

The checksum of a tensor is the sum, modulo 2**64, of a hash of the bits of each element. It does
not depend on the order of the elements, and zeros add nothing. So it survives what engines do with
weights: the sum of a fused matrix (`qkv_proj`) is the sum of its parts, the sums of shards add up
to that of the whole tensor, permuted rows and padding change nothing. One element that differs in
its last bit changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 16
"""Elements hashed at a time: their int64 copies stay in the cache of a CPU."""
CHUNK_ON_GPU = 1 << 24
FIRST, SECOND = -7046029254386353131, -4658895280553007687
"""Odd factors of the hash (the golden ratio and a prime of splitmix64, as signed integers)."""
WORD = 1 << 64

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projections that engines keep in one matrix, and its name."""


class HeldWeights(msgspec.Struct, frozen=True):
    """The weights that an engine holds: their number format and the checksum of each tensor."""

    dtype: str
    """As in `torch.float32`, without `torch.`."""
    sums: dict[str, int]
    """By name, fused ones under the name of the fused tensor; tied ones once."""


def bit_sum(tensor: torch.Tensor, casts: Sequence[torch.dtype] = ()) -> torch.Tensor:
    """The checksum of a tensor after casts, as an int64 scalar on its device."""
    import torch

    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in flat.split(CHUNK if tensor.device.type == "cpu" else CHUNK_ON_GPU):
        for dtype in casts:
            part = part.to(dtype)
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.itemsize]
        mixed = part.view(words).to(torch.int64, copy=True)
        mixed.mul_(FIRST)
        mixed.bitwise_xor_(mixed >> 29).mul_(SECOND)
        total += mixed.sum()
    return total


def bit_sums(
    tensors: Iterable[tuple[str, torch.Tensor]], casts: Sequence[torch.dtype] = ()
) -> dict[str, int]:
    """Checksums by name, as unsigned integers; tensors with the same fused name are summed."""
    sums: dict[str, int] = {}
    for name, tensor in tensors:
        add(sums, fused_name(name), int(bit_sum(tensor, casts)))
    return sums


def add(sums: dict[str, int], name: str, value: int) -> None:
    """Add a checksum to the one of this name."""
    sums[name] = (sums.get(name, 0) + value) % WORD


def fused_name(name: str) -> str:
    """The name of the fused tensor that a tensor becomes a part of, or its own."""
    return ".".join(FUSED.get(part, part) for part in name.split("."))


def differing(expected: Mapping[str, int], held: Mapping[str, int]) -> list[str]:
    """Names of the tensors whose checksums differ; names that one side lacks are one group."""
    both = expected.keys() & held.keys()
    wrong = sorted(name for name in both if expected[name] != held[name])
    ours, theirs = sorted(expected.keys() - both), sorted(held.keys() - both)
    if sum(expected[n] for n in ours) % WORD != sum(held[n] for n in theirs) % WORD:
        wrong += ours or theirs
    return wrong

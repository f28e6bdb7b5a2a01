"""The KV cache: slabs with rows of equal length, budgeted in blocks.

The cache is counted in blocks of `block` tokens. A running sequence of b blocks is a row of the
slab for b blocks, a tensor [layers, 2, rows, kv_heads, b * block, head_dim]. Decoding rows come
first, so one batched matmul over a contiguous view covers all of them, and short sequences are not
padded to the longest. A sequence that outgrows its row is copied to the next slab once per `block`
tokens, which adds 2 / block to what attention reads anyway.

Invariants:
- `Blocks.used` never exceeds `Blocks.total`; every take is paired with one give.
- In a slab, rows [0, active) decode and rows [active, len(owners)) are being prefilled.

The budget counts blocks in use. Slabs double when full and halve when a quarter is used, so their
memory can exceed the budget by that factor; an empty slab uses none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rstar2.errors import InvariantError

MIN_ROWS = 8


class Blocks:
    """The KV budget: a counter of blocks that cannot be overdrawn."""

    def __init__(self, tokens: int, block: int) -> None:
        self.block = block
        self.total = tokens // block
        self.used = 0

    def for_tokens(self, tokens: int) -> int:
        """Blocks that hold this many tokens; at least one."""
        return max(1, -(-tokens // self.block))

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, count: int) -> None:
        if count > self.free:
            raise InvariantError(f"KV budget overdrawn: {count} blocks requested, {self.free} free")
        self.used += count

    def give(self, count: int) -> None:
        if count > self.used:
            raise InvariantError(f"KV budget: {count} blocks returned, {self.used} in use")
        self.used -= count


class LayerCache(NamedTuple):
    """One layer of a slab, in the three layouts that attention needs."""

    rows: torch.Tensor
    """[2, rows, kv_heads, length, head_dim]: keys, then values."""
    keys: torch.Tensor
    """[rows * kv_heads, head_dim, length]"""
    values: torch.Tensor
    """[rows * kv_heads, length, head_dim]"""

    def first(self, count: int) -> LayerCache:
        """The same views of the first `count` rows."""
        heads = count * self.rows.shape[2]
        return LayerCache(self.rows[:, :count], self.keys[:heads], self.values[:heads])


def _views(data: torch.Tensor) -> list[LayerCache]:
    flat = data.flatten(2, 3)
    return [
        LayerCache(rows, keys.transpose(1, 2), values)
        for rows, (keys, values) in zip(data, flat, strict=True)
    ]


class Slab:
    """Rows of one length. `owners[row]` is the slot whose keys and values the row holds."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.length = length
        self.owners: list[int] = []
        self.active = 0
        shape = (layers, 2, 0, kv_heads, length, head_dim)
        self._data = torch.zeros(shape, device=device, dtype=dtype)
        self._views = _views(self._data)
        self._decoding: list[LayerCache] = []
        """Views of the active rows, created on demand."""

    def _resize(self, capacity: int) -> None:
        layers, two, _, *row = self._data.shape
        data = self._data.new_empty((layers, two, capacity, *row))
        live = len(self.owners)
        data[:, :, :live] = self._data[:, :, :live]
        # Masked values are multiplied by 0, but 0 * NaN is NaN: memory must be initialised.
        data[:, :, live:] = 0
        self._data = data
        self._views = _views(data)
        self._decoding = []

    @property
    def capacity(self) -> int:
        return self._data.shape[2]

    def layer(self, index: int) -> LayerCache:
        """Views of one layer; valid until a row is added or removed."""
        return self._views[index]

    def decoding(self, index: int) -> LayerCache:
        """Views of one layer, decoding rows only."""
        if not self._decoding:
            self._decoding = [view.first(self.active) for view in self._views]
        return self._decoding[index]

    def row(self, row: int, tokens: int) -> torch.Tensor:
        """The first `tokens` keys and values of a row: [layers, 2, kv_heads, tokens, head_dim]."""
        return self._data[:, :, row, :, :tokens]

    def add(self, owner: int) -> int:
        """Append a row to be prefilled; returns its index."""
        if len(self.owners) == self.capacity:
            self._resize(max(MIN_ROWS, 2 * self.capacity))
        self.owners.append(owner)
        return len(self.owners) - 1

    def activate(self, row: int) -> list[tuple[int, int]]:
        """Make a prefilled row decode; returns (slot, new row) of every row that moved."""
        if row < self.active:
            raise InvariantError(f"row {row} is already decoding")
        target = self.active
        self.active += 1
        self._decoding = []
        if row == target:
            return []
        held = self._data[:, :, target].clone()
        self._data[:, :, target] = self._data[:, :, row]
        self._data[:, :, row] = held
        self.owners[target], self.owners[row] = self.owners[row], self.owners[target]
        return [(self.owners[target], target), (self.owners[row], row)]

    def remove(self, row: int) -> list[tuple[int, int]]:
        """Free a row and close the gap; returns (slot, new row) of every row that moved."""
        moved = []
        if row < self.active:
            self.active -= 1
            self._decoding = []
            moved += self._move(self.active, row)
            row = self.active
        moved += self._move(len(self.owners) - 1, row)
        self.owners.pop()
        if not self.owners:
            self._resize(0)
        elif self.capacity > MIN_ROWS and 4 * len(self.owners) <= self.capacity:
            self._resize(self.capacity // 2)
        return moved

    def _move(self, source: int, target: int) -> list[tuple[int, int]]:
        if source == target:
            return []
        self._data[:, :, target] = self._data[:, :, source]
        self.owners[target] = self.owners[source]
        return [(self.owners[target], target)]

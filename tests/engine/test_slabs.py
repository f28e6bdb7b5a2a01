"""Rows keep their contents, and decoding rows stay first, through any sequence of moves."""

from __future__ import annotations

import random

import pytest
import torch

from rstar2.engine.slabs import Blocks, Slab
from rstar2.errors import InvariantError


def make_slab() -> Slab:
    return Slab(
        layers=2,
        kv_heads=2,
        length=4,
        head_dim=2,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("seed", range(8))
def test_rows_survive_random_adds_activations_and_removals(seed: int) -> None:
    rng, slab = random.Random(seed), make_slab()
    where: dict[int, int] = {}
    decoding: set[int] = set()
    for owner in range(150):
        if len(where) < 30 and rng.random() < 0.6:
            where[owner] = slab.add(owner)
            slab.row(where[owner], 4).fill_(owner)
        elif where:
            chosen = rng.choice(sorted(where))
            if chosen not in decoding and rng.random() < 0.6:
                where.update(slab.activate(where[chosen]))
                decoding.add(chosen)
            else:
                where.update(slab.remove(where.pop(chosen)))
                decoding.discard(chosen)
        assert {slab.owners[row]: row for row in range(len(slab.owners))} == where
        assert set(slab.owners[: slab.active]) == decoding
        for holder, row in where.items():
            assert (slab.row(row, 4) == holder).all()
            assert (slab.layer(1).rows[:, row] == holder).all()
    for owner in sorted(where):
        where.update(slab.remove(where.pop(owner)))
    assert slab.capacity == 0


def test_fresh_rows_hold_no_garbage() -> None:
    slab = make_slab()
    for owner in range(9):
        slab.add(owner)
    assert torch.count_nonzero(slab.layer(0).rows) == 0


def test_the_budget_cannot_be_overdrawn() -> None:
    blocks = Blocks(tokens=100, block=32)
    assert blocks.total == 3
    assert [blocks.for_tokens(n) for n in (0, 1, 32, 33)] == [1, 1, 1, 2]
    blocks.take(3)
    with pytest.raises(InvariantError):
        blocks.take(1)
    blocks.give(3)
    with pytest.raises(InvariantError):
        blocks.give(1)

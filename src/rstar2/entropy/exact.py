"""Entropies of stored trajectories, computed again from their ids by the learner's model code:
exact, over the whole vocabulary, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rstar2.entropy.sources import Exact, Values
from rstar2.learner.model import load_policy
from rstar2.learner.pack import input_length, make_pack, make_row, plan
from rstar2.types import Trajectory

TOKENS_PER_PACK = 8192


def exact_entropies(model_dir: Path, device: str = "cpu", budget: int = TOKENS_PER_PACK) -> Exact:
    """A function that gives the entropy of every sampled token under one model."""
    policy = load_policy(model_dir, device)
    policy.eval()

    @torch.inference_mode()
    def compute(trajectories: Sequence[Trajectory]) -> list[Values]:
        rows = [(t.token_ids, t.mask) for t in trajectories]
        found: dict[int, list[float]] = {}
        for (bins,) in plan([input_length(mask) for _, mask in rows], budget):
            pack = make_pack([make_row(i, *rows[i]) for i in bins], device)
            _, entropy_T = policy(pack)
            parts = entropy_T.split([len(row.predict) for row in pack.rows])
            found |= {row.index: part.tolist() for row, part in zip(pack.rows, parts, strict=True)}
        return [_by_turn(found[i], t) for i, t in enumerate(trajectories)]

    return compute


def _by_turn(values: Sequence[float], trajectory: Trajectory) -> Values:
    left = iter(values)
    return [[next(left) for _ in turn.sampled_ids] for turn in trajectory.turns]

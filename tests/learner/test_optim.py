"""Schedules by hand, Muon against the definition."""

from __future__ import annotations

import pytest
import torch

from rstar2.config import OptimizerConfig
from rstar2.learner.optim import lr_factor, orthogonalise


@pytest.mark.parametrize(
    ("step", "warmup", "schedule", "expected"),
    [
        (0, 0, "constant", 1.0),
        (0, 4, "constant", 0.25),
        (3, 4, "constant", 1.0),
        (99, 4, "constant", 1.0),
        (0, 0, "cosine", 1.0),
        (50, 0, "cosine", 0.5),
        (100, 0, "cosine", 0.0),
        (400, 0, "cosine", 0.0),
        (60, 20, "cosine", 0.5),
    ],
)
def test_schedule(step: int, warmup: int, schedule: str, expected: float) -> None:
    config = OptimizerConfig(warmup_steps=warmup, schedule=schedule)
    assert lr_factor(step, config, 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", [(5, 8, 8), (3, 4, 12), (2, 12, 4)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    orthogonal = orthogonalise(matrices)
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.3
    assert values.max() < 1.3
    alone = torch.stack([orthogonalise(m[None])[0] for m in matrices])
    assert torch.allclose(orthogonal, alone, atol=1e-5)

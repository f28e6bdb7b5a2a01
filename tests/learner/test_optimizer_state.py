"""Optimizers of a real learner: which weights they take, their rate, their state."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rstar2.config import OptimizerConfig
from rstar2.errors import InvariantError, RecipeError
from tests.learner.learner_helpers import PROBE, VOCABULARY, make_learner

pytestmark = pytest.mark.slow


def rows(seed: int, count: int = 8) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    rng = random.Random(seed)
    made: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for _ in range(count):
        half = tuple(rng.randrange(3, VOCABULARY) for _ in range(6))
        made.append((half + half, (0,) * 6 + (1,) * 6))
    return made


@pytest.mark.parametrize("matrix_optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(model_dir: Path, matrix_optimizer: str) -> None:
    config = OptimizerConfig(lr=3e-3, matrix_lr=0.02, matrix_optimizer=matrix_optimizer)
    learner = make_learner(model_dir, config)
    before = learner.sft_loss(rows(0))
    losses = [learner.sft_step(rows(0))["loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(before, rel=1e-6)
    assert learner.sft_loss(rows(0)) < 0.8 * before


def test_muon_takes_the_layers_matrices_only(model_dir: Path) -> None:
    learner = make_learner(model_dir, OptimizerConfig(matrix_optimizer="muon"))
    moments = learner._optimizers.state()
    muon = {name.removesuffix(".momentum") for name in moments if name.endswith(".momentum")}
    assert muon == {n for n in learner._named() if "_proj" in n}
    assert "model.embed_tokens.weight.exp_avg" in moments


def test_warmup_sets_the_rate(model_dir: Path) -> None:
    learner = make_learner(model_dir, OptimizerConfig(lr=1e-3, warmup_steps=2))
    assert [learner.sft_step(rows(0))["lr"] for _ in range(3)] == [5e-4, 1e-3, 1e-3]


def test_reset_forgets_and_retune_keeps(model_dir: Path) -> None:
    learner = make_learner(model_dir, OptimizerConfig(lr=1e-3))
    learner.sft_step(rows(0))
    learner.retune(OptimizerConfig(lr=5e-4))
    assert learner._optimizers.steps == 1
    assert learner.sft_step(rows(0))["lr"] == 5e-4
    learner.reset_optimizer()
    assert learner._optimizers.steps == 0
    assert all(not value.any() for value in learner._optimizers.state().values())
    with pytest.raises(RecipeError, match="matrix_optimizer"):
        learner.retune(OptimizerConfig(matrix_optimizer="muon"))


def test_rows_with_nothing_to_predict_are_left_out(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    silent = ((1, 2, 3), (0, 0, 0))
    assert learner.sft_loss([*rows(0), silent]) == pytest.approx(learner.sft_loss(rows(0)))


def test_moments_move_to_another_device_and_back_before_a_step(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    optimizers = learner._optimizers
    learner.offload_optimizer()
    with pytest.raises(InvariantError, match="in host memory"):
        learner.sft_step(PROBE)
    learner.reset_optimizer()
    assert learner._optimizers.away, "a new optimizer stays where the old one was"
    learner.onload_optimizer()
    assert learner.sft_step(PROBE)["updates"] == 1
    optimizers.move(away=True)
    assert optimizers.away
    assert {value.device.type for value in optimizers.state().values()} == {"cpu"}

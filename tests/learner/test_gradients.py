"""One loss, however it is computed: against a slow float64 reference, packed against padded,
split against whole, and blind to everything the mask leaves out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.errors import InvariantError, RecipeError
from rstar2.learner.learner import Learner
from rstar2.types import Batch
from tests.learner.learner_helpers import (
    captured_gradient,
    largest_gap,
    make_learner,
    random_batch,
    reference,
)

FLOAT64 = 1e-6
"""Relative tolerance of float64 gradients: the models take norms and rotations in float32."""
FLOAT32 = 2e-4
"""Relative tolerance of float32 gradients, against the largest entry of each tensor."""

LOSSES = {
    "paper": LossConfig(),
    "no_importance": LossConfig(importance_cap=None),
    "sequence_mask": LossConfig(sequence_mask=(0.9, 1.8)),
    "entropy": LossConfig(entropy=0.05),
    "kl": LossConfig(kl=0.1),
    "gspo": LossConfig(kind="gspo"),
    "gspo_masked": LossConfig(kind="gspo", importance_cap=None, sequence_mask=(0.9, 1.8)),
    "cispo": LossConfig(kind="cispo"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("family", ["model_dir", "qwen_dir"])
def test_matches_the_slow_reference_in_float64(
    name: str, family: str, request: pytest.FixtureRequest
) -> None:
    model_dir: Path = request.getfixturevalue(family)
    batch, loss = random_batch(random.Random(3), 3, 3, 60), LOSSES[name]
    learner = make_learner(model_dir, budget=200)
    learner.policy.double()
    anchor = None
    if loss.kl:
        torch.manual_seed(5)
        anchor = {n: p.detach() + 0.05 * torch.randn_like(p) for n, p in learner._named().items()}
        learner._reference = anchor
    expected_loss, expected = reference(model_dir, batch, loss, anchor)
    gradient = captured_gradient(learner, batch, loss)
    assert largest_gap(gradient, expected) < FLOAT64
    metrics = learner.rl_step(batch, loss, 1)
    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-6)
    assert (0.0 < metrics["mismatch/dropped"] < 1.0) == (loss.sequence_mask is not None)


def test_float32_is_near_the_reference(model_dir: Path, batch: Batch) -> None:
    _, expected = reference(model_dir, batch, LossConfig())
    gradient = captured_gradient(make_learner(model_dir), batch, LossConfig())
    assert largest_gap(gradient, expected) < FLOAT32


def test_packed_equals_padded(model_dir: Path, batch: Batch) -> None:
    """The same logprobs as a right-padded transformers batch with an attention mask."""
    longest = max(len(s.token_ids) for s in batch.samples)
    ids = torch.zeros(len(batch.samples), longest, dtype=torch.long)
    attend = torch.zeros_like(ids)
    for row, sample in enumerate(batch.samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        attend[row, : len(sample.token_ids)] = 1
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
    with torch.no_grad():
        logp = model(input_ids=ids, attention_mask=attend).logits.log_softmax(-1)
    padded = logp[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    logprobs = make_learner(model_dir).logprobs([s.token_ids for s in batch.samples])
    for row, values in enumerate(logprobs):
        assert values == pytest.approx(padded[row, : len(values)].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("budget", "kind"), [(64, "clip"), (300, "clip"), (700, "clip"), (300, "gspo")]
)
def test_accumulation_does_not_change_the_gradient(
    model_dir: Path, batch: Batch, budget: int, kind: str
) -> None:
    whole, split, loss = (
        make_learner(model_dir),
        make_learner(model_dir, budget=budget),
        LossConfig(kind=kind),
    )
    expected = captured_gradient(whole, batch, loss)
    gradient = captured_gradient(split, batch, loss)
    assert largest_gap(gradient, expected) < 1e-5
    assert whole.rl_step(batch, loss, 1)["microbatches"] == 1
    assert split.rl_step(batch, loss, 1)["microbatches"] >= 2


def test_activation_checkpointing_does_not_change_the_gradient(
    model_dir: Path, batch: Batch
) -> None:
    lean = Learner(
        model_dir,
        LearnerConfig(activation_checkpointing=True),
        OptimizerConfig(clip_norm=1e9),
        total_steps=1,
        seed=0,
    )
    expected = captured_gradient(make_learner(model_dir), batch, LossConfig())
    assert largest_gap(captured_gradient(lean, batch, LossConfig()), expected) < 1e-6


def test_bfloat16_is_near_float32_and_exports_as_such(
    model_dir: Path, batch: Batch, tmp_path: Path
) -> None:
    narrow = Learner(
        model_dir,
        LearnerConfig(dtype="bfloat16"),
        OptimizerConfig(lr=1e-3),
        total_steps=1,
        seed=0,
    )
    wide = make_learner(model_dir, OptimizerConfig(lr=1e-3))
    low, high = (each.rl_step(batch, LossConfig(), 1) for each in (narrow, wide))
    assert low["loss"] == pytest.approx(high["loss"], abs=0.05)
    assert low["grad_norm"] == pytest.approx(high["grad_norm"], rel=0.1)
    assert {v.dtype for v in narrow.state().values()} == {torch.float32}, "master weights"
    narrow.export(tmp_path / "m")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").dtype is torch.bfloat16


class TestMasks:
    def test_rollout_logprobs_off_the_mask_change_nothing(
        self, model_dir: Path, batch: Batch
    ) -> None:
        noisy = Batch(
            0,
            tuple(
                replace(
                    s,
                    logprobs=tuple(
                        p if m else -123.0 for p, m in zip(s.logprobs, s.mask, strict=True)
                    ),
                )
                for s in batch.samples
            ),
        )
        loss = LossConfig(sequence_mask=(0.1, 10.0), entropy=0.01)
        clean, dirty = make_learner(model_dir), make_learner(model_dir)
        assert clean.rl_step(batch, loss, 2) == dirty.rl_step(noisy, loss, 2)
        for name, value in clean.state().items():
            assert torch.equal(value, dirty.state()[name]), name

    def test_tokens_after_the_last_sampled_one_change_nothing(self, model_dir: Path) -> None:
        batch = random_batch(random.Random(1), 1, 2)
        longer = Batch(
            0,
            tuple(
                replace(
                    s,
                    token_ids=(*s.token_ids, 5, 6, 7),
                    mask=(*s.mask, 0, 0, 0),
                    logprobs=(*s.logprobs, 0, 0, 0),
                )
                for s in batch.samples
            ),
        )
        one, other = make_learner(model_dir), make_learner(model_dir)
        assert one.rl_step(batch, LossConfig(), 1) == other.rl_step(longer, LossConfig(), 1)

    def test_a_sampled_token_does_change_the_loss(self, model_dir: Path, batch: Batch) -> None:
        first = batch.samples[0]
        at = first.mask.index(1)
        logprobs = (*first.logprobs[:at], first.logprobs[at] - 0.5, *first.logprobs[at + 1 :])
        other = Batch(0, (replace(first, logprobs=logprobs), *batch.samples[1:]))
        one, two = make_learner(model_dir), make_learner(model_dir)
        assert one.rl_step(batch, LossConfig(), 1) != two.rl_step(other, LossConfig(), 1)


class TestMinibatches:
    def test_old_is_the_policy_at_the_start_of_the_batch(
        self, model_dir: Path, batch: Batch
    ) -> None:
        """The second mini-batch sees a ratio other than 1 once the first has moved the weights."""
        learner = make_learner(model_dir, OptimizerConfig(lr=1e-2))
        assert learner.rl_step(batch, LossConfig(), 1)["ratio/max"] == 1.0
        metrics = learner.rl_step(batch, LossConfig(), 2)
        assert metrics["updates"] == 2
        assert metrics["ratio/max"] > 1.0
        assert metrics["ratio/kl"] > 0.0

    def test_zero_learning_rate_keeps_ratio_one_and_weights(
        self, model_dir: Path, batch: Batch
    ) -> None:
        learner = make_learner(model_dir, OptimizerConfig(lr=0.0))
        before = learner.state()
        metrics = learner.rl_step(batch, LossConfig(), 4)
        assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["updates"] == 4
        assert all(torch.equal(v, before[n]) for n, v in learner.state().items())

    def test_mismatch_against_own_logprobs_is_zero(self, model_dir: Path, batch: Batch) -> None:
        learner = make_learner(model_dir)
        scores = learner.logprobs([s.token_ids for s in batch.samples])
        own = Batch(
            0,
            tuple(
                replace(s, logprobs=tuple(x * m for x, m in zip((0.0, *v), s.mask, strict=True)))
                for s, v in zip(batch.samples, scores, strict=True)
            ),
        )
        metrics = learner.rl_step(own, LossConfig(), 1)
        assert metrics["mismatch/abs_max"] < 1e-5
        assert metrics["mismatch/ess"] == pytest.approx(1.0)

    def test_same_seed_same_numbers(self, model_dir: Path, batch: Batch) -> None:
        runs = []
        for _ in range(2):
            learner = make_learner(model_dir, OptimizerConfig(lr=1e-2, matrix_optimizer="muon"))
            runs.append([learner.rl_step(batch, LossConfig(kl=0.01), 2) for _ in range(3)])
        assert runs[0] == runs[1]


class TestRefusals:
    def test_empty_batch(self, model_dir: Path) -> None:
        with pytest.raises(InvariantError, match="no sample to learn from"):
            make_learner(model_dir).rl_step(Batch(4, ()), LossConfig(), 1)

    def test_ranks_without_processes(self, model_dir: Path) -> None:
        with pytest.raises(RecipeError, match=r"learner\.ranks=2"):
            Learner(model_dir, LearnerConfig(ranks=2), OptimizerConfig(), total_steps=1, seed=0)

    def test_gradient_that_is_not_finite_is_skipped_then_named(
        self, model_dir: Path, batch: Batch
    ) -> None:
        learner = make_learner(model_dir)
        before = learner.state()
        broken = Batch(0, (replace(batch.samples[0], advantage=float("nan")), *batch.samples[1:]))
        for _ in range(4):
            assert learner.rl_step(broken, LossConfig(), 1)["updates_skipped"] == 1
        assert all(torch.equal(v, before[n]) for n, v in learner.state().items())
        with pytest.raises(InvariantError, match="not finite"):
            learner.rl_step(broken, LossConfig(), 1)

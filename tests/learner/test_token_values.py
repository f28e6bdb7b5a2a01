"""What the learner leaves of a step for people to look at: every trained token, once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rstar2.config import LossConfig
from tests.learner.learner_helpers import make_learner, random_batch


def test_token_values_are_the_logprobs_of_the_trained_tokens(model_dir: Path) -> None:
    batch = random_batch(random.Random(1), groups=4, members=3, longest=50)
    learner = make_learner(model_dir, budget=150)
    before = learner.logprobs([sample.token_ids for sample in batch.samples])
    learner.rl_step(batch, LossConfig(), 2)
    values = {v.trajectory_id: v for v in learner.token_values()}
    assert len(values) == len(batch.samples)
    moved = 0
    for sample, logprobs in zip(batch.samples, before, strict=True):
        trained = [p for p, marked in zip(logprobs, sample.mask[1:], strict=True) if marked]
        sampled = values[sample.trajectory_id]
        assert sampled.old == pytest.approx(trained, abs=2e-5)
        assert len(sampled.current) == len(trained)
        moved += sampled.current != sampled.old
    assert moved == len(batch.samples) // 2, "only the second mini-batch met updated weights"
    assert learner.token_values() == [], "they are handed out once"

"""SFT on tool-call conversations of the embedded task lowers the held-out loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rstar2.agent.template import Template
from rstar2.config import LearnerConfig, OptimizerConfig, TemplateConfig
from rstar2.learner.learner import Learner
from rstar2.paper_format import REASON_OPEN
from rstar2.problems.arithmetic import sft_conversations


def template_of(model_dir: Path) -> Template:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    return Template(tokenizer, TemplateConfig(), REASON_OPEN)


@pytest.mark.slow
def test_held_out_loss_falls(tiny_dir: Path) -> None:
    template = template_of(tiny_dir)
    rows = [template.conversation_ids(c) for c in sft_conversations(24 * 16, seed=1)]
    held_out = [template.conversation_ids(c) for c in sft_conversations(32, seed=2)]
    learner = Learner(
        tiny_dir,
        LearnerConfig(),
        OptimizerConfig(lr=8e-3, matrix_optimizer="muon", matrix_lr=0.02, warmup_steps=3),
        total_steps=16,
        seed=0,
    )
    before = learner.sft_loss(held_out)
    first = learner.sft_step(rows[:24])
    for step in range(1, 16):
        last = learner.sft_step(rows[24 * step : 24 * (step + 1)])
    after = learner.sft_loss(held_out)
    assert first["loss"] == pytest.approx(before, rel=0.1)
    assert last["loss"] < 0.5 * first["loss"]
    assert after < 0.5 * before


def test_only_assistant_tokens_enter_the_loss(tiny_dir: Path) -> None:
    template = template_of(tiny_dir)
    ids, mask = template.conversation_ids(next(sft_conversations(1, seed=3)))
    learner = Learner(tiny_dir, LearnerConfig(), OptimizerConfig(), total_steps=1, seed=0)
    scores = learner.logprobs([ids])[0]
    trained = [-s for s, m in zip(scores, mask[1:], strict=True) if m]
    assert learner.sft_loss([(ids, mask)]) == pytest.approx(sum(trained) / len(trained), rel=1e-5)
    assert 0 < len(trained) < len(scores)

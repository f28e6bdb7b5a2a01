"""Logits of transformers for the same tokens: the reference for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rstar2.config import LearnerConfig, OptimizerConfig
from rstar2.learner.group import LearnerGroup


class Reference:
    """A model directory in transformers, float32."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([list(ids)])).logits[0].float()
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def logprobs(
        self, prompt: Sequence[int], sampled: Sequence[int], *, temperature: float, top_k: int
    ) -> list[float]:
        """Logprob of each sampled token under the distribution it was drawn from."""
        rows = self.logits([*prompt, *sampled])[len(prompt) - 1 : -1] / temperature
        if top_k:
            least = rows.topk(top_k).values[:, -1:]
            rows = rows.masked_fill(rows < least, -torch.inf)
        tokens = torch.tensor(list(sampled))[:, None]
        return rows.log_softmax(-1).gather(-1, tokens)[:, 0].tolist()


def learner_of(path: Path) -> LearnerGroup:
    """A real learner that holds the weights of a directory."""
    return LearnerGroup(
        path, LearnerConfig(threads=1), OptimizerConfig(), total_steps=1, seed=0, device="cpu"
    )

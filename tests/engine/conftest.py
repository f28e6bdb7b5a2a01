"""Tiny random models of every supported family, with transformers as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # its classes are imported when they are used

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**more: Any) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(SHAPE | {"head_dim": 16} | more))
    )


FAMILIES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: _llama(tie_word_embeddings=True),
    "llama-biases-llama3": lambda: _llama(
        attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False
    ),
    "qwen2-one-kv-head-yarn": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**(SHAPE | {"num_key_value_heads": 1}), rope_parameters=YARN_ROPE)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen3-window": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SHAPE, head_dim=16, use_sliding_window=True, sliding_window=24, max_window_layers=1
        )
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **(SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 1}),
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


@dataclass(frozen=True)
class Reference:
    """A model on disk and in transformers."""

    path: Path
    model: Any

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids) - 1, vocabulary]: transformers' predictions after each token but the last."""
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)

    def check(
        self, prompt: list[int], tokens: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> None:
        """Assert that tokens equal transformers' greedy tokens and logprobs agree within 1e-4."""
        table = self.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
        assert table.argmax(-1).tolist() == list(tokens)
        expected = table.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def make(path: Path, family: str, seed: int) -> Reference:
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    model.eval()
    # Norms and biases start as constants: random values show whether they are applied.
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(path)
    return Reference(path, model)


@pytest.fixture(scope="session", params=list(FAMILIES))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Each family in turn."""
    return make(tmp_path_factory.mktemp(request.param), request.param, seed=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make(tmp_path_factory.mktemp("llama-a"), "llama", seed=1)


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Same shape as `llama`, other weights."""
    return make(tmp_path_factory.mktemp("llama-b"), "llama", seed=2)

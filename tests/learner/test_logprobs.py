"""Chunked logprobs and entropies against plain autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from rstar2.errors import RecipeError
from rstar2.learner.logprobs import PLAIN, HeadScale, token_logprobs
from rstar2.learner.model import load_policy


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: HeadScale
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits / scale.divisor
    if scale.softcap is not None:
        logits = scale.softcap * torch.tanh(logits / scale.softcap)
    logp = (logits / scale.temperature).log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "scale", [PLAIN, HeadScale(2.5, None), HeadScale(0.5, 3.0), HeadScale(2.0, 3.0, 0.7)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients(rows: int, scale: HeadScale, biased: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if biased else None
    target = torch.randint(0, 13, (11,))
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    a, b = torch.randn(2, 11, dtype=torch.float64)

    expected = plain(hidden, weight, bias, target, scale)
    expected_grad = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), inputs)
    ours = token_logprobs(hidden, weight, bias, target, scale, chunk_bytes=rows * 4 * 13)
    our_grad = torch.autograd.grad((a * ours[0] + b * ours[1]).sum(), inputs)
    for mine, theirs in zip((*ours, *our_grad), (*expected, *expected_grad), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_nothing_to_predict_gives_zero_gradients() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(5, 4, requires_grad=True)
    logprob, _ = token_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.long))
    logprob.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_bfloat16_inputs_give_float32_logprobs() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(7, 8)
    target = torch.arange(5)
    narrow, entropy = token_logprobs(hidden.bfloat16(), weight, None, target)
    wide, _ = token_logprobs(hidden, weight, None, target)
    assert narrow.dtype is entropy.dtype is torch.float32
    assert torch.allclose(narrow, wide, atol=0.05)


def test_scaled_heads_are_read_from_the_config_and_unknown_ones_refused(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=4.0)).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, "cpu")
    assert policy.scale.divisor == 4.0
    policy.scale = PLAIN
    from rstar2.learner.model import prove_head

    with pytest.raises(RecipeError, match="computes its logits in a way"):
        prove_head(policy)

"""Logprob and entropy of given tokens from hidden states, without the logits of a whole batch.

The output head is applied to `CHUNK_BYTES` worth of float32 logits at a time, forward and
backward; the backward pass computes them again, unless one chunk held them all. So peak
memory does not depend on the number of tokens.

Dimensions: `_T` predicted tokens, `_D` hidden size, `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Float32 logits held at once."""


@dataclass(frozen=True, slots=True)
class HeadScale:
    """Scaling of logits: x / divisor, softcap * tanh(x / softcap), then x / temperature.

    The first two are part of some models; the temperature is that of the rollouts.
    """

    divisor: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


PLAIN = HeadScale()


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    scale: HeadScale = PLAIN,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) of each target under softmax(head(hidden)), both float32 [T]."""
    rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    return apply(hidden_TD, weight_VD, bias_V, target_T, scale, rows)


def _logits(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, scale: HeadScale
) -> tuple[Tensor, Tensor | None]:
    """Scaled logits in float32 (float64 stays), and d(scaled) / d(raw) where it is not constant."""
    raw_TV = hidden_TD @ weight_VD.to(hidden_TD.dtype).T
    if bias_V is not None:
        raw_TV += bias_V.to(raw_TV.dtype)
    if raw_TV.dtype not in (torch.float32, torch.float64):
        raw_TV = raw_TV.float()
    if scale.divisor != 1.0:
        raw_TV /= scale.divisor
    slope_TV = None
    if scale.softcap is not None:
        tanh_TV = torch.tanh_(raw_TV / scale.softcap)
        raw_TV, slope_TV = tanh_TV * scale.softcap, 1.0 - tanh_TV.square()
    if scale.temperature != 1.0:
        raw_TV /= scale.temperature
    return raw_TV, slope_TV


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        scale: HeadScale,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_TD.shape[0]
        dtype = torch.float64 if hidden_TD.dtype is torch.float64 else torch.float32
        logprob_T = hidden_TD.new_empty(count, dtype=dtype)
        entropy_T = hidden_TD.new_empty(count, dtype=dtype)
        kept: list[Tensor | None] = [None, None]
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logp_TV, slope_TV = _logits(hidden_TD[part], weight_VD, bias_V, scale)
            logp_TV -= logp_TV.logsumexp(1, keepdim=True)
            logprob_T[part] = logp_TV.gather(1, target_T[part, None]).squeeze(1)
            entropy_T[part] = -(logp_TV.exp().mul_(logp_TV)).sum(1)
            if count <= rows:
                kept = [logp_TV, slope_TV]
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, entropy_T, *kept)
        ctx.scale, ctx.rows = scale, rows
        return logprob_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, target_T, entropy_T, *kept = ctx.saved_tensors
        scale: HeadScale = ctx.scale
        dtype = entropy_T.dtype
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=dtype)
        for start in range(0, hidden_TD.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logp_TV, slope_TV = kept
            if logp_TV is None:
                logp_TV, slope_TV = _logits(hidden_TD[part], weight_VD, bias_V, scale)
                logp_TV -= logp_TV.logsumexp(1, keepdim=True)
            grad_TV = _grad_logits(
                logp_TV,
                target_T[part],
                entropy_T[part],
                None if grad_logprob_T is None else grad_logprob_T[part],
                None if grad_entropy_T is None else grad_entropy_T[part],
            )
            if scale.temperature != 1.0:
                grad_TV /= scale.temperature
            if slope_TV is not None:
                grad_TV *= slope_TV
            if scale.divisor != 1.0:
                grad_TV /= scale.divisor
            narrow_TV = grad_TV.to(hidden_TD.dtype)
            grad_hidden_TD[part] = narrow_TV @ weight_VD.to(hidden_TD.dtype)
            if hidden_TD.dtype is dtype:
                grad_weight_VD.addmm_(narrow_TV.T, hidden_TD[part])
            else:
                grad_weight_VD += narrow_TV.T @ hidden_TD[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_TV.sum(0)
        return (
            grad_hidden_TD,
            grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _grad_logits(
    logp_TV: Tensor,
    target_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """d loss / d logits of one chunk: g (onehot - p), and -h p (log p + H) for the entropy."""
    p_TV = logp_TV.exp()
    grad_TV: Tensor | None = None
    if grad_entropy_T is not None:
        grad_TV = p_TV * (logp_TV + entropy_T[:, None])
        grad_TV *= -grad_entropy_T[:, None]
    if grad_logprob_T is not None:
        p_TV *= -grad_logprob_T[:, None]
        p_TV.scatter_add_(1, target_T[:, None], grad_logprob_T[:, None])
        grad_TV = p_TV if grad_TV is None else grad_TV.add_(p_TV)
    return torch.zeros_like(p_TV) if grad_TV is None else grad_TV

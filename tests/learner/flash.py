"""flash-attn's interface and checks on the CPU: transformers' own wrapper runs above it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils

from rstar2.learner import model

Varlen = Callable[..., Tensor]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """Attention over packed sequences; refuses what flash-attn refuses."""
    refuse_like_flash_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)
    assert causal
    assert dropout_p == 0.0
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    parts = []
    for query, key, value in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=True,
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def refuse_like_flash_attention(q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor) -> None:
    """The checks of flash-attn's C++ code on number formats, devices and shapes."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if any(bound.dtype is not torch.int32 for bound in bounds):
        raise RuntimeError("cu_seqlens must have dtype int32")
    if len({tensor.device for tensor in (q, k, v, *bounds)}) != 1:
        raise RuntimeError("all tensors must be on one device")
    if any(tensor.ndim != 3 or tensor.stride(-1) != 1 for tensor in (q, k, v)):
        raise RuntimeError("tensors must be [tokens, heads, dim] with a contiguous last dimension")


def install_flash_attention(
    monkeypatch: pytest.MonkeyPatch, varlen: Varlen = flash_attn_varlen_func
) -> None:
    """Let transformers find a flash-attn package whose kernel is `varlen`."""
    utils = modeling_flash_attention_utils
    functions = (None, varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, **kwargs: True)
    monkeypatch.setattr(model, "is_flash_attn_2_available", lambda: True)

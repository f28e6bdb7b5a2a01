"""Requests on their way through the engine, and what is refused at the door."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rstar2.engine.slots import Ids
from rstar2.errors import UserError
from rstar2.types import Finish, Sampling, VersionSpan


@dataclass(slots=True)
class Request:
    """One generate call on its way through the engine."""

    id: int
    prompt: Ids
    sampling: Sampling
    session: str
    arrived: float
    keep: bool = True
    """Park the KV when it ends; cleared by a release that overtook the request."""
    started: float | None = None
    preempted_at: float | None = None
    preempted_s: float = 0.0
    """How long it waited after losing its KV to another request."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    stream: bool = False
    streamed: int = 0
    """Sampled tokens handed out by `fresh_tokens`."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The KV of an ended turn: [layers, 2, kv_heads, len(tokens), head_dim]."""

    tokens: Ids
    kv: torch.Tensor
    blocks: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that left; `error` is set when it could not be served."""

    request: Request
    finish: Finish
    error: str | None = None


def check(request: Request, vocabulary: int, max_length: int, room: int) -> None:
    """Raise UserError for a request that can never be served; `room` is the KV cache in tokens."""
    sampling, count = request.sampling, len(request.prompt)
    if not count:
        raise UserError("prompt_ids: empty; an engine continues at least one token")
    if sampling.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {sampling.max_new_tokens}; must be at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise UserError(
            f"sampling: temperature {sampling.temperature}, top_p {sampling.top_p}, "
            f"top_k {sampling.top_k}; need temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    if request.prompt.min() < 0 or request.prompt.max() >= vocabulary:
        raise UserError(f"prompt_ids: ids outside the vocabulary of {vocabulary}")
    longest = min(max_length, room)
    if count + sampling.max_new_tokens > longest:
        raise UserError(
            f"prompt of {count} + max_new_tokens {sampling.max_new_tokens} exceeds {longest} "
            f"tokens (max_length {max_length}, KV for {room}); "
            "ask for less or give the engine more"
        )

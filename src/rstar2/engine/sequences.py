"""Requests of the embedded engine, slots of running sequences, and prompt sharing.

Running sequences are arrays over slots, so that a step updates all of them at once. `known` counts
the tokens of a sequence (prompt and sampled), `computed` those whose KV is cached. While a sequence
decodes, known is computed + 1: its last token is the next to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rstar2.engine.sampling import Draw, RowSampling, uniforms
from rstar2.errors import UserError
from rstar2.types import Finish, Sampling, VersionSpan

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class EngineRequest:
    """One generate call inside the engine."""

    id: int
    prompt: Ids
    sampling: Sampling
    session: str
    arrived: float
    keep: bool = True
    """Park the KV when it ends; cleared if the session is released before that."""
    started: float | None = None
    preempted_at: float | None = None
    preempted_s: float = 0.0
    """Seconds it waited in the queue after preemptions."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    stream: bool = False
    streamed: int = 0
    """Sampled tokens handed out by `fresh_tokens`."""


@dataclass(frozen=True, slots=True)
class ParkedPrefix:
    """The KV of an ended turn: [layers, 2, kv_heads, len(tokens), head_dim]."""

    tokens: Ids
    kv: torch.Tensor
    blocks: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that left the engine; `error` is set if it could not be served."""

    request: EngineRequest
    finish: Finish
    error: str | None = None


def check_request(request: EngineRequest, vocabulary: int, max_length: int, room: int) -> None:
    """Raise UserError for a request that can never be served; `room` is the KV cache in tokens."""
    sampling, count = request.sampling, len(request.prompt)
    if not count:
        raise UserError("prompt_ids: empty; at least one token is required")
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
            "shorten the request or raise the engine's limits"
        )


class Slots:
    """Arrays with one entry per slot; the entries of a free slot are undefined."""

    def __init__(self, count: int, max_length: int) -> None:
        self.tokens = np.zeros((count, max_length), dtype=np.int64)
        self.logprobs = np.zeros((count, max_length), dtype=np.float32)
        self.entropies = np.zeros((count, max_length), dtype=np.float32)
        self.known = np.zeros(count, dtype=np.int64)
        self.computed = np.zeros(count, dtype=np.int64)
        self.first = np.zeros(count, dtype=np.int64)  # tokens known when the slot was taken
        self.row = np.zeros(count, dtype=np.int64)  # in the slab of its size
        self.size = np.zeros(count, dtype=np.int64)  # blocks of that row
        self._end = np.zeros(count, dtype=np.int64)  # length at which the request is complete
        self._temperature = np.ones(count, dtype=np.float32)
        self._top_p = np.ones(count, dtype=np.float32)
        self._top_k = np.zeros(count, dtype=np.int64)
        self._seed = np.zeros(count, dtype=np.uint64)
        self._stops = np.full((count, 1), -1, dtype=np.int64)

    def begin(self, slot: int, tokens: Ids, end: int, sampling: Sampling) -> None:
        """Set up a slot for a sequence that starts with `tokens` and may grow to length `end`."""
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = self.first[slot] = len(tokens)
        self.computed[slot] = 0
        self._end[slot] = end
        self._temperature[slot] = sampling.temperature
        self._top_p[slot], self._top_k[slot] = sampling.top_p, sampling.top_k
        self._seed[slot] = np.uint64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
        stops = sampling.stop_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self.known), len(stops)), -1, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def policy(self, slots: Ids) -> RowSampling:
        return RowSampling(self._temperature[slots], self._top_p[slots], self._top_k[slots])

    def noise(self, slots: Ids) -> npt.NDArray[np.float64]:
        """One uniform random number per slot, for the position it samples next."""
        return uniforms(self._seed[slots], self.known[slots])

    def book(self, slots: Ids, draw: Draw) -> tuple[Flags, Flags]:
        """Append one token per slot; returns which are complete, and which hit a stop id."""
        known = self.known[slots]
        self.tokens[slots, known] = draw.tokens
        self.logprobs[slots, known] = draw.logprobs
        self.entropies[slots, known] = draw.entropies
        self.known[slots] = known + 1
        stopped = (self._stops[slots] == draw.tokens[:, None]).any(1)
        return stopped | (known + 1 >= self._end[slots]), stopped

    def sampled(self, slot: int) -> slice:
        """Positions of the tokens sampled since the slot was taken."""
        return slice(int(self.first[slot]), int(self.known[slot]))


class PromptSharing:
    """Equal prompts are computed once: the rollouts of a group start from one prefill.

    A new request copies the keys, values and last hidden state of a running request with the same
    prompt instead of computing them. The copy must be bit-identical to its own result, so only
    requests without a cached prefix take part.
    """

    def __init__(self) -> None:
        self._holder: dict[bytes, int] = {}  # prompt -> slot that computes it or has it
        self._prompt: dict[int, bytes] = {}  # slot without a cached prefix -> its prompt
        self._source: dict[int, int] = {}  # slot that waits for a copy -> slot it copies from

    def join(self, slot: int, prompt: Ids) -> None:
        """Register a new request: it copies from the holder of its prompt, or becomes one."""
        key = prompt.tobytes()
        self._prompt[slot] = key
        if key in self._holder:
            self._source[slot] = self._holder[key]
        else:
            self._holder[key] = slot

    def source(self, slot: int) -> int | None:
        """The slot to copy from; None if this slot computes its own prompt."""
        return self._source.get(slot)

    def copied(self, slot: int) -> None:
        """Record that the slot has its copy."""
        del self._source[slot]

    def leave(self, slot: int) -> None:
        """Remove a freed slot; the oldest other slot with its prompt becomes the holder."""
        key = self._prompt.pop(slot, None)
        self._source.pop(slot, None)
        if key is None or self._holder[key] != slot:
            return
        del self._holder[key]
        others = [other for other, prompt in self._prompt.items() if prompt == key]
        if others:
            holder = self._holder[key] = others[0]
            # Slots wait only while no slot has the prompt, so the new holder was waiting too.
            self._source.pop(holder, None)
            self._source |= {other: holder for other in others if other in self._source}

"""Continuous batching: which sequences run, where their KV is, and one step of all of them.

A request waits (FIFO) until there is a slot and room for its prompt, is prefilled in chunks next
to the tokens of the others, decodes one token a step, and leaves; its KV is then parked under its
session until the session's next prompt extends it, the session is released, or room is needed
(least recently used first). A running request that finds no room for its next block, after all
parked prefixes are gone, sends the youngest running one back to the head of the queue: its KV is
dropped, its tokens are kept and prefilled again (a preemption; counted).

Invariants:
- Blocks in use (rows and parked prefixes) never exceed the budget (`Blocks` raises otherwise).
- A token is never sampled twice: preemption and weight updates keep what was sampled.
- No KV outlives the weights it was computed with: an update drops everything parked, and running
  requests are prefilled again under the new weights; each token keeps its own version.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rstar2.engine.decoder import Decoder, DecodeSegment, PrefillSegment, Segment
from rstar2.engine.sampling import Policy, sample, uniforms
from rstar2.engine.slabs import Blocks, Slab
from rstar2.errors import UserError
from rstar2.types import EngineLoad, Finish, Sampling, VersionSpan

PREFILL_TOKENS = 1024
"""Prompt tokens computed in one step at most, so that decoding goes on beside long prompts."""

Ids = npt.NDArray[np.int64]


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


class Batcher:
    """All state of one engine, driven by `step`."""

    def __init__(
        self, decoder: Decoder, *, kv_tokens: int, max_sequences: int, max_length: int, version: int
    ) -> None:
        self.decoder = decoder
        self.max_length = max_length
        self.max_sequences = max_sequences
        self.version = version
        self.preemptions = 0
        self.blocks = Blocks(kv_tokens, block_tokens(max_length))
        if self.blocks.total < 1:
            raise UserError(f"kv_tokens: {kv_tokens} is less than a block of {self.blocks.block}")
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # slot -> request, oldest first
        self._filling: deque[int] = deque()  # slots whose prompt is not yet computed
        self._parked: OrderedDict[str, Parked] = OrderedDict()
        self._slabs: dict[int, Slab] = {}
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        device, dtype = decoder.device, decoder.dtype
        self._columns = torch.arange(max(max_length, max_sequences), device=device)
        self._masked = torch.tensor(-torch.inf, device=device, dtype=dtype)
        self._seen = torch.tensor(0.0, device=device, dtype=dtype)
        n = max_sequences
        self._tokens = np.zeros((n, max_length), dtype=np.int64)
        self._logprobs = np.zeros((n, max_length), dtype=np.float32)
        self._entropies = np.zeros((n, max_length), dtype=np.float32)
        self._known = np.zeros(n, dtype=np.int64)  # tokens of the sequence, sampled ones included
        self._computed = np.zeros(n, dtype=np.int64)  # tokens whose KV is in the cache
        self._first = np.zeros(n, dtype=np.int64)  # tokens known when the slot was taken
        self._end = np.zeros(n, dtype=np.int64)  # length at which the request is complete
        self._temperature = np.ones(n, dtype=np.float32)
        self._top_p = np.ones(n, dtype=np.float32)
        self._top_k = np.zeros(n, dtype=np.int64)
        self._seed = np.zeros(n, dtype=np.uint64)
        self._stops = np.full((n, 1), -1, dtype=np.int64)
        self._row = np.zeros(n, dtype=np.int64)
        self._size = np.zeros(n, dtype=np.int64)  # blocks of the slot's row

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse one that could never be served."""
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
        vocabulary = self.decoder.shape.vocabulary
        if request.prompt.min() < 0 or request.prompt.max() >= vocabulary:
            raise UserError(f"prompt_ids: ids outside the vocabulary of {vocabulary}")
        longest = min(self.max_length, self.blocks.total * self.blocks.block)
        if count + sampling.max_new_tokens > longest:
            raise UserError(
                f"prompt of {count} + max_new_tokens {sampling.max_new_tokens} exceeds {longest} "
                f"tokens (max_length {self.max_length}, KV for "
                f"{self.blocks.total * self.blocks.block}); ask for less or give the engine more"
            )
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its KV; False when it has ended already."""
        for slot, request in self._running.items():
            if request.id == request_id:
                self._leave(slot, park=False)
                return True
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def release(self, session: str) -> None:
        """Drop what is parked for a session, and do not park what still runs for it."""
        self._unpark(session)
        for request in (*self._running.values(), *self._waiting):
            if request.session == session:
                request.keep = False

    @torch.inference_mode()
    def install(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights between steps; running requests start over from their tokens."""
        self.decoder.install(state)
        for slot in reversed(list(self._running)):
            self._requeue(slot)
        for session in list(self._parked):
            self._unpark(session)
        self._slabs.clear()
        self.version = version

    def load(self) -> EngineLoad:
        return EngineLoad(
            kv_used=self.blocks.used * self.blocks.block,
            running=len(self._running),
            waiting=len(self._waiting),
            preemptions=self.preemptions,
            version=self.version,
        )

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """Admit, compute one token for every running sequence, and let the finished leave."""
        self._make_room_to_decode()
        self._admit()
        plan = self._plan()
        if plan is None:
            return []
        hidden = self.decoder.forward(plan.ids, plan.positions, plan.segments)
        if plan.last is not None:
            hidden = hidden[plan.last]
        return self._advance(plan, self.decoder.logits(hidden) if len(plan.slots) else None)

    def _plan(self) -> _Plan | None:
        """Lay out the tokens of this step: all decoding rows, then chunks of prompts."""
        device = self.decoder.device
        slots: list[int] = []
        segments: list[Segment] = []
        for size in sorted(self._slabs):
            slab = self._slabs[size]
            if slab.active:
                segments.append(self._decode_segment(slab, len(slots)))
                slots += slab.owners[: slab.active]
        order = np.array(slots, dtype=np.int64)
        positions = self._computed[order]
        ids = [self._tokens[order, positions]]
        spots = [positions]
        first, last = len(slots), list(range(len(slots)))
        chunks: list[tuple[int, int]] = []
        room = PREFILL_TOKENS
        for slot in self._filling:
            start = int(self._computed[slot])
            # Whole chunks only: where a prompt is cut must not depend on who came before it.
            count = min(PREFILL_TOKENS, int(self._known[slot]) - start)
            if count > room:
                break
            slab = self._slabs[int(self._size[slot])]
            segments.append(PrefillSegment(slab, first, int(self._row[slot]), start, count))
            ids.append(self._tokens[slot, start : start + count])
            spots.append(np.arange(start, start + count))
            chunks.append((slot, count))
            first += count
            room -= count
            if start + count == self._known[slot]:
                slots.append(slot)
                last.append(first - 1)
        if not segments:
            return None
        return _Plan(
            ids=torch.from_numpy(np.concatenate(ids)).to(device),
            positions=torch.from_numpy(np.concatenate(spots)).to(device),
            segments=segments,
            slots=np.array(slots, dtype=np.int64),
            decoding=len(order),
            chunks=chunks,
            last=torch.tensor(last, dtype=torch.long, device=device) if chunks else None,
        )

    def _decode_segment(self, slab: Slab, first: int) -> DecodeSegment:
        device = self.decoder.device
        lengths = self._computed[slab.owners[: slab.active]]
        reach = slab.length  # not the longest row's: a sum's order must not depend on neighbours
        per_head = torch.from_numpy(np.repeat(lengths, self.decoder.shape.kv_heads)).to(device)
        hidden = self._columns[:reach] > per_head[:, None, None]
        return DecodeSegment(
            slab=slab,
            first=first,
            rows=self._columns[: slab.active],
            positions=torch.from_numpy(lengths).to(device),
            mask=torch.where(hidden, self._masked, self._seen),
        )

    def _advance(self, plan: _Plan, logits: torch.Tensor | None) -> list[Ended]:
        """Book what was computed, sample, and return those that ended."""
        self._computed[plan.slots[: plan.decoding]] += 1
        for slot, count in plan.chunks:
            self._computed[slot] += count
        if logits is None:
            return []
        for slot in plan.slots[plan.decoding :].tolist():
            self._filling.popleft()
            self._moved(self._slab_of(slot).activate(int(self._row[slot])))
        slots = plan.slots
        known = self._known[slots]
        draw = sample(
            logits,
            Policy(self._temperature[slots], self._top_p[slots], self._top_k[slots]),
            uniforms(self._seed[slots], known),
        )
        self._tokens[slots, known] = draw.tokens
        self._logprobs[slots, known] = draw.logprobs
        self._entropies[slots, known] = draw.entropies
        self._known[slots] += 1
        broken = ~np.isfinite(draw.logprobs)
        stopped = (self._stops[slots] == draw.tokens[:, None]).any(1)
        ended = stopped | broken | (self._known[slots] >= self._end[slots])
        out = []
        for i in np.flatnonzero(ended).tolist():
            slot = int(slots[i])
            request = self._leave(slot, park=not broken[i])
            error = "the model's logits are not finite" if broken[i] else None
            out.append(Ended(request, Finish.STOP if stopped[i] else Finish.LENGTH, error))
        return out

    def fresh_tokens(self) -> Iterator[tuple[Request, list[int]]]:
        """Tokens sampled since the last call, of running requests that are streamed."""
        for slot, request in self._running.items():
            if not request.stream:
                continue
            done = len(request.tokens)
            first, known = int(self._first[slot]), int(self._known[slot])
            fresh = self._tokens[slot, first + request.streamed - done : known].tolist()
            request.streamed += len(fresh)
            if fresh:
                yield request, fresh

    # ------------------------------------------------------------------ room

    def _evict(self, needed: int) -> bool:
        """Free parked prefixes, least recently used first, until `needed` blocks are free."""
        while self.blocks.free < needed and self._parked:
            self._unpark(next(iter(self._parked)))
        return self.blocks.free >= needed

    def _unpark(self, session: str) -> Parked | None:
        """Take a parked prefix out of the cache, if there is one."""
        parked = self._parked.pop(session, None)
        if parked is not None:
            self.blocks.give(parked.blocks)
        return parked

    def _make_room_to_decode(self) -> None:
        """Give every decoding row a place for its next token, preempting the youngest if none."""
        for size in sorted(self._slabs, reverse=True):
            slab = self._slabs[size]
            owners = np.array(slab.owners[: slab.active], dtype=np.int64)
            for slot in owners[self._computed[owners] >= slab.length].tolist():
                while slot in self._running and not self._evict(1):
                    self.preemptions += 1
                    self._requeue(next(reversed(self._running)))
                if slot in self._running:
                    self._grow(slot)

    def _grow(self, slot: int) -> None:
        """Move a full row to the next larger slab."""
        old, row, count = self._slab_of(slot), int(self._row[slot]), int(self._computed[slot])
        self.blocks.take(1)
        self._size[slot] += 1
        new = self._slab(int(self._size[slot]))
        target = new.add(slot)
        new.row(target, count).copy_(old.row(row, count))
        self._moved(old.remove(row))
        self._row[slot] = target
        self._moved(new.activate(target))

    def _admit(self) -> None:
        """Start waiting requests, in order, while there are slots and room."""
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            known = len(request.prompt) + len(request.tokens)
            # The last token of a request is sampled but never computed.
            longest = len(request.prompt) + request.sampling.max_new_tokens - 1
            size = self.blocks.for_tokens(min(known + 1, longest))
            if self.blocks.free + sum(p.blocks for p in self._parked.values()) < size:
                return
            parked = self._unpark(request.session)
            self._evict(size)
            self._waiting.popleft()
            self._start(request, size, parked)

    def _start(self, request: Request, size: int, parked: Parked | None) -> None:
        slot = self._free_slots.pop()
        sampling = request.sampling
        tokens = np.concatenate((request.prompt, np.array(request.tokens, dtype=np.int64)))
        known = len(tokens)
        self._running[slot] = request
        self.blocks.take(size)
        self._size[slot] = size
        slab = self._slab(size)
        self._row[slot] = slab.add(slot)
        self._tokens[slot, :known] = tokens
        self._known[slot] = self._first[slot] = known
        self._end[slot] = len(request.prompt) + sampling.max_new_tokens
        self._temperature[slot] = sampling.temperature
        self._top_p[slot], self._top_k[slot] = sampling.top_p, sampling.top_k
        self._seed[slot] = np.uint64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._set_stops(slot, sampling.stop_ids)
        cached = 0
        if parked is not None:
            cached = _common_prefix(parked.tokens, tokens[:-1])
            slab.row(int(self._row[slot]), cached).copy_(parked.kv[:, :, :, :cached])
        self._computed[slot] = cached
        if request.started is None:
            request.started = time.monotonic()
            request.cached = cached
        self._filling.append(slot)

    def _set_stops(self, slot: int, stops: tuple[int, ...]) -> None:
        if len(stops) > self._stops.shape[1]:
            wider = np.full((self.max_sequences, len(stops)), -1, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def _leave(self, slot: int, *, park: bool) -> Request:
        """Free a slot; its KV is parked for its session, or dropped."""
        request = self._running.pop(slot)
        self._collect(slot, request)
        if slot in self._filling:
            self._filling.remove(slot)
        slab, row, count = self._slab_of(slot), int(self._row[slot]), int(self._computed[slot])
        self.blocks.give(int(self._size[slot]))
        if park and request.keep and request.session:
            self._unpark(request.session)
            kv = slab.row(row, count).clone(memory_format=torch.contiguous_format)
            blocks = self.blocks.for_tokens(count)
            self.blocks.take(blocks)
            self._parked[request.session] = Parked(self._tokens[slot, :count].copy(), kv, blocks)
        self._moved(slab.remove(row))
        self._free_slots.append(slot)
        return request

    def _requeue(self, slot: int) -> None:
        """Send a running request back to the head of the queue, with what it has sampled."""
        self._waiting.appendleft(self._leave(slot, park=False))

    def _collect(self, slot: int, request: Request) -> None:
        """Copy what was sampled in this slot to the request."""
        sampled = slice(int(self._first[slot]), int(self._known[slot]))
        count = sampled.stop - sampled.start
        if count:
            request.tokens += self._tokens[slot, sampled].tolist()
            request.logprobs += self._logprobs[slot, sampled].tolist()
            request.entropies += self._entropies[slot, sampled].tolist()
            request.versions.append((self.version, count))

    def _slab_of(self, slot: int) -> Slab:
        return self._slabs[int(self._size[slot])]

    def _slab(self, size: int) -> Slab:
        slab = self._slabs.get(size)
        if slab is None:
            shape = self.decoder.shape
            slab = self._slabs[size] = Slab(
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                length=size * self.blocks.block,
                head_dim=shape.head_dim,
                device=self.decoder.device,
                dtype=self.decoder.dtype,
            )
        return slab

    def _moved(self, moves: list[tuple[int, int]]) -> None:
        for slot, row in moves:
            self._row[slot] = row

    # ------------------------------------------------------------------ probe

    @torch.inference_mode()
    def score(self, ids: Ids) -> list[float]:
        """Logprob of each token after the first, in a row of its own outside the budget."""
        if not 0 < len(ids) <= self.max_length:
            raise UserError(f"token_ids: {len(ids)} tokens; 1 to {self.max_length} can be scored")
        if ids.min() < 0 or ids.max() >= self.decoder.shape.vocabulary:
            raise UserError("token_ids: ids outside the vocabulary")
        shape, device = self.decoder.shape, self.decoder.device
        slab = Slab(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            length=len(ids),
            head_dim=shape.head_dim,
            device=device,
            dtype=self.decoder.dtype,
        )
        row = slab.add(0)
        tokens = torch.from_numpy(ids).to(device)
        out: list[float] = []
        for start in range(0, len(ids) - 1, PREFILL_TOKENS):
            count = min(PREFILL_TOKENS, len(ids) - 1 - start)
            chunk = slice(start, start + count)
            segment = PrefillSegment(slab, 0, row, start, count)
            positions = torch.arange(start, start + count, device=device)
            hidden = self.decoder.forward(tokens[chunk], positions, [segment])
            logp = torch.log_softmax(self.decoder.logits(hidden).float(), dim=-1)
            picked = logp.gather(-1, tokens[start + 1 : start + count + 1, None])
            out += picked.squeeze(-1).tolist()
        return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """The tokens of one step."""

    ids: torch.Tensor
    positions: torch.Tensor
    segments: list[Segment]
    slots: Ids
    """Slots that sample: the decoding ones first, then those whose prompt is now complete."""
    decoding: int
    chunks: list[tuple[int, int]]
    last: torch.Tensor | None
    """Rows of the hidden states to sample from; None where that is all of them."""


def block_tokens(max_length: int) -> int:
    """Block size for a maximal length: about 16 slabs, blocks of 32 to 256 tokens."""
    return min(256, max(32, -(-max_length // 16 // 32) * 32))


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n

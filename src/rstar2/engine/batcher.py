"""Continuous batching: admission, KV allocation and one step of all running sequences.

A request waits in a FIFO queue until there is a slot and KV for its prompt. It is prefilled in
chunks, batched with the tokens of other requests, then decodes one token per step until it ends.
Its KV is parked under its session until the session's next prompt extends it, the session is
released, or the blocks are needed (least recently used first). New requests with equal prompts
share one prefill.

When a running request needs a block and none is free, even after all parked prefixes are evicted,
the youngest running request is preempted: it returns to the head of the queue, its KV is dropped,
and its tokens are kept and prefilled again.

Invariants:
- Blocks in use (rows and parked prefixes) never exceed the budget (`Blocks` raises otherwise).
- A token is never sampled twice: preemption and weight updates keep sampled tokens.
- No KV outlives the weights it was computed with: an update drops everything parked, and running
  requests are prefilled again under the new weights; each token keeps its own version.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rstar2.engine.decoder import Decoder, DecodeSegment, PrefillSegment, Segment, score
from rstar2.engine.sampling import sample
from rstar2.engine.sequences import (
    EndedRequest,
    EngineRequest,
    Ids,
    ParkedPrefix,
    PromptSharing,
    Slots,
    check_request,
)
from rstar2.engine.slabs import Blocks, Slab
from rstar2.errors import UserError
from rstar2.types import EngineLoad, Finish

PREFILL_TOKENS = 1024
"""Maximum prompt tokens per step, so that long prompts do not stall decoding."""


class Batcher:
    """The state of one engine, advanced by `step`."""

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
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, EngineRequest] = {}  # slot -> request, oldest first
        self._filling: dict[int, None] = {}  # slots whose prompt is not yet computed, in order
        self._parked: OrderedDict[str, ParkedPrefix] = OrderedDict()
        self._slabs: dict[int, Slab] = {}
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        device, dtype = decoder.device, decoder.dtype
        self._columns = torch.arange(max(max_length, max_sequences), device=device)
        self._masked = torch.tensor(-torch.inf, device=device, dtype=dtype)
        self._seen = torch.tensor(0.0, device=device, dtype=dtype)
        self._slots = Slots(max_sequences, max_length)
        self._sharing = PromptSharing()
        hidden = (max_sequences, decoder.shape.hidden)
        self._prompt_end = torch.zeros(hidden, device=device, dtype=dtype)  # last hidden states

    # ------------------------------------------------------------------ requests

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; UserError if it could never be served."""
        room = self.blocks.total * self.blocks.block
        check_request(request, self.decoder.shape.vocabulary, self.max_length, room)
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request_id: int) -> bool:
        """Drop a request and free its KV; False if it has already ended."""
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
        """Drop the parked KV of a session; its running requests are not parked when they end."""
        self._unpark(session)
        for request in (*self._running.values(), *self._waiting):
            if request.session == session:
                request.keep = False

    @torch.inference_mode()
    def install(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Install new weights between steps; running requests are prefilled again."""
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

    def score(self, ids: Ids) -> list[float]:
        """Logprob of each token after the first at temperature 1; verifies an update."""
        if not 0 < len(ids) <= self.max_length:
            raise UserError(f"token_ids: {len(ids)} tokens; 1 to {self.max_length} can be scored")
        if ids.min() < 0 or ids.max() >= self.decoder.shape.vocabulary:
            raise UserError("token_ids: ids outside the vocabulary")
        return score(self.decoder, ids, PREFILL_TOKENS)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[EndedRequest]:
        """Admit requests, compute one token per running sequence, and return those that ended."""
        self._make_room_to_decode()
        self._admit()
        plan = self._plan()
        if plan is None:
            return []
        hidden = self.decoder.forward(plan.ids, plan.positions, plan.segments)
        if plan.last is not None:
            hidden = hidden[plan.last]
        self._slots.computed[plan.slots[: plan.decoding]] += 1
        for slot, count in plan.chunks:
            self._slots.computed[slot] += count
        slots, hidden = self._begin_decoding(plan, hidden)
        return self._sample(slots, hidden) if len(slots) else []

    def _plan(self) -> _StepPlan | None:
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
        positions = self._slots.computed[order]
        ids = [self._slots.tokens[order, positions]]
        position_parts = [positions]
        first, last = len(slots), list(range(len(slots)))
        chunks: list[tuple[int, int]] = []
        room = PREFILL_TOKENS
        for slot in self._filling:
            if self._sharing.source(slot) is not None:
                continue
            start = int(self._slots.computed[slot])
            # Whole chunks only: chunk boundaries must not depend on other requests.
            count = min(PREFILL_TOKENS, int(self._slots.known[slot]) - start)
            if count > room:
                break
            segments.append(
                PrefillSegment(self._slab_of(slot), first, int(self._slots.row[slot]), start, count)
            )
            ids.append(self._slots.tokens[slot, start : start + count])
            position_parts.append(np.arange(start, start + count))
            chunks.append((slot, count))
            first += count
            room -= count
            if start + count == self._slots.known[slot]:
                slots.append(slot)
                last.append(first - 1)
        if not segments:
            return None
        return _StepPlan(
            ids=torch.from_numpy(np.concatenate(ids)).to(device),
            positions=torch.from_numpy(np.concatenate(position_parts)).to(device),
            segments=segments,
            slots=np.array(slots, dtype=np.int64),
            decoding=len(order),
            chunks=chunks,
            last=torch.tensor(last, dtype=torch.long, device=device) if chunks else None,
        )

    def _decode_segment(self, slab: Slab, first: int) -> DecodeSegment:
        device = self.decoder.device
        lengths = self._slots.computed[slab.owners[: slab.active]]
        reach = slab.length  # not the longest row's: other rows must not change the order of sums
        per_head = torch.from_numpy(np.repeat(lengths, self.decoder.shape.kv_heads)).to(device)
        last = per_head[:, None, None]
        hidden = self._columns[:reach] > last
        mask = window_mask = torch.where(hidden, self._masked, self._seen)
        window = self.decoder.window
        if window is not None and reach > window:
            window_mask = mask.masked_fill(self._columns[:reach] <= last - window, -torch.inf)
        return DecodeSegment(
            slab=slab,
            first=first,
            rows=self._columns[: slab.active],
            positions=torch.from_numpy(lengths).to(device),
            mask=mask,
            window_mask=window_mask,
        )

    def _begin_decoding(self, plan: _StepPlan, hidden: torch.Tensor) -> tuple[Ids, torch.Tensor]:
        """Start decoding complete prompts and the requests that wait for a copy of one.

        Returns all slots that sample in this step, with their hidden states.
        """
        complete = plan.slots[plan.decoding :].tolist()
        if not complete and not self._filling:
            return plan.slots, hidden
        for i, slot in enumerate(complete):
            del self._filling[slot]
            self._prompt_end[slot] = hidden[plan.decoding + i]
        copies = []
        for slot in list(self._filling):
            source = self._sharing.source(slot)
            if source is None or source in self._filling:
                continue
            count = int(self._slots.known[slot])
            self._row_of(slot, count).copy_(self._row_of(source, count))
            self._prompt_end[slot] = self._prompt_end[source]
            self._slots.computed[slot] = self._running[slot].cached = count
            self._sharing.copied(slot)
            del self._filling[slot]
            copies.append(slot)
        for slot in complete + copies:
            self._moved(self._slab_of(slot).activate(int(self._slots.row[slot])))
        if copies:
            hidden = torch.cat((hidden, self._prompt_end[copies]))
        return np.concatenate((plan.slots, np.array(copies, dtype=np.int64))), hidden

    def _sample(self, slots: Ids, hidden: torch.Tensor) -> list[EndedRequest]:
        """Sample one token per slot; returns the requests that ended with it."""
        draw = sample(
            self.decoder.logits(hidden), self._slots.policy(slots), self._slots.noise(slots)
        )
        complete, stopped = self._slots.book(slots, draw)
        broken = ~np.isfinite(draw.logprobs)
        out = []
        for i in np.flatnonzero(complete | broken).tolist():
            request = self._leave(int(slots[i]), park=not broken[i])
            error = "the model's logits are not finite" if broken[i] else None
            out.append(EndedRequest(request, Finish.STOP if stopped[i] else Finish.LENGTH, error))
        return out

    def fresh_tokens(self) -> Iterator[tuple[EngineRequest, list[int]]]:
        """Tokens of running, streamed requests that were sampled since the last call."""
        for slot, request in self._running.items():
            if not request.stream:
                continue
            done = len(request.tokens)
            first, known = int(self._slots.first[slot]), int(self._slots.known[slot])
            fresh = self._slots.tokens[slot, first + request.streamed - done : known].tolist()
            request.streamed += len(fresh)
            if fresh:
                yield request, fresh

    # ------------------------------------------------------------------ KV blocks

    def _evict(self, needed: int) -> bool:
        """Free parked prefixes, least recently used first, until `needed` blocks are free."""
        while self.blocks.free < needed and self._parked:
            self._unpark(next(iter(self._parked)))
        return self.blocks.free >= needed

    def _unpark(self, session: str) -> ParkedPrefix | None:
        """Take a parked prefix out of the cache, if there is one."""
        parked = self._parked.pop(session, None)
        if parked is not None:
            self.blocks.give(parked.blocks)
        return parked

    def _make_room_to_decode(self) -> None:
        """Ensure KV for the next token of every decoding row; preempts the youngest if needed."""
        for size in sorted(self._slabs, reverse=True):
            slab = self._slabs[size]
            owners = np.array(slab.owners[: slab.active], dtype=np.int64)
            for slot in owners[self._slots.computed[owners] >= slab.length].tolist():
                while slot in self._running and not self._evict(1):
                    self.preemptions += 1
                    youngest = next(reversed(self._running))
                    self._running[youngest].preempted_at = time.monotonic()
                    self._requeue(youngest)
                if slot in self._running:
                    self._grow(slot)

    def _grow(self, slot: int) -> None:
        """Move a full row to the next larger slab."""
        old, row, count = (
            self._slab_of(slot),
            int(self._slots.row[slot]),
            int(self._slots.computed[slot]),
        )
        self.blocks.take(1)
        self._slots.size[slot] += 1
        new = self._slab(int(self._slots.size[slot]))
        target = new.add(slot)
        new.row(target, count).copy_(old.row(row, count))
        self._moved(old.remove(row))
        self._slots.row[slot] = target
        self._moved(new.activate(target))

    def _admit(self) -> None:
        """Start waiting requests, in order, while there are free slots and blocks."""
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

    def _start(self, request: EngineRequest, size: int, parked: ParkedPrefix | None) -> None:
        """Assign a slot and a row to a request, and copy its cached prefix."""
        slot = self._free_slots.pop()
        tokens = np.concatenate((request.prompt, np.array(request.tokens, dtype=np.int64)))
        end = len(request.prompt) + request.sampling.max_new_tokens
        self._running[slot] = request
        self._filling[slot] = None
        self._slots.begin(slot, tokens, end, request.sampling)
        self.blocks.take(size)
        self._slots.size[slot] = size
        self._slots.row[slot] = self._slab(size).add(slot)
        cached = 0
        if parked is not None:
            cached = _common_prefix(parked.tokens, tokens[:-1])
            self._row_of(slot, cached).copy_(parked.kv[:, :, :, :cached])
        elif not request.tokens:
            self._sharing.join(slot, request.prompt)
        self._slots.computed[slot] = cached
        if request.started is None:
            request.started = time.monotonic()
            request.cached = cached
        if request.preempted_at is not None:
            request.preempted_s += time.monotonic() - request.preempted_at
            request.preempted_at = None

    def _leave(self, slot: int, *, park: bool) -> EngineRequest:
        """Free a slot; its KV is parked for its session, or dropped."""
        request = self._running.pop(slot)
        self._collect(slot, request)
        self._filling.pop(slot, None)
        self._sharing.leave(slot)
        slab, row, count = (
            self._slab_of(slot),
            int(self._slots.row[slot]),
            int(self._slots.computed[slot]),
        )
        self.blocks.give(int(self._slots.size[slot]))
        if park and request.keep and request.session:
            self._unpark(request.session)
            kv = self._row_of(slot, count).clone(memory_format=torch.contiguous_format)
            blocks = self.blocks.for_tokens(count)
            self.blocks.take(blocks)
            self._parked[request.session] = ParkedPrefix(
                self._slots.tokens[slot, :count].copy(), kv, blocks
            )
        self._moved(slab.remove(row))
        self._free_slots.append(slot)
        return request

    def _requeue(self, slot: int) -> None:
        """Return a running request to the head of the queue; it keeps its sampled tokens."""
        self._waiting.appendleft(self._leave(slot, park=False))

    def _collect(self, slot: int, request: EngineRequest) -> None:
        """Copy the tokens sampled in this slot to the request."""
        sampled = slice(int(self._slots.first[slot]), int(self._slots.known[slot]))
        count = sampled.stop - sampled.start
        if count:
            request.tokens += self._slots.tokens[slot, sampled].tolist()
            request.logprobs += self._slots.logprobs[slot, sampled].tolist()
            request.entropies += self._slots.entropies[slot, sampled].tolist()
            request.versions.append((self.version, count))

    def _slab_of(self, slot: int) -> Slab:
        return self._slabs[int(self._slots.size[slot])]

    def _row_of(self, slot: int, tokens: int) -> torch.Tensor:
        """The first `tokens` keys and values of a slot."""
        return self._slab_of(slot).row(int(self._slots.row[slot]), tokens)

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
            self._slots.row[slot] = row


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """The input of one forward pass."""

    ids: torch.Tensor
    positions: torch.Tensor
    segments: list[Segment]
    slots: Ids
    """Slots that sample: the decoding ones first, then those whose prompt is now complete."""
    decoding: int
    chunks: list[tuple[int, int]]
    last: torch.Tensor | None
    """Rows of the hidden states to sample from; None for all rows."""


def block_tokens(max_length: int) -> int:
    """Block size for a maximum length: about 16 slabs, blocks of 32 to 256 tokens."""
    return min(256, max(32, -(-max_length // 16 // 32) * 32))


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n

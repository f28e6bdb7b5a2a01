"""One simulated engine: continuous batching over a paged KV cache, as in vLLM.

Every step is planned in this order:
- Running sequences need a new block every `block_tokens` tokens. If none is free, even after
  dropping cached prefixes, the youngest running sequence is preempted: it loses its blocks and
  returns to the head of the queue, to be recomputed with the tokens it has.
- Otherwise waiting sequences are admitted, first come first served, while there is a slot and
  there are blocks for all their tokens.
- Prompts are computed in chunks beside decoding, at most `batch_tokens` per step; the step that
  completes a prompt samples the first token.
- Blocks of finished and preempted sequences stay as cached prefixes until the room is needed
  (least recently used first, the end of a prefix before its beginning). Sequences of one group
  share the full blocks of their common prompt.

Steps that only decode are not simulated one by one: with B sequences and C tokens of context,
n steps take n (step_s + sequence_s B + context_s C) + context_s B n (n-1) / 2, so the time of the
next event (a sequence ends, blocks run out, a sequence arrives) is computed directly. Blocks are
counted exactly, by the number of sequences that fill a block at each step mod `block_tokens`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from rstar2.errors import InvariantError
from rstar2.rollout.simulate.model import EngineModel
from rstar2.types import EngineLoad


@dataclass(slots=True)
class EngineSequence:
    """One turn of a rollout on an engine."""

    session: str
    group: str
    prompt: int
    """Tokens at the start of the turn."""
    new: int
    """Tokens that the turn will sample."""
    shared_tokens: int
    """Prompt tokens that the whole group shares."""
    computed: int = 0
    """Tokens whose KV was computed before, on any engine; used to count recomputed tokens."""
    generated: int = 0
    shared: int = 0
    """Blocks of the group's prompt that it uses."""
    fill: int = 0
    """Prompt tokens still to compute before it decodes."""
    joined: int = 0
    finish: int = 0
    phase: int = -1
    """Step (mod block) at which it needs a block; -1 while it does not decode."""
    admitted_at: float = -1.0

    @property
    def tokens(self) -> int:
        """Tokens when it was last updated."""
        return self.prompt + self.generated


@dataclass(slots=True)
class EngineTally:
    """Totals of one engine."""

    busy_s: float = 0.0
    kv_s: float = 0.0
    """Integral over time of the share of KV in use."""
    kv_peak: float = 0.0
    preemptions: int = 0
    steps: int = 0
    decoded: int = 0
    prefilled: int = 0
    recomputed: int = 0


@dataclass(slots=True)
class StepEvents:
    """What happened at the end of the planned steps."""

    finished: list[EngineSequence] = field(default_factory=list)
    admitted: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)


class SimulatedEngine:
    """Driven by the caller: `add` sequences, call `finish_steps` at `next_time`."""

    def __init__(self, name: str, model: EngineModel) -> None:
        self.name = name
        self.model = model
        self.block = model.block_tokens
        self.total = model.kv_tokens // model.block_tokens
        self.tally = EngineTally()
        self._reset()

    def _reset(self) -> None:
        """Clear everything that runs, waits or is cached."""
        self.step = 0
        self.next_time = inf
        """When the planned steps end; infinite while the engine is idle."""
        self._start = 0.0
        self._planned = 0
        self._chunks: list[tuple[EngineSequence, int]] = []
        self._waiting: deque[EngineSequence] = deque()
        self._running: dict[str, EngineSequence] = {}
        self._filling: deque[EngineSequence] = deque()
        self._finishing: list[tuple[int, str]] = []
        self._needs = [0] * self.block
        self._decoding = 0
        self._context = 0
        self._used = 0
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0
        self._group_users: dict[str, int] = {}

    # ------------------------------------------------------------------ interface

    def add(self, sequence: EngineSequence, now: float) -> None:
        """Queue a turn; it is considered when the current step ends."""
        blocked = bool(self._waiting)
        self._waiting.append(sequence)
        if self.next_time == inf:
            self._start, self._planned, self.next_time = now, 0, now
        elif self._planned > 1 and not blocked:  # a blocked sequence blocks those behind it
            self._planned = self._steps_by(now)
            self.next_time = self._start + self._duration(self._planned)

    def release(self, session: str) -> None:
        """The rollout has ended or moved: its cached prefix may be freed."""
        if self.model.forgets:
            self._cached -= self._cache.pop(session, 0)

    def load(self, now: float) -> EngineLoad:
        """The load that the engine would report."""
        share = 0.0
        if self._planned and self.next_time > self._start:
            share = min(1.0, (now - self._start) / (self.next_time - self._start))
        steps = int(share * self._planned)
        used = min(self.total, self._used + steps * self._decoding // self.block)
        return EngineLoad(
            kv_used=used * self.block,
            running=len(self._running),
            waiting=len(self._waiting),
            preemptions=self.tally.preemptions,
            version=0,
            steps=self.tally.steps + steps,
            decoded=self.tally.decoded + steps * self._decoding,
            prefilled=self.tally.prefilled,
        )

    def finish_steps(self, now: float) -> StepEvents:
        """The planned steps have ended: account for them and plan the next ones."""
        events = StepEvents()
        self._commit(now, events)
        self._make_room(events)
        if not events.preempted:
            self._admit(now, events)
        self._plan(now)
        return events

    # ------------------------------------------------------------------ time

    def _duration(self, steps: int) -> float:
        model = self.model
        first = model.step(self._decoding, self._context)
        return steps * first + model.context_s * self._decoding * steps * (steps - 1) / 2

    def _steps_by(self, now: float) -> int:
        """The fewest whole steps of the plan (at least one) that end at or after `now`."""
        elapsed = now - self._start
        half = self.model.context_s * self._decoding / 2
        linear = self.model.step(self._decoding, self._context) - half
        if half > 0:
            estimate = (sqrt(linear * linear + 4 * half * max(0.0, elapsed)) - linear) / (2 * half)
        else:
            estimate = elapsed / linear
        steps = max(1, min(self._planned, ceil(estimate)))
        while steps > 1 and self._duration(steps - 1) >= elapsed:
            steps -= 1
        while steps < self._planned and self._duration(steps) < elapsed:
            steps += 1
        return steps

    def _plan(self, now: float) -> None:
        """Plan the next steps and when they end."""
        self._start, self._chunks = now, []
        model = self.model
        if self._filling:
            budget = max(1, model.batch_tokens - self._decoding)
            prefill = pairs = 0
            for sequence in self._filling:
                chunk = min(budget, sequence.fill)
                if not chunk:
                    break
                before = sequence.tokens - sequence.fill
                pairs += chunk * before + chunk * (chunk - 1) // 2
                prefill += chunk
                budget -= chunk
                self._chunks.append((sequence, chunk))
            self._planned = 1
            self.next_time = now + model.step(self._decoding, self._context, prefill, pairs)
        elif self._decoding:
            self._planned = min(self._until_finish(), self._until_full())
            self.next_time = now + self._duration(self._planned)
        else:
            self._planned, self.next_time = 0, inf

    def _until_finish(self) -> int:
        while True:
            finish, name = self._finishing[0]
            sequence = self._running.get(name)
            if sequence is not None and sequence.phase >= 0 and sequence.finish == finish:
                return finish - self.step
            heappop(self._finishing)

    def _until_full(self) -> int:
        """Steps until a block is missing (at least 1 after `_make_room`)."""
        cycles, free = divmod(self.total - self._used, self._decoding)
        for extra in range(self.block):
            free -= self._needs[(self.step + extra) % self.block]
            if free < 0:
                return cycles * self.block + extra
        return cycles * self.block + self.block

    # ------------------------------------------------------------------ steps

    def _commit(self, now: float, events: StepEvents) -> None:
        steps, before = self._planned, self._used
        if steps:
            cycles, rest = divmod(steps, self.block)
            self._used += cycles * self._decoding + sum(
                self._needs[(self.step + extra) % self.block] for extra in range(rest)
            )
            self._context += steps * self._decoding
            self.step += steps
            tally = self.tally
            tally.steps += steps
            tally.decoded += steps * self._decoding
            tally.busy_s += now - self._start
            tally.kv_s += (now - self._start) * (before + self._used) / 2 / self.total
            tally.kv_peak = max(tally.kv_peak, self._used / self.total)
            if self._used > self.total:
                raise InvariantError(f"{self.name} uses {self._used} of {self.total} blocks")
            self._trim()
        while self._finishing and self._finishing[0][0] <= self.step:
            finish, name = heappop(self._finishing)
            sequence = self._running.get(name)
            if sequence is not None and sequence.phase >= 0 and sequence.finish == finish:
                self._stop_decoding(sequence)
                self._leave(sequence)
                events.finished.append(sequence)
        for sequence, chunk in self._chunks:
            sequence.fill -= chunk
            self.tally.prefilled += chunk
            if not sequence.fill:
                self._filling.remove(sequence)
                self._decode(sequence, events)
        self._chunks = []

    def _decode(self, sequence: EngineSequence, events: StepEvents) -> None:
        """Its prompt is computed, which gives the first new token; it decodes from here on."""
        sequence.generated += 1
        self.tally.decoded += 1
        sequence.computed = max(sequence.computed, sequence.tokens - 1)
        if sequence.generated >= sequence.new:
            self._leave(sequence)
            events.finished.append(sequence)
            return
        tokens = sequence.tokens
        sequence.joined = self.step
        sequence.finish = self.step + sequence.new - sequence.generated
        sequence.phase = (self.step - tokens) % self.block
        self._needs[sequence.phase] += 1
        self._decoding += 1
        self._context += tokens
        heappush(self._finishing, (sequence.finish, sequence.session))

    def _stop_decoding(self, sequence: EngineSequence) -> None:
        self._needs[sequence.phase] -= 1
        sequence.phase = -1
        sequence.generated += self.step - sequence.joined
        sequence.computed = sequence.tokens - 1
        self._decoding -= 1
        self._context -= sequence.tokens

    # ------------------------------------------------------------------ blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _private(self, sequence: EngineSequence) -> int:
        """Blocks that only this sequence holds; before decoding, including one more token."""
        return self._blocks(sequence.tokens + (sequence.fill > 0)) - sequence.shared

    def _make_room(self, events: StepEvents) -> None:
        """Preempt the youngest sequences until the next step has its blocks."""
        while self._decoding and (self._needs[self.step % self.block] > self.total - self._used):
            name = next(reversed(self._running))
            sequence = self._running[name]
            if len(self._running) == 1:
                raise InvariantError(f"{name} does not fit {self.name} even alone")
            if sequence.phase >= 0:
                self._stop_decoding(sequence)
            else:
                self._filling.remove(sequence)
            self._leave(sequence)
            self._waiting.appendleft(sequence)
            self.tally.preemptions += 1
            events.preempted.append(sequence)

    def _admit(self, now: float, events: StepEvents) -> None:
        free = self.total - self._needs[self.step % self.block]  # running sequences come first
        while self._waiting and len(self._running) < self.model.max_sequences:
            sequence = self._waiting[0]
            tokens = sequence.tokens
            shared = max(0, sequence.shared_tokens - 1) // self.block
            users = self._group_users.get(sequence.group, 0)
            pinned = shared if users else 0
            if self._used + self._blocks(tokens + 1) - pinned > free:
                break
            self._waiting.popleft()
            hit = self._take_cached(sequence, shared, pinned)
            self._group_users[sequence.group] = users + 1
            sequence.shared = shared
            sequence.fill = max(1, tokens - hit * self.block)
            self._used += self._blocks(tokens + 1) - pinned
            start = tokens - sequence.fill
            self.tally.recomputed += max(0, min(sequence.computed, tokens) - start)
            self._running[sequence.session] = sequence
            self._filling.append(sequence)
            events.admitted.append(sequence)
            if sequence.admitted_at < 0:
                sequence.admitted_at = now
            self._trim()
        self.tally.kv_peak = max(self.tally.kv_peak, self._used / self.total)

    def _take_cached(self, sequence: EngineSequence, shared: int, pinned: int) -> int:
        """Take the sequence's cached prefix blocks out of the cache; returns how many it reuses."""
        own = self._cache.pop(sequence.session, 0)
        self._cached -= own
        if pinned:
            return pinned + own
        group = self._cache.pop("group " + sequence.group, 0)
        self._cached -= group
        return min(group, shared) + (own if group >= shared else 0)

    def _leave(self, sequence: EngineSequence) -> None:
        """Stop running it; its full blocks stay as a cached prefix while there is room."""
        del self._running[sequence.session]
        filled = sequence.tokens - (sequence.fill or 1)  # the last sampled token has no KV yet
        sequence.computed = max(sequence.computed, filled)
        private = self._private(sequence)
        self._used -= private
        sequence.fill = 0
        own = max(0, filled // self.block - sequence.shared)
        if own:
            self._cache[sequence.session] = own
            self._cached += own
        users = self._group_users[sequence.group] - 1
        if users:
            self._group_users[sequence.group] = users
        else:
            del self._group_users[sequence.group]
            self._used -= sequence.shared
            self._cache["group " + sequence.group] = sequence.shared
            self._cached += sequence.shared
        sequence.shared = 0

    def _trim(self) -> None:
        """Drop cached prefixes until everything fits, least recently used first."""
        excess = self._used + self._cached - self.total
        while excess > 0:
            key, blocks = next(iter(self._cache.items()))
            dropped = min(blocks, excess)
            if dropped == blocks:
                del self._cache[key]
            else:
                self._cache[key] = blocks - dropped
            self._cached -= dropped
            excess -= dropped

    # ------------------------------------------------------------------ crash

    def crash(self) -> list[EngineSequence]:
        """Lose everything; returns the turns that were running or waiting here."""
        lost = [*self._running.values(), *self._waiting]
        self._reset()
        return lost

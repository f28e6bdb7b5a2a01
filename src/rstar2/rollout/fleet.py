"""Many engines as one Generator: the scheduler decides, the fleet does.

`generate` waits for a placement, runs the turn on the chosen engine, and when that engine dies
runs the same turn (same prompt, same seed) on another. An engine that died is started again in
the background by `recover`, which must also give it the current weights and prove them: until
then the scheduler does not know it, so it gets nothing (Invariant 7).

From the first turn on every engine is asked for its load now and then, for the scheduler. One that
died between two turns is lost then; one that does not answer is left to `watch.Watchdog`.

Every wait ends: by a placement, by the caller's deadline (DeadlineError), by cancellation, or with
EngineError when no engine is left and none is coming back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from rstar2.engine.base import Engine
from rstar2.errors import DeadlineError, EngineError, InfrastructureError
from rstar2.rollout.scheduler import Phase, Placement, Scheduler, TurnRequest
from rstar2.types import EngineLoad, Finish, Generation, Sampling, WeightVersion

log = logging.getLogger(__name__)

Recover = Callable[[Engine], Awaitable[WeightVersion]]
"""Starts a dead engine again, installs and proves the current weights, returns their version."""

RELEASE_DEADLINE_S = 10.0
WATCH_S = 1.0
"""Time between two looks at an engine's load."""
LOAD_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What one engine did since the last reading; shares are of the time between readings."""

    name: str
    wall_s: float
    busy_s: float
    kv_share: float
    """Time-weighted mean of reserved KV over capacity."""
    kv_peak: float
    turns: int
    tokens: int
    queue_s: float
    """Sum over turns of the time from asking to starting."""
    moved: int
    deaths: int
    preemptions: int = 0
    """Rollouts that the engine threw out of its KV cache, as far as its load has told."""

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.wall_s if self.wall_s > 0 else 0.0


class _Meter:
    """Integrates busy time and reserved KV of one engine over time.

    Told after every change of its engine and of no other, so that an event costs the same however
    many engines there are.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.deaths = 0
        self.load: EngineLoad | None = None
        self.running = 0
        self.kv_share = 0.0
        self.reset(monotonic())

    def reset(self, now: float) -> None:
        self.since = self.last = now
        self.busy_s = self.kv_s = self.kv_peak = self.queue_s = 0.0
        self.turns = self.tokens = self.moved = self.preemptions = 0

    def report(self, load: EngineLoad) -> None:
        """Take what the engine says of itself; its counts begin at 0 when it is started again."""
        before = self.load.preemptions if self.load is not None else load.preemptions
        self.preemptions += load.preemptions - (before if before <= load.preemptions else 0)
        self.load = load

    def note(self, now: float, *, running: int, kv_share: float) -> None:
        """These values hold from now on; account for the time in which the last ones did."""
        self.busy_s += (now - self.last) * (self.running > 0)
        self.kv_s += (now - self.last) * self.kv_share
        self.kv_peak = max(self.kv_peak, kv_share)
        self.running, self.kv_share, self.last = running, kv_share, now

    def read(self, now: float) -> EngineUse:
        wall = now - self.since
        return EngineUse(
            name=self.name,
            wall_s=wall,
            busy_s=self.busy_s,
            kv_share=self.kv_s / wall if wall > 0 else 0.0,
            kv_peak=self.kv_peak,
            turns=self.turns,
            tokens=self.tokens,
            queue_s=self.queue_s,
            moved=self.moved,
            deaths=self.deaths,
            preemptions=self.preemptions,
        )


def group_of(session: str) -> str:
    """Sessions are named `group/rollout`: everything before the last slash is the group."""
    return session.rpartition("/")[0]


class Fleet:
    """Implements engine.base.Generator over all engines. One event loop, no threads."""

    def __init__(
        self,
        engines: Sequence[Engine],
        scheduler: Scheduler,
        *,
        recover: Recover | None = None,
        recoveries: int = 3,
        watch_s: float = WATCH_S,
    ) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.scheduler = scheduler
        self._recover = recover
        self._watch_s = watch_s
        self._recoveries_left = dict.fromkeys(self.engines, recoveries)
        self._recovering: dict[str, asyncio.Task[None]] = {}
        self._placed: dict[str, asyncio.Future[Placement]] = {}
        self._ready: dict[str, Placement] = {}
        """Placements of handed-back turns whose callers have not noticed yet."""
        self._meters = {name: _Meter(name) for name in self.engines}
        self._releases: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}

    # ------------------------------------------------------------------ life

    def join(self, name: str, version: WeightVersion) -> None:
        """The engine runs and serves proven weights of this version: it may get turns."""
        if name in self.scheduler.engines:
            self.scheduler.weights_updated(name, version)
        else:
            self.scheduler.join(name, self.engines[name].capacity(), version)
        self._dispatch()

    def require(self, version: WeightVersion) -> None:
        """From now on turns go only to engines that have joined with this version."""
        self.scheduler.require(version)

    @property
    def alive(self) -> tuple[Engine, ...]:
        """Engines that have not died (stale ones included)."""
        return tuple(e for name, e in self.engines.items() if name in self.scheduler.engines)

    async def settle(self) -> None:
        """Stop bringing engines back: whoever calls this is going to update all of them."""
        tasks = list(self._recovering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._recovering.clear()

    async def stop(self) -> None:
        """Do nothing more; the engines go on. Waiting turns fail with EngineError."""
        await self.settle()
        background = [*self._releases, *self._watches.values()]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self._fail_waiting(EngineError("the fleet was closed"))

    async def close(self) -> None:
        """Stop, and close every engine."""
        await self.stop()
        results = await asyncio.gather(
            *(e.close() for e in self.engines.values()), return_exceptions=True
        )
        for name, result in zip(self.engines, results, strict=True):
            if isinstance(result, InfrastructureError):
                log.warning("engine %s did not close cleanly: %s", name, result)
            elif isinstance(result, BaseException):
                raise result

    # ------------------------------------------------------------------ Generator

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample one turn on whichever engine the scheduler chooses."""
        asked = monotonic()
        self._watch()
        request = TurnRequest(session, group_of(session), len(prompt_ids), sampling.max_new_tokens)
        self.scheduler.submit(request)
        try:
            while True:
                placement = await self._placement(session, asked, deadline_s)
                started = monotonic()
                left = deadline_s - (started - asked)
                try:
                    generation = await self.engines[placement.engine].generate(
                        prompt_ids, sampling, session=session, deadline_s=left
                    )
                    break
                except EngineError as error:
                    self._lost(placement.engine, error)
        except BaseException:
            self._ready.pop(session, None)
            self.scheduler.turn_failed(session)
            self._note(self.scheduler.engine_of(session))
            self._dispatch()
            raise
        return self._ended(request, placement, generation, queue_s=started - asked)

    async def release(self, session: str) -> None:
        """The rollout is over: its reservation ends now, the engine may forget its prefix."""
        engine = self.scheduler.end(session)
        self._note(engine)
        self._dispatch()
        if engine is not None:
            await self._forget(engine, session)

    # ------------------------------------------------------------------ mechanism

    async def _placement(self, session: str, asked: float, deadline_s: float) -> Placement:
        """Wait until the scheduler places the session's turn."""
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._placed[session] = future
        try:
            self._dispatch()
            if session in self._ready:
                return self._ready.pop(session)
            if not self.scheduler.engines and not self._recovering:
                raise EngineError("no engine is alive")
            async with asyncio.timeout(max(0.0, asked + deadline_s - monotonic())):
                return await future
        except TimeoutError:
            raise DeadlineError(
                f"{session} was not placed on an engine within {deadline_s:g} s "
                f"({self.scheduler.waiting} turns wait, engines: {', '.join(self.engines)})"
            ) from None
        finally:
            self._placed.pop(session, None)

    def _dispatch(self) -> None:
        """Hand out everything that may start now."""
        decision = self.scheduler.decide(monotonic())
        touched = {e.engine for e in decision.evictions} | {p.engine for p in decision.placements}
        for engine in touched:
            self._note(engine)
        for eviction in decision.evictions:
            if self.scheduler.knows(eviction.engine):
                task = asyncio.ensure_future(self._forget(eviction.engine, eviction.session))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
        for placement in decision.placements:
            self._meters[placement.engine].moved += placement.moved
            future = self._placed.get(placement.session)
            if future is None or future.done():  # its caller still waits for a dead engine
                self._ready[placement.session] = placement
            else:
                future.set_result(placement)

    async def _forget(self, engine: str, session: str) -> None:
        """Free a session's prefix on an engine; one that cannot is lost."""
        if self.scheduler.engine_of(session) == engine:
            return  # it has come back meanwhile
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self.engines[engine].release(session)
        except (EngineError, TimeoutError) as error:
            self._lost(engine, EngineError(f"release of {session}: {error!r}"))

    def _ended(
        self, request: TurnRequest, placement: Placement, generation: Generation, *, queue_s: float
    ) -> Generation:
        self._ready.pop(request.session, None)
        tokens = request.prompt_tokens + len(generation.token_ids)
        if self.scheduler.phase(request.session) is Phase.RUNNING:
            truncated = generation.finish is Finish.LENGTH
            self.scheduler.turn_ended(request.session, tokens, truncated=truncated, now=monotonic())
        else:  # the engine died right after it had answered: the answer stands
            self.scheduler.turn_failed(request.session)
        self._note(placement.engine)
        meter = self._meters[placement.engine]
        meter.turns += 1
        meter.tokens += len(generation.token_ids)
        meter.queue_s += queue_s
        self._dispatch()
        return replace(generation, queue_s=generation.queue_s + queue_s, engine=placement.engine)

    def _lost(self, name: str, error: Exception) -> None:
        """An engine died: its turns wait again, and it is started again in the background."""
        if name not in self.scheduler.engines:
            return
        log.warning("engine %s is lost: %s", name, error)
        self._meters[name].deaths += 1
        self.scheduler.engine_lost(name)
        self._note(name)
        if self._recover is not None and self._recoveries_left[name] > 0:
            self._recoveries_left[name] -= 1
            self._recovering[name] = asyncio.ensure_future(self._bring_back(name, self._recover))
        elif not self.scheduler.engines and not self._recovering:
            self._fail_waiting(error)
        self._dispatch()

    async def _bring_back(self, name: str, recover: Recover) -> None:
        try:
            version = await recover(self.engines[name])
        except InfrastructureError as error:
            log.warning("engine %s could not be brought back: %s", name, error)
            self._recovering.pop(name, None)
            if not self.scheduler.engines and not self._recovering:
                self._fail_waiting(error)
        else:
            self._recovering.pop(name, None)
            self.join(name, version)

    def _watch(self) -> None:
        """Have an eye on every engine, from the first turn on."""
        for name in self.engines:
            if name not in self._watches:
                self._watches[name] = asyncio.ensure_future(self._look_after(name))

    async def _look_after(self, name: str) -> None:
        """Ask an engine for its load again and again; one that cannot tell is lost."""
        while True:
            if name in self.scheduler.engines:
                await self.look(name)
            await asyncio.sleep(self._watch_s)

    async def look(self, name: str) -> None:
        """Ask one engine for its load now, and tell the scheduler."""
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                load = await self.engines[name].load()
        except EngineError as error:
            self._lost(name, error)
            return
        except (DeadlineError, TimeoutError):
            log.info("engine %s did not tell its load within %g s", name, LOAD_DEADLINE_S)
            return
        self._meters[name].report(load)
        self.scheduler.load_reported(name, load)
        self._note(name)
        self._dispatch()

    def _fail_waiting(self, error: Exception) -> None:
        for future in self._placed.values():
            if not future.done():
                future.set_exception(EngineError(f"no engine is left: {error}"))

    # ------------------------------------------------------------------ what it used

    def _note(self, name: str | None) -> None:
        """Tell an engine's meter what holds from now on; call after a change of the engine."""
        if name is None:
            return
        running, share = 0, 0.0
        if self.scheduler.knows(name):
            budget = self.scheduler.budget(name)
            running, share = self.scheduler.running(name), budget.reserved / budget.total
        self._meters[name].note(monotonic(), running=running, kv_share=share)

    def take_use(self) -> tuple[EngineUse, ...]:
        """What every engine did since the last call."""
        for name in self._meters:
            self._note(name)
        now = monotonic()
        uses = tuple(meter.read(now) for meter in self._meters.values())
        for meter in self._meters.values():
            meter.reset(now)
        return uses


def total_use(uses: Iterable[EngineUse]) -> dict[str, float]:
    """The fleet's use as metrics: shares averaged over engines, counts summed."""
    uses = tuple(uses)
    count = max(1, len(uses))
    turns = sum(u.turns for u in uses)
    return {
        "engine/idle_share": sum(u.idle_share for u in uses) / count,
        "engine/kv_share": sum(u.kv_share for u in uses) / count,
        "engine/kv_peak": max((u.kv_peak for u in uses), default=0.0),
        "engine/turns": float(turns),
        "engine/moved": float(sum(u.moved for u in uses)),
        "engine/queue_s": sum(u.queue_s for u in uses) / max(1, turns),
        "engine/deaths": float(sum(u.deaths for u in uses)),
        "engine/preemptions": float(sum(u.preemptions for u in uses)),
    }

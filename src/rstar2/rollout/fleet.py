"""Many engines as one Generator: carries out the scheduler's decisions.

`generate` waits for a placement and runs the turn on the chosen engine. If that engine dies, it
runs the same turn (same prompt, same seed) on another. `recover` restarts a dead engine in the
background, installs the current weights and verifies them; until then the scheduler does not know
the engine, so it gets no turns (Invariant 7). A restart that fails is repeated for RESTART_S,
because only its owner can restart the server behind a URL. After that, and after `recoveries`
deaths without a finished turn in between, the next weight update tries again.

From the first turn on, the fleet polls the load of every engine for the scheduler. An engine that
died between two turns is detected there; one that does not answer is left to `watchdog.Watchdog`.

Every wait ends: with a placement, by cancellation, with EngineError when no engine is left and
none is being restarted, or with StallError when the fleet makes no progress. The caller's deadline
counts from the time at which an engine starts on the turn (`turn_clocks`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from rstar2.engine.base import Engine
from rstar2.errors import EngineError, InfrastructureError, RstarError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.rollout.scheduler import Phase, Placement, Scheduler, TurnRequest
from rstar2.rollout.turn_clocks import TurnClock, TurnClocks
from rstar2.tasks import cancel_all
from rstar2.types import EngineLoad, Finish, Generation, Sampling, WeightVersion

log = logging.getLogger(__name__)

RecoverEngine = Callable[[Engine], Awaitable[WeightVersion]]
"""Restarts a dead engine, installs and verifies the current weights, returns their version."""

RELEASE_DEADLINE_S = 10.0
LOAD_POLL_S = 1.0
"""Time between two polls of an engine's load."""
LOAD_DEADLINE_S = 60.0
RESTART_S = 300.0
"""How long the restart of an engine is repeated."""
RESTART_PAUSE_S, LONGEST_RESTART_PAUSE_S = 1.0, 30.0
"""Before the second attempt, doubled each time; and at most."""
ENGINE_DEADLINE_S = 7 * 86_400.0
"""Deadline that engines get for a turn; the fleet ends a turn earlier, by its clock."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What one engine did since the last reading. Shares refer to the time since then."""

    name: str
    wall_s: float
    busy_s: float
    kv_share: float
    """Time-weighted mean of reserved KV / capacity."""
    kv_peak: float
    turns: int
    tokens: int
    queue_s: float
    """Sum over turns of the time from the request to the start."""
    moved: int
    deaths: int
    preemptions: int = 0
    """Rollouts that the engine preempted, from its load reports."""

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.wall_s if self.wall_s > 0 else 0.0


class _UsageMeter:
    """Integrates busy time and reserved KV of one engine over time.

    Updated only when its own engine changes, so that the cost of an event does not depend on the
    number of engines.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.load: EngineLoad | None = None
        self.running = 0
        self.kv_share = 0.0
        self.reset(monotonic())

    def reset(self, now: float) -> None:
        self.since = self.last = now
        self.busy_s = self.kv_s = self.kv_peak = self.queue_s = 0.0
        self.turns = self.tokens = self.moved = self.deaths = self.preemptions = 0

    def report(self, load: EngineLoad) -> None:
        """Record the engine's load; its preemption count restarts at 0 with the engine."""
        before = self.load.preemptions if self.load is not None else load.preemptions
        self.preemptions += load.preemptions - (before if before <= load.preemptions else 0)
        self.load = load

    def update(self, now: float, *, running: int, kv_share: float) -> None:
        """Account for the time since the last call with the old values, then store the new ones."""
        self.busy_s += (now - self.last) * (self.running > 0)
        self.kv_s += (now - self.last) * self.kv_share
        self.kv_peak = max(self.kv_peak, kv_share)
        self.running, self.kv_share, self.last = running, kv_share, now

    def read(self, now: float) -> EngineUsage:
        wall = now - self.since
        return EngineUsage(
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
    """The group of a session named `group/rollout`: everything before the last slash."""
    return session.rpartition("/")[0]


class Fleet:
    """Implements `engine.base.Generator` over all engines, on one event loop without threads."""

    def __init__(
        self,
        engines: Sequence[Engine],
        scheduler: Scheduler,
        *,
        recover: RecoverEngine | None = None,
        recoveries: int = 3,
        load_poll_s: float = LOAD_POLL_S,
    ) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.scheduler = scheduler
        self._recover = recover
        self._load_poll_s = load_poll_s
        self._recoveries = recoveries
        self._deaths = dict.fromkeys(self.engines, 0)
        """Deaths of each engine since it last finished a turn."""
        self._lives = dict.fromkeys(self.engines, 0)
        """How often each engine has joined. A failed request ends an engine only in the life in
        which it was sent: on a busy machine failures may arrive after the engine's restart."""
        self._recovering: dict[str, asyncio.Task[None]] = {}
        self.last_failure: Exception | None = None
        """Why the last restart failed."""
        self._placed: dict[str, asyncio.Future[Placement]] = {}
        self._ready: dict[str, Placement] = {}
        """Placements of returned turns whose callers still wait for the dead engine."""
        self._meters = {name: _UsageMeter(name) for name in self.engines}
        self._releases: set[asyncio.Task[None]] = set()
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._clocks = TurnClocks(scheduler.config.stall_s)

    # ------------------------------------------------------------------ lifecycle

    def join(self, name: str, version: WeightVersion) -> None:
        """The engine runs and serves verified weights of this version: it may get turns."""
        if name in self.scheduler.engines:
            self.scheduler.weights_updated(name, version)
        else:
            self.scheduler.join(name, self.engines[name].capacity(), version)
            self._lives[name] += 1
        self._clocks.progressed()
        self._dispatch()

    def require(self, version: WeightVersion) -> None:
        """Only engines that joined with this version get turns from now on."""
        self.scheduler.require(version)
        self._clocks.progressed()

    def lose(self, name: str, error: Exception) -> None:
        """The caller found that an engine died or hangs: its turns run elsewhere, it restarts."""
        self._engine_lost(name, error, self._lives[name])

    def restart_missing(self) -> None:
        """Restart, in the background, the engines that do not serve and are not being restarted."""
        for name in self.engines:
            if name not in self.scheduler.engines and name not in self._recovering:
                self._restart_later(name)

    async def restarted(self) -> None:
        """Wait until a restart has ended, well or not; EngineError if none is under way."""
        if not self._recovering:
            raise EngineError(f"no engine can be started: {self.last_failure}")
        await asyncio.wait(self._recovering.values(), return_when=asyncio.FIRST_COMPLETED)

    async def stop_recoveries(self) -> None:
        """Cancel engine restarts."""
        tasks = list(self._recovering.values())
        await cancel_all(tasks)
        self._recovering.clear()

    async def stop(self) -> None:
        """Stop scheduling; the engines keep running. Waiting turns fail with EngineError."""
        await self.stop_recoveries()
        background = [*self._releases, *self._polls.values()]
        await cancel_all(background)
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
        """Sample one turn on the engine that the scheduler chooses."""
        requested = monotonic()
        self._start_polling()
        request = TurnRequest(session, group_of(session), len(prompt_ids), sampling.max_new_tokens)
        self.scheduler.submit(request, requested)
        try:
            async with self._clocks.bound(session, deadline_s) as clock:
                placement, generation = await self._run(clock, prompt_ids, sampling)
        except BaseException:
            self._ready.pop(session, None)
            self.scheduler.turn_failed(session)
            self._update_meter(self.scheduler.engine_of(session))
            self._dispatch()
            raise
        return self._ended(request, placement, generation, queue_s=clock.sent - requested)

    async def _run(
        self, clock: TurnClock, prompt_ids: Sequence[int], sampling: Sampling
    ) -> tuple[Placement, Generation]:
        """Run a submitted turn; on another engine if the first one is lost."""
        session = clock.session
        while True:
            placement = await self._placement(session)
            self._clocks.sent(clock, placement.engine)
            life = self._lives[placement.engine]
            try:
                return placement, await self.engines[placement.engine].generate(
                    prompt_ids, sampling, session=session, deadline_s=ENGINE_DEADLINE_S
                )
            except EngineError as error:
                self._clocks.lost(clock)
                self._engine_lost(placement.engine, error, life)

    async def release(self, session: str) -> None:
        """The rollout has ended: release its reservation and its prefix on the engine."""
        engine = self.scheduler.end(session)
        self._update_meter(engine)
        self._dispatch()
        if engine is not None:
            await self._release_on(engine, session)

    # ------------------------------------------------------------------ mechanism

    async def _placement(self, session: str) -> Placement:
        """Wait until the scheduler places the session's turn; the turn's clock bounds it."""
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._placed[session] = future
        try:
            self._dispatch()
            if session in self._ready:
                return self._ready.pop(session)
            if not self.scheduler.engines and not self._recovering:
                raise EngineError("no engine is alive")
            return await future
        finally:
            self._placed.pop(session, None)

    def _dispatch(self) -> None:
        """Carry out the scheduler's decision: evictions, then placements."""
        decision = self.scheduler.decide(monotonic())
        if not decision.placements and not decision.evictions:
            return
        touched = {e.engine for e in decision.evictions} | {p.engine for p in decision.placements}
        for engine in touched:
            self._update_meter(engine)
        for eviction in decision.evictions:
            if self.scheduler.knows(eviction.engine):
                task = asyncio.ensure_future(self._release_on(eviction.engine, eviction.session))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
        for placement in decision.placements:
            self._meters[placement.engine].moved += placement.moved
            future = self._placed.get(placement.session)
            if future is None or future.done():  # its caller still waits for a dead engine
                self._ready[placement.session] = placement
            else:
                future.set_result(placement)

    async def _release_on(self, engine: str, session: str) -> None:
        """Free a session's prefix on an engine; an engine that fails to do so is lost."""
        if self.scheduler.engine_of(session) == engine:
            return  # the session has returned to this engine
        life = self._lives[engine]
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self.engines[engine].release(session)
        except LocalResourceError as error:
            log.info("session %s was not released: %s", session, error)
        except (EngineError, TimeoutError) as error:
            self._engine_lost(engine, EngineError(f"release of {session}: {error!r}"), life)

    def _ended(
        self, request: TurnRequest, placement: Placement, generation: Generation, *, queue_s: float
    ) -> Generation:
        self._ready.pop(request.session, None)
        self._clocks.progressed()
        tokens = request.prompt_tokens + len(generation.token_ids)
        if self.scheduler.phase(request.session) is Phase.RUNNING:
            truncated = generation.finish is Finish.LENGTH
            self.scheduler.turn_ended(request.session, tokens, truncated=truncated, now=monotonic())
        else:  # the engine died right after it had answered: the result is valid
            self.scheduler.turn_failed(request.session)
        self._update_meter(placement.engine)
        self._deaths[placement.engine] = 0
        meter = self._meters[placement.engine]
        meter.turns += 1
        meter.tokens += len(generation.token_ids)
        meter.queue_s += queue_s
        self._dispatch()
        return replace(generation, queue_s=generation.queue_s + queue_s, engine=placement.engine)

    def _engine_lost(self, name: str, error: Exception, life: int) -> None:
        """An engine died: queue its turns again and restart it in the background.

        `life` is the one in which the failed request was sent.
        """
        if name not in self.scheduler.engines or life != self._lives[name]:
            return
        log.warning("engine %s is lost: %s", name, error)
        self._meters[name].deaths += 1
        self.scheduler.engine_lost(name)
        self._update_meter(name)
        self._deaths[name] += 1
        if self._recover is not None and self._deaths[name] <= self._recoveries:
            self._restart_later(name)
        elif not self.scheduler.engines and not self._recovering:
            self._fail_waiting(error)
        self._dispatch()

    def _restart_later(self, name: str) -> None:
        if self._recover is not None and name not in self._recovering:
            self._recovering[name] = asyncio.ensure_future(self._restart(name, self._recover))

    async def _restart(self, name: str, recover: RecoverEngine) -> None:
        """Restart an engine; however that ends, it is not being restarted afterwards."""
        try:
            self.join(name, await self._repeat(name, recover))
        except Exception as error:  # of any kind: nobody awaits this task
            known = isinstance(error, (RstarError, OSError))
            log.warning("engine %s stays down: %s", name, error, exc_info=not known)
            self.last_failure = error
        finally:
            self._recovering.pop(name, None)
        if not self.scheduler.engines and not self._recovering and self.last_failure is not None:
            self._fail_waiting(self.last_failure)

    async def _repeat(self, name: str, recover: RecoverEngine) -> WeightVersion:
        """Restart an engine; what a later attempt may not meet again is repeated for RESTART_S."""
        ends, pause_s = monotonic() + RESTART_S, RESTART_PAUSE_S
        while True:
            try:
                return await recover(self.engines[name])
            except (InfrastructureError, OSError) as error:
                if monotonic() + pause_s > ends:
                    raise
                log.warning("engine %s could not be restarted: %s", name, error)
                self.last_failure = error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RESTART_PAUSE_S)

    def _start_polling(self) -> None:
        if len(self._polls) == len(self.engines):
            return
        for name in self.engines:
            if name not in self._polls:
                self._polls[name] = asyncio.ensure_future(self._poll_loads(name))

    async def _poll_loads(self, name: str) -> None:
        """Poll the load of one engine until cancelled."""
        while True:
            if name in self.scheduler.engines:
                await self.poll_load(name)
            if not self._recovering:  # a restart has deadlines of its own
                self._clocks.give_up_stalled()
            await asyncio.sleep(self._load_poll_s)

    async def poll_load(self, name: str) -> None:
        """Read the load of one engine now and report it to the scheduler; on error it is lost."""
        asked, life = monotonic(), self._lives[name]
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                load = await self.engines[name].load()
        except EngineError as error:
            self._engine_lost(name, error, life)
            return
        except LocalResourceError as error:  # it says nothing about the engine
            log.info("engine %s could not be asked for its load: %s", name, error)
            return
        except (InfrastructureError, UserError, TimeoutError) as error:
            log.info("engine %s did not report its load: %r", name, error)
            self._clocks.silent(name)
            return
        self._meters[name].report(load)
        self._clocks.reported(name, load, asked)
        self.scheduler.load_reported(name, load, monotonic())
        self._update_meter(name)
        self._dispatch()

    def _fail_waiting(self, error: Exception) -> None:
        for future in self._placed.values():
            if not future.done():
                future.set_exception(EngineError(f"no engine is left: {error}"))

    # ------------------------------------------------------------------ usage

    def _update_meter(self, name: str | None) -> None:
        """Update the meter of an engine; call after every change of the engine."""
        if name is None:
            return
        running, share = 0, 0.0
        if self.scheduler.knows(name):
            budget = self.scheduler.budget(name)
            running, share = self.scheduler.running(name), budget.reserved / budget.total
        self._meters[name].update(monotonic(), running=running, kv_share=share)

    def take_usage(self) -> tuple[EngineUsage, ...]:
        """The usage of every engine since the last call; resets the meters."""
        for name in self._meters:
            self._update_meter(name)
        now = monotonic()
        usages = tuple(meter.read(now) for meter in self._meters.values())
        for meter in self._meters.values():
            meter.reset(now)
        return usages


def usage_metrics(uses: Iterable[EngineUsage]) -> dict[str, float]:
    """Usage of all engines as metrics: shares averaged over engines, counts summed."""
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

"""Carries out the scheduler's decisions: which request goes to which server, and when.

    open session ──> wait for a placement ──> forward ──> answer passes through ──> turn ended
                        ^   (bounded by wait_s)   │ (bounded by answer_s without a byte)
                        └── the server died before its answer began (at most ATTEMPTS times) ──┘

Requests with the same session are the turns of one rollout: they stay on the server that has their
prefix. A request without a session is a rollout of one turn. A second request of a session while
the first one runs counts as a rollout of its own.

Every server is asked for its load once a second. One that refuses connections, breaks them or does
not answer STRIKES times in a row gets no requests until it answers again; its pending requests go
to other servers. Once an answer has begun it cannot be repeated: the client gets the error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from rstar2.config import SchedulerConfig
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, UserError
from rstar2.http_client import HttpResponse, LocalResourceError
from rstar2.rollout.fleet import group_of
from rstar2.rollout.scheduler import Phase, Placement, Scheduler, TurnRequest
from rstar2.router.backend import Backend
from rstar2.router.turns import AnswerMeter, RoutedTurn, TokenScale
from rstar2.tasks import cancel_all

log = logging.getLogger(__name__)

POLL_S = 1.0
STRIKES = 3
"""Number of missed reports in a row after which a server counts as dead."""
ATTEMPTS = 3
"""Servers that may die with a request before it is given up: it may be what kills them."""
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """The deadlines of the router."""

    wait_s: float = 300.0
    """A request waits so long for a server that may take it."""
    answer_s: float = 3600.0
    """A server may be silent so long while it answers a request."""
    session_idle_s: float = 600.0
    """A session without requests ends after this time."""


class AnswerSink(Protocol):
    """Where an answer goes; the HTTP interface implements it."""

    started: bool

    async def start(self, status: int, content_type: str) -> None:
        """The response has started, so the request can no longer be retried on another server."""
        ...

    async def part(self, data: bytes, *, more: bool) -> None: ...


@dataclass(slots=True)
class RouterCounters:
    """What the router has done since its start."""

    turns: Counter[str]
    """Answers per server."""
    retried: int = 0
    moved: int = 0
    new_tokens: int = 0
    wait_s: float = 0.0
    """Time that requests waited for a server, summed."""
    lost: int = 0
    """Servers that died or hung."""


class Router:
    """Forwards requests to servers; used on one event loop."""

    def __init__(
        self,
        backends: Sequence[Backend],
        config: SchedulerConfig,
        limits: RouterLimits,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.scheduler = Scheduler(config)
        self.limits = limits
        self.scale = TokenScale()
        self.counters = RouterCounters(Counter())
        self._poll_s = poll_s
        self._watches: list[asyncio.Task[None]] = []
        self._placed: dict[str, asyncio.Future[Placement]] = {}
        self._ready: dict[str, Placement] = {}
        """Placements of returned turns whose requests still wait for the dead server."""
        self._used: dict[str, float] = {}
        """When each named session was last used."""
        self._numbers = itertools.count()
        self._largest, self._longest = 0, 0

    # ------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Ask every server once, then watch them all."""
        await asyncio.gather(*(self._look(backend) for backend in self.backends.values()))
        self._watches = [
            asyncio.ensure_future(self._watch(backend)) for backend in self.backends.values()
        ]

    def refuse_waiting(self) -> None:
        """The router stops: requests that no server has taken yet fail now."""
        for future in self._placed.values():
            if not future.done():
                future.set_exception(EngineError("the router is stopping"))

    async def close(self) -> None:
        """Stop watching, and close all connections."""
        await cancel_all(self._watches)
        await asyncio.gather(*(backend.close() for backend in self.backends.values()))

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the servers that get requests."""
        return self.scheduler.engines

    @property
    def sessions(self) -> int:
        return len(self._used)

    # ------------------------------------------------------------------ servers

    async def _watch(self, backend: Backend) -> None:
        strikes = 0
        while True:
            await asyncio.sleep(self._poll_s)
            strikes = 0 if await self._look(backend) else strikes + 1
            if strikes == STRIKES:
                strikes = 0
                error = EngineError(f"it did not report its load {STRIKES} times in a row")
                self._lose(backend, backend.life, error)
            self._end_idle_sessions()

    async def _look(self, backend: Backend) -> bool:
        """Ask one server for its load, or for its size if it does not serve; False if it was
        silent."""
        serves, life = self.scheduler.knows(backend.name), backend.life
        try:
            if serves:
                load = await backend.load()
                self.scheduler.load_reported(backend.name, load, monotonic())
                self._dispatch()
            else:
                await self._join(backend)
        except EngineError as error:
            self._note(backend, error)
            self._lose(backend, life, error)
        except (DeadlineError, LocalResourceError, UserError) as error:
            self._note(backend, error)
            return not serves or isinstance(error, LocalResourceError)
        return True

    async def _join(self, backend: Backend) -> None:
        capacity = await backend.capacity()
        backend.life += 1
        backend.trouble = ""
        self._largest = max(self._largest, capacity.kv_tokens)
        self._longest = max(self._longest, capacity.max_length)
        self.scheduler.join(backend.name, capacity, 0)
        log.info("%s serves: %d KV tokens", backend.name, capacity.kv_tokens)
        self._dispatch()

    def _note(self, backend: Backend, error: Exception) -> None:
        """Log why a server does not serve, once."""
        if not self.scheduler.knows(backend.name) and backend.trouble != str(error):
            backend.trouble = str(error)
            log.warning("%s does not serve: %s", backend.name, error)

    def _lose(self, backend: Backend, life: int, error: Exception) -> None:
        """A server died: its turns wait for another one until it answers again."""
        if life != backend.life or not self.scheduler.knows(backend.name):
            return
        backend.trouble = str(error)
        self.counters.lost += 1
        log.warning("%s is lost: %s", backend.name, error)
        self.scheduler.engine_lost(backend.name)
        backend.disconnect()
        self._dispatch()

    # ------------------------------------------------------------------ sessions

    def end_session(self, session: str) -> bool:
        """End a session, after its turn if one runs; False if there is none of this name."""
        return self._end(f"@{session}")

    def _end(self, name: str) -> bool:
        if self._used.pop(name, None) is None:
            return False
        if self.scheduler.phase(name) is Phase.HOLDING:
            self.scheduler.end(name)
            self._dispatch()
        return True

    def _end_idle_sessions(self) -> None:
        oldest = monotonic() - self.limits.session_idle_s
        for name in [name for name, used in self._used.items() if used < oldest]:
            if self.scheduler.phase(name) in (None, Phase.HOLDING):
                self._end(name)

    def _session_name(self, asked: str | None) -> str:
        """The scheduler's name for a request: `@session`, or `#number` if it has none or if its
        session has another request at this time."""
        name = f"@{asked}"
        if asked is None or self.scheduler.phase(name) in (Phase.WAITING, Phase.RUNNING):
            return f"#{next(self._numbers)}"
        self._used[name] = monotonic()
        return name

    def _request_of(self, session: str, turn: RoutedTurn) -> TurnRequest:
        """The turn as the scheduler takes it; no engine could hold more than its KV cache."""
        largest = max(
            (self.scheduler.budget(name).total for name in self.serving),
            default=self._largest or turn.prompt_tokens + (turn.max_new_tokens or 1),
        )
        prompt = min(turn.prompt_tokens, largest - 1)
        longest = max(prompt + 1, min(self._longest or largest, largest))
        new = longest - prompt
        if turn.max_new_tokens is not None:
            new = min(new, turn.max_new_tokens)
        group = group_of(session) or session
        return TurnRequest(session, group, prompt, new)

    # ------------------------------------------------------------------ turns

    async def route(
        self, turn: RoutedTurn, asked: str | None, headers: Mapping[str, str], sink: AnswerSink
    ) -> None:
        """Forward one request and pass its answer on; raises InfrastructureError by name."""
        session = self._session_name(asked)
        request = self._request_of(session, turn)
        self.scheduler.submit(request, monotonic())
        try:
            meter = await self._run(session, turn, headers, sink)
        except BaseException:
            self.scheduler.turn_failed(session)
            raise
        else:
            new = meter.new_tokens if meter is not None else 0
            self.counters.new_tokens += new
            if meter is not None and self.scheduler.phase(session) is Phase.RUNNING:
                tokens = request.prompt_tokens + new
                self.scheduler.turn_ended(
                    session, tokens, truncated=meter.truncated, now=monotonic()
                )
            else:  # refused by the server, or it died right after its answer
                self.scheduler.turn_failed(session)
        finally:
            self._ready.pop(session, None)
            if session in self._used:
                self._used[session] = monotonic()
            else:
                self.scheduler.end(session)
            self._dispatch()

    async def _run(
        self, session: str, turn: RoutedTurn, headers: Mapping[str, str], sink: AnswerSink
    ) -> AnswerMeter | None:
        """Run a submitted turn, on another server if the first one dies; None if refused."""
        for attempt in itertools.count(1):
            backend = await self._placement(session)
            life = backend.life
            try:
                return await self._exchange(backend, turn, headers, sink)
            except EngineError as error:
                self._lose(backend, life, error)
                if sink.started:
                    raise EngineError(f"{backend.name} failed during its answer: {error}") from None
                if attempt == ATTEMPTS:
                    raise EngineError(
                        f"{ATTEMPTS} servers failed before they answered, the last one "
                        f"{backend.name}: {error}"
                    ) from None
                self.counters.retried += 1
        raise AssertionError("unreachable")

    async def _placement(self, session: str) -> Backend:
        """Wait until the scheduler places the session's turn."""
        asked = monotonic()
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._placed[session] = future
        try:
            self._dispatch()
            placement = self._ready.pop(session, None)
            if placement is None:
                async with asyncio.timeout(self.limits.wait_s):
                    placement = await future
        except TimeoutError:
            raise DeadlineError(
                f"no server took the request within {self.limits.wait_s:g} s (--wait-s): "
                f"{len(self.serving)} of {len(self.backends)} serve, "
                f"{self.scheduler.waiting} requests wait"
            ) from None
        finally:
            self._placed.pop(session, None)
            self.counters.wait_s += monotonic() - asked
        self.counters.moved += placement.moved
        return self.backends[placement.engine]

    def _dispatch(self) -> None:
        """Carry out the scheduler's placements. vLLM drops evicted prefixes by itself."""
        for placement in self.scheduler.decide(monotonic()).placements:
            future = self._placed.get(placement.session)
            if future is None or future.done():
                self._ready[placement.session] = placement
            else:
                future.set_result(placement)

    async def _exchange(
        self, backend: Backend, turn: RoutedTurn, headers: Mapping[str, str], sink: AnswerSink
    ) -> AnswerMeter | None:
        """Forward a turn to one server and pass the answer on; None if the server refused it."""
        async with (
            self._silence(backend) as heard,
            backend.request("POST", turn.path, turn.body, headers) as response,
        ):
            heard()
            content_type = response.headers.get("content-type", "application/json")
            if response.status >= 500:
                await self._check_health(backend, response)
            streamed = content_type.startswith(EVENT_STREAM)
            meter = AnswerMeter(streamed=streamed)
            if not streamed:
                body = await response.body()
                meter.feed(body)
                await sink.start(response.status, content_type)
                await sink.part(body, more=False)
            else:
                await sink.start(response.status, content_type)
                async for part in response.parts():
                    heard()
                    meter.feed(part)
                    await sink.part(part, more=True)
                await sink.part(b"", more=False)
        self.counters.turns[backend.name] += 1
        if response.status >= 400:
            return None
        prompt = meter.prompt_tokens
        if turn.text_bytes and prompt is not None:
            self.scale.observe(turn.text_bytes, prompt)
        return meter

    async def _check_health(self, backend: Backend, response: HttpResponse) -> None:
        """After a status of 5xx: EngineError if the server is not well, so that the request goes to
        another one. A server that is well means its answer, which then goes to the client."""
        try:
            await backend.health()
        except InfrastructureError as error:
            raise EngineError(f"status {response.status}, and {error}") from None

    @asynccontextmanager
    async def _silence(self, backend: Backend) -> AsyncIterator[Callable[[], None]]:
        """Bound the time without a byte from the server; the yielded function restarts it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.answer_s) as timeout:
                yield lambda: timeout.reschedule(loop.time() + self.limits.answer_s)
        except TimeoutError:
            raise DeadlineError(
                f"{backend.name} sent nothing for {self.limits.answer_s:g} s (--answer-s)"
            ) from None

    async def ask_any(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """Ask the first server that serves, outside of the schedule; status, type and body."""
        for name in self.serving:
            backend, life = self.backends[name], self.backends[name].life
            try:
                async with (
                    self._silence(backend),
                    backend.request(method, path, body, headers) as response,
                ):
                    content_type = response.headers.get("content-type", "application/json")
                    return response.status, content_type, await response.body()
            except EngineError as error:
                self._lose(backend, life, error)
        raise EngineError(f"no server serves: {self.troubles()}")

    def troubles(self) -> str:
        """Why servers do not serve."""
        return "; ".join(f"{b.name}: {b.trouble}" for b in self.backends.values() if b.trouble)

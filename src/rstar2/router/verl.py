"""The scheduler as a load balancer for verl. Only verl imports this module; it needs Ray.

In verl's configuration `actor_rollout_ref.rollout.router_config_path` names a file with

    router_class: rstar2.router.verl.ScheduledServers
    max_sequences: 256   # the servers' max_num_seqs
    idle_s: 60           # a rollout without a turn for this time counts as ended

and `actor_rollout_ref.rollout.disable_log_stats` must be false: sizes, loads and speeds come from
the `/metrics` of the vLLM servers. verl's own balancer sends a request at once to the server with
the fewest; this one lets it wait until a server takes it (docs/scheduler.md).

verl does not tell a balancer how many tokens a turn sampled, nor when a rollout has ended. Every
sequence advances by one token per step, so the steps of its server between start and end of a turn
stand for its tokens, and the next prompt corrects them. A rollout ends after `idle_s`, or when verl
clears its sticky sessions between phases.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray

from rstar2.config import SchedulerConfig
from rstar2.errors import RstarError
from rstar2.rollout.scheduler import Phase, Placement, Scheduler, TurnRequest
from rstar2.router.backend import Backend

log = logging.getLogger(__name__)

POLL_S = 1.0
MOST_WAITING = 1_000_000
"""Calls that Ray lets wait at once. Its default of 1,000 would keep releases from arriving."""


@dataclass(slots=True)
class _BalancedServer:
    """One of verl's servers."""

    handle: Any
    backend: Backend
    watch: asyncio.Task[None] | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it was asked for its size, whether it answered or not."""
    longest: int = 0
    steps: int = 0
    """As last reported."""
    reported: float = 0.0
    rate: float = 0.0
    """Steps per second between the last two reports."""

    def steps_at(self, now: float) -> float:
        return self.steps + self.rate * (now - self.reported)


@dataclass(frozen=True, slots=True)
class _AcquiredTurn:
    """A turn that runs."""

    session: str
    server: str
    prompt: int
    most: int
    start: float
    """The server's steps when it started."""


class SchedulerBalancer:
    """verl's `RequestLoadBalancer`; `ScheduledServers` is the Ray actor of it."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        self.scheduler = Scheduler(SchedulerConfig())
        self._max_sequences = int(config.get("max_sequences", 256))
        self._idle_s = float(config.get("idle_s", 60.0))
        self._servers: dict[str, _BalancedServer] = {}
        self._placed: dict[str, asyncio.Future[Placement]] = {}
        self._turns: dict[str, list[_AcquiredTurn]] = {}
        """Running turns by request; more than one only if a request repeats its id."""
        self._used: dict[str, float] = {}
        """When the sessions without a running turn had their last one."""
        self._numbers = itertools.count()
        self.add_servers(servers)

    # ------------------------------------------------------------------ what verl calls

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids", "sampling_params"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def acquire_server(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[str, Any]:
        """Wait until a server takes the turn."""
        await self._join_new()
        longest = max((server.longest for server in self._servers.values()), default=0)
        if not longest:
            raise RuntimeError("no server that reports its load: is disable_log_stats false?")
        session, prompt = request_id, min(len(prompt_ids), longest - 1)
        if self.scheduler.phase(session) not in (None, Phase.HOLDING):
            session = f"{request_id}#{next(self._numbers)}"
        asked = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        most = min(longest - prompt, int(asked)) if asked else longest - prompt
        self._used.pop(session, None)
        self.scheduler.submit(TurnRequest(session, session, prompt, most), monotonic())
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._placed[session] = future
        try:
            self._decide()
            name = (await future).engine
        except BaseException:
            self.scheduler.end(session)
            raise
        finally:
            del self._placed[session]
        server = self._servers[name]
        turn = _AcquiredTurn(session, name, prompt, most, server.steps_at(monotonic()))
        self._turns.setdefault(request_id, []).append(turn)
        return name, server.handle

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """The request's turn on this server has ended."""
        turns = self._turns.get(request_id or "", [])
        turn = next((turn for turn in turns if turn.server == server_id), None)
        if turn is None or request_id is None:
            return  # its server was removed
        turns.remove(turn)
        if not turns:
            del self._turns[request_id]
        now = monotonic()
        steps = self._servers[server_id].steps_at(now) - turn.start
        sampled = min(turn.most, max(1, round(steps)))
        truncated = sampled == turn.most
        self.scheduler.turn_ended(turn.session, turn.prompt + sampled, truncated=truncated, now=now)
        self._used[turn.session] = now
        self._decide()

    def add_servers(self, servers: dict[str, Any]) -> None:
        """They take turns once they have told their size."""
        for name, handle in servers.items():
            backend = Backend(f"http://{name}", self._max_sequences)
            self._servers[name] = _BalancedServer(handle, backend)

    async def remove_servers(self, server_ids: list[str]) -> None:
        """They take no more turns; verl aborts those that run there."""
        for name in server_ids:
            server = self._servers.pop(name, None)
            if server is None:
                continue
            for session in self.scheduler.engine_lost(name):
                self.scheduler.end(session)
            for request, turns in list(self._turns.items()):
                self._turns[request] = [turn for turn in turns if turn.server != name]
            if server.watch is not None:
                server.watch.cancel()
            await server.backend.close()

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        return sum(turn.server == server_id for turns in self._turns.values() for turn in turns)

    def get_total_inflight(self) -> int:
        return sum(map(len, self._turns.values()))

    def get_status(self) -> dict[str, Any]:
        return {
            "servers": {name: self.get_inflight_count(name) for name in self._servers},
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._servers),
            "waiting": self.scheduler.waiting,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """All rollouts without a running turn have ended."""
        cleared = len(self._used)
        self._end_idle(before=monotonic())
        return {"cleared_entries": cleared, "server_loads": self.get_status()["servers"]}

    # ------------------------------------------------------------------ the scheduler

    def _decide(self) -> None:
        for placement in self.scheduler.decide(monotonic()).placements:
            future = self._placed[placement.session]
            if not future.done():  # a cancelled call is about to end its session
                future.set_result(placement)

    def _end_idle(self, before: float) -> None:
        for session in [name for name, used in self._used.items() if used <= before]:
            del self._used[session]
            self.scheduler.end(session)

    async def _join_new(self) -> None:
        """Ask servers that were added for their sizes, and watch them from then on."""
        for server in self._servers.values():
            if server.watch is None:
                server.watch = asyncio.ensure_future(self._watch(server))
        await asyncio.gather(*(server.asked.wait() for server in self._servers.values()))

    async def _watch(self, server: _BalancedServer) -> None:
        """Tell the scheduler the size and, once a second, the load of a server."""
        name = next(name for name, other in self._servers.items() if other is server)
        while True:
            try:
                if not self.scheduler.knows(name):
                    capacity = await server.backend.capacity()
                    server.longest = capacity.max_length
                    self.scheduler.join(name, capacity, 0)
                load, now = await server.backend.load(), monotonic()
                if server.reported:
                    server.rate = (load.steps - server.steps) / max(1e-3, now - server.reported)
                server.steps, server.reported = load.steps, now
                self.scheduler.load_reported(name, load, now)
            except RstarError as error:
                log.warning("%s does not report its load: %s", name, error)
            server.asked.set()
            self._end_idle(before=monotonic() - self._idle_s)
            self._decide()
            await asyncio.sleep(POLL_S)


ScheduledServers = ray.remote(max_concurrency=MOST_WAITING)(SchedulerBalancer)

"""An engine on some node of the cluster, as the fleet sees it.

`start` finds a place, makes the host there and connects; while it lives, `start` does nothing. So
the fleet's own way of bringing engines back (start, publish, prove, join) holds on a cluster too:
an engine whose node was lost comes back on another, or stays away until there is room.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2.cluster import nodes
from rstar2.cluster.actors import EngineActor
from rstar2.cluster.engine_http import CONTROL_DEADLINE_S, EngineClient
from rstar2.cluster.nodes import NodeError
from rstar2.cluster.placement import Ledger, Need
from rstar2.config import Recipe
from rstar2.engine.base import WeightTransfer, WeightUpdate
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling

log = logging.getLogger(__name__)

PING_DEADLINE_S = 20.0
STOP_DEADLINE_S = 15.0


class RemoteEngine:
    """`base.Engine` over an EngineActor."""

    weight_transfer: WeightTransfer = "files"

    def __init__(
        self, need: Need, recipe: Recipe, model: Path | str, ledger: Ledger, notify: Any
    ) -> None:
        self.name = need.name
        self._need, self._recipe, self._model = need, recipe, str(model)
        self._ledger, self._notify = ledger, notify
        self._actor: Any = None
        self._client: EngineClient | None = None
        self._capacity: EngineCapacity | None = None
        self._life = asyncio.Lock()
        self._releases: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Have a host that answers; raises EngineError where none has room or comes up."""
        async with self._life:
            if self._client is not None:
                if await self._answers():
                    return
                await self._end()
            await self._begin()

    async def _answers(self) -> bool:
        assert self._client is not None
        try:
            async with asyncio.timeout(PING_DEADLINE_S):
                await self._client.load()
        except (EngineError, DeadlineError, TimeoutError):
            return False
        return True

    async def _begin(self) -> None:
        place = self._ledger.take(self._need)
        if place is None:
            raise EngineError(f"{self.name}: no node has room for it")
        assert self._recipe.cluster is not None
        start_s, token = self._recipe.cluster.start_s, secrets.token_hex(16)
        try:
            args = (self.name, self._recipe, self._model, place.gpus)
            self._actor = nodes.make_actor(EngineActor, place, self._need.cpus, *args)
            starting = self._actor.start.remote(place.node.address, token)
            url, pids = await nodes.answer(starting, f"{self.name} starts", start_s)
            self._client = EngineClient(self.name, url, token)
            self._capacity = await self._client.capacity()
        except BaseException as error:
            await self._end()
            if isinstance(error, NodeError):
                raise EngineError(str(error)) from error
            raise
        self._notify("placed", part=self.name, node=place.node.address, url=url, pids=pids)

    async def close(self) -> None:
        """End the engine and give its place back. Idempotent."""
        async with self._life:
            await self._end(gently=True)

    async def _end(self, *, gently: bool = False) -> None:
        actor, self._actor = self._actor, None
        client, self._client = self._client, None
        if actor is not None:
            if gently:
                try:
                    await nodes.answer(actor.stop.remote(), f"{self.name} stops", STOP_DEADLINE_S)
                except (NodeError, DeadlineError) as error:
                    self._notify("not_stopped", part=self.name, why=str(error))
            nodes.kill(actor)
        if client is not None:
            await client.close()
            await asyncio.gather(*self._releases, return_exceptions=True)
        self._ledger.release(self.name)

    async def abort(self) -> None:
        """Kill a host that hangs or is lost: calls that wait for it fail at once."""
        async with self._life:
            await self._end()

    def _alive(self) -> EngineClient:
        if self._client is None:
            raise EngineError(f"{self.name}: not started")
        return self._client

    # ------------------------------------------------------------------ calls

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation there."""
        return await self._alive().generate(
            prompt_ids, sampling, session=session, deadline_s=deadline_s
        )

    async def release(self, session: str) -> None:
        """Let a session's prefix go; told in the background, as nobody needs to wait for it."""
        if self._client is not None:
            task = asyncio.ensure_future(self._release(self._client, session))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, client: EngineClient, session: str) -> None:
        try:
            await client.release(session)
        except (EngineError, DeadlineError) as error:  # the next turn or look will find it dead
            log.info("%s was not released: %s", session, error)

    def capacity(self) -> EngineCapacity:
        """What the engine said it can hold when it was started."""
        if self._capacity is None:
            raise EngineError(f"{self.name}: not started")
        return self._capacity

    async def load(self) -> EngineLoad:
        """What the engine is doing now."""
        return await self._alive().load()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs by the weights that serve."""
        return await self._alive().score(token_ids, CONTROL_DEADLINE_S)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Name the directory of the new weights; the engine's node reads them itself."""
        if update.path is None:
            raise UserError(f"{self.name}: version {update.version} must come as files")
        await self._alive().weights(update.version, update.path, hold=update.hold)

    async def resume(self) -> None:
        """Go on after an update with `hold`."""
        await self._alive().resume()

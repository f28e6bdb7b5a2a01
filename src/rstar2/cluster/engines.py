"""An engine on a node of the cluster, as `base.Engine`.

`start` reserves a place, creates the actor there and connects; while the engine answers, `start` is
a no-op. So the fleet recovers engines as on one machine (start, publish, verify, join): an engine
whose node was lost restarts on another node, or stays down until there is room.
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
from rstar2.engine.checksums import HeldWeights
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, UserError
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

    # ------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Start the engine on a node; EngineError if no node has room or the start fails."""
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
            url, pids = await nodes.answer(starting, f"start of {self.name}", start_s)
            self._client = EngineClient(self.name, url, token)
            self._capacity = await self._client.capacity()
        except BaseException as error:
            await self._end()
            if isinstance(error, NodeError):
                raise EngineError(str(error)) from error
            raise
        self._notify("placed", part=self.name, node=place.node.address, url=url, pids=pids)

    async def close(self) -> None:
        """Stop the engine gracefully and release its place. Idempotent."""
        async with self._life:
            await self._end(graceful=True)

    async def _end(self, *, graceful: bool = False) -> None:
        actor, self._actor = self._actor, None
        client, self._client = self._client, None
        if actor is not None:
            if graceful:
                try:
                    await nodes.answer(actor.stop.remote(), f"stop of {self.name}", STOP_DEADLINE_S)
                except (NodeError, DeadlineError) as error:
                    self._notify("not_stopped", part=self.name, why=str(error))
            nodes.kill(actor)
        if client is not None:
            await client.close()
            await asyncio.gather(*self._releases, return_exceptions=True)
        self._ledger.release(self.name)

    async def abort(self) -> None:
        """Kill an engine that hangs or is lost; its pending calls fail immediately."""
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
        """Sample a continuation on the engine's node."""
        return await self._alive().generate(
            prompt_ids, sampling, session=session, deadline_s=deadline_s
        )

    async def release(self, session: str) -> None:
        """Release a session's cached prefix in the background: no caller needs to wait."""
        if self._client is not None:
            task = asyncio.ensure_future(self._release(self._client, session))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, client: EngineClient, session: str) -> None:
        try:
            await client.release(session)
        except InfrastructureError as error:  # the next turn or check will notice
            log.info("session %s was not released: %s", session, error)

    def capacity(self) -> EngineCapacity:
        """The capacity that the engine reported at its start."""
        if self._capacity is None:
            raise EngineError(f"{self.name}: not started")
        return self._capacity

    async def load(self) -> EngineLoad:
        """Current load of the engine."""
        return await self._alive().load()

    async def held_weights(self) -> HeldWeights:
        """Checksums of the weights on the engine's node."""
        return await self._alive().held_weights()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, under the current weights."""
        return await self._alive().score(token_ids, CONTROL_DEADLINE_S)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Install weights from a directory, which the engine's node reads."""
        if update.path is None:
            raise UserError(f"{self.name}: version {update.version} must be given as files")
        await self._alive().weights(update.version, update.path, hold=update.hold)

    async def sleep(self) -> None:
        """Give back the memory of the node's GPUs."""
        if self._client is not None:
            await self._client.sleep()

    async def wake(self) -> None:
        """Take the memory of the node's GPUs again."""
        if self._client is not None:
            await self._client.wake()

    async def resume(self) -> None:
        """Let running requests continue after an update with `hold`."""
        await self._alive().resume()

"""A code environment on one node, owned by the client's endpoint as a local one is.

The endpoint watches and revives it: `wait` returns when the server or its host is gone, `start`
makes a new host on the same node. A node that is gone cannot be started on; its endpoint stays
down, its calls go to the others (same id), and it costs one try every two seconds.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rstar2.cluster import nodes
from rstar2.cluster.actors import CodeEnvActor
from rstar2.cluster.nodes import NodeError
from rstar2.cluster.placement import Node, Place
from rstar2.codeenv import deadlines
from rstar2.codeenv.wire import ServerReady
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, DeadlineError

FOREVER_S = 1e9


class RemoteServer:
    """The methods of `codeenv.client.owned.LocalServer`, on another node."""

    def __init__(self, config: CodeEnvConfig, node: Node, notify: Any) -> None:
        self.config, self.node = config, node
        self.token = ""
        self.running = False
        self.gone = False
        """Set when the node has left the cluster: it is not started there again."""
        self._notify = notify
        self._actor: Any = None
        self._end: asyncio.Future[int] | None = None
        """One wait for the end of this life, shared by all who ask."""

    @property
    def name(self) -> str:
        return f"codeenv-{self.node.id[:6]}"

    async def start(self) -> ServerReady:
        """Make the host on its node and start the server in it."""
        if self.gone:
            raise CodeEnvError(f"{self.name}: its node has left the cluster")
        self._actor = nodes.make_actor(
            CodeEnvActor, Place(self.node), 0, self.config, self.node.address
        )
        try:
            url, self.token, pids = await nodes.answer(
                self._actor.start.remote(), f"{self.name} starts", deadlines.REMOTE_START_S
            )
        except NodeError as error:
            nodes.kill(self._actor)
            self._actor = None
            raise CodeEnvError(str(error)) from error
        self.running = True
        self._end = asyncio.ensure_future(self._until_ended(self._actor))
        self._notify("placed", part=self.name, node=self.node.address, url=url, pids=pids)
        return ServerReady(url=url)

    async def wait(self) -> int:
        """Wait for the server or its host to end."""
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def _until_ended(self, actor: Any) -> int:
        try:
            status: int = await nodes.answer(actor.ended.remote(), self.name, FOREVER_S)
        except NodeError:
            status = -1
        if self.running and actor is self._actor:
            self.running = False
            self._notify("lost", part=self.name)
        return status

    async def stop(self) -> None:
        """End the host, in order if it lives."""
        actor, self._actor = self._actor, None
        alive, self.running = self.running, False
        end, self._end = self._end, None
        if end is not None:
            end.cancel()
        if actor is None:
            return
        if alive and not self.gone:
            try:
                await nodes.answer(
                    actor.stop.remote(), f"{self.name} stops", deadlines.REMOTE_STOP_S
                )
            except (NodeError, DeadlineError) as error:
                self._notify("not_stopped", part=self.name, why=str(error))
        nodes.kill(actor)

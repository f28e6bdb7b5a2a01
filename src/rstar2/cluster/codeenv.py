"""A code environment on one node, owned by the client's endpoint like a local one.

The endpoint watches and restarts it: `wait` returns when the server or its actor ends, `start`
creates a new actor on the same node. If the node is lost, `start` fails: the endpoint stays down
and retries every two seconds, and its calls go to the other endpoints with the same ids.
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
        self.node_lost = False
        """Set when the node has left the cluster; `start` then raises CodeEnvError."""
        self._notify = notify
        self._actor: Any = None
        self._end: asyncio.Future[int] | None = None
        """Done when the current server or its actor ends; shared by all callers of `wait`."""

    @property
    def name(self) -> str:
        return f"codeenv-{self.node.id[:6]}"

    async def start(self) -> ServerReady:
        """Create the actor on its node and start the server in it."""
        if self.node_lost:
            raise CodeEnvError(f"{self.name}: its node has left the cluster")
        self._actor = nodes.make_actor(
            CodeEnvActor, Place(self.node), 0, self.config, self.node.address
        )
        try:
            url, self.token, pids = await nodes.answer(
                self._actor.start.remote(), f"start of {self.name}", deadlines.REMOTE_START_S
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
        """Wait for the server or its actor to end."""
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
        """Stop the server, gracefully if it is alive, and end the actor."""
        actor, self._actor = self._actor, None
        alive, self.running = self.running, False
        end, self._end = self._end, None
        if end is not None:
            end.cancel()
        if actor is None:
            return
        if alive and not self.node_lost:
            try:
                await nodes.answer(
                    actor.stop.remote(), f"stop of {self.name}", deadlines.REMOTE_STOP_S
                )
            except (NodeError, DeadlineError) as error:
                self._notify("not_stopped", part=self.name, why=str(error))
        nodes.kill(actor)

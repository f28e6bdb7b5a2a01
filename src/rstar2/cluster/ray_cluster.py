"""Starts and supervises engines, learner ranks and code environments on a Ray cluster.

    fault              detection                                 recovery
    engine process     its connection breaks: immediate          other engines take its turns by id;
                       (idle: at the next load check)            it restarts, stale until verified
    engine hangs       cannot score within engine.hang_s         its actor is killed; then as above
    code environment   its actor reports it: immediate           other nodes take its calls by id;
                                                                 it restarts on its node
    learner rank       its call fails: immediate                 a new group resumes from the last
                                                                 checkpoint
    rank hangs         no sign of life for learner.hang_s        its group is killed; then as above
    node               Ray's health check, every watch_s         all of the above, on other nodes
    node joins         every watch_s                             it gets a code environment, and
                                                                 missing engines at the next publish
    driver             Ray ends its actors                       the same command resumes the run

`RayCluster` keeps no state that a resumed run would need.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rstar2.cluster import nodes
from rstar2.cluster.codeenv import RemoteServer
from rstar2.cluster.engines import RemoteEngine
from rstar2.cluster.learner import RemoteRanks
from rstar2.cluster.nodes import NodeError
from rstar2.cluster.placement import Ledger, Node, check_room, engine_need
from rstar2.cluster.weight_copies import WeightCopies
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import Recipe

log = logging.getLogger(__name__)

Notify = Callable[..., None]


class RayCluster:
    """The parts of one run on one cluster."""

    def __init__(self, recipe: Recipe, known_nodes: tuple[Node, ...], notify: Notify) -> None:
        assert recipe.cluster is not None
        self.recipe, self.notify = recipe, notify
        self.watch_s = recipe.cluster.watch_s
        self.ledger = Ledger(known_nodes)
        self.weights = WeightCopies(self.ledger)
        self._engines: list[RemoteEngine] = []
        self._servers: dict[str, RemoteServer] = {}
        self._tools: CodeEnvClient | None = None
        self._looking = asyncio.Lock()
        self._watching = asyncio.ensure_future(self._watch())

    def engines(self, model: Path | str) -> list[RemoteEngine]:
        """The recipe's engines, not yet started."""
        gpus = self.recipe.engine.kind == "vllm" and any(n.gpus for n in self.ledger.nodes)
        self._engines = [
            RemoteEngine(
                engine_need(self.recipe, index, gpus=gpus),
                self.recipe,
                model,
                self.ledger,
                self.notify,
            )
            for index in range(self.recipe.engine.count)
        ]
        return self._engines

    def ranks(self) -> RemoteRanks:
        """Learner ranks, not yet started."""
        return RemoteRanks(self.recipe, self.ledger, self.notify)

    async def tools(self) -> CodeEnvClient:
        """A client of one code environment per node, or of those in `codeenv.urls`."""
        config = self.recipe.codeenv
        if config.urls:
            return await CodeEnvClient.start(config)
        servers = [self._server(node) for node in self.ledger.nodes]
        self._tools = await CodeEnvClient.start(config, servers)
        return self._tools

    def _server(self, node: Node) -> RemoteServer:
        server = RemoteServer(self.recipe.codeenv, node, self.notify)
        self._servers[node.id] = server
        return server

    # ------------------------------------------------------------------ supervision

    async def _watch(self) -> None:
        """Check the nodes periodically."""
        while True:
            await asyncio.sleep(self.watch_s)
            try:
                await self.look()
            except NodeError as error:
                log.warning("the nodes could not be listed: %s", error)

    async def look(self) -> None:
        """Handle nodes that left or joined since the last check."""
        async with self._looking:
            alive = {node.id: node for node in await asyncio.to_thread(nodes.list_nodes)}
            known = {node.id: node for node in self.ledger.nodes}
            for node_id in known.keys() - alive.keys():
                await self._left(known[node_id])
            for node_id in alive.keys() - known.keys():
                await self._joined(alive[node_id])

    async def _left(self, node: Node) -> None:
        """Handle a lost node: pending calls to its engines fail immediately."""
        parts = self.ledger.leave(node.id)
        log.warning("node %s was lost, with %s", node.address, ", ".join(parts) or "no part")
        self.notify("node_lost", node=node.id, address=node.address, parts=list(parts))
        if node.id in self._servers:
            self._servers.pop(node.id).node_lost = True
        await asyncio.gather(*(e.abort() for e in self._engines if e.name in parts))

    async def _joined(self, node: Node) -> None:
        """Handle a new node: it gets a code environment now, and engines when they start."""
        self.ledger.join(node)
        self.notify("node_joined", node=node.id, address=node.address)
        if self._tools is not None:
            self._tools.add(self._server(node))

    async def close(self) -> None:
        """Stop the node checks; callers close the parts that they requested."""
        self._watching.cancel()
        self.weights.close()
        results = await asyncio.gather(self._watching, return_exceptions=True)
        if isinstance(results[0], Exception):
            log.warning("the node checks had failed: %r", results[0])


@asynccontextmanager
async def open_ray_cluster(recipe: Recipe, notify: Notify) -> AsyncIterator[RayCluster]:
    """Join or start the cluster, check that the recipe fits on it, and watch its nodes."""
    assert recipe.cluster is not None
    wanted = (
        recipe.engine.count * recipe.cluster.engine_cpus
        + recipe.learner.ranks * recipe.cluster.rank_cpus
    )
    await asyncio.to_thread(nodes.connect, recipe.cluster.address, cpus=wanted)
    try:
        known_nodes = await asyncio.to_thread(nodes.list_nodes)
        check_room(recipe, known_nodes)
        cluster = RayCluster(recipe, known_nodes, notify)
        try:
            yield cluster
        finally:
            await cluster.close()
    finally:
        await asyncio.to_thread(nodes.disconnect)

"""The Ray actors that run on the nodes, one class per kind of part.

An actor runs its part in a child process or in its own, and ends with the driver: Ray kills the
actors of a driver that has ended, and child processes end with their parent (PDEATHSIG or a pipe).
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from rstar2.cluster.nodes import visible
from rstar2.config import CodeEnvConfig, Recipe
from rstar2.descriptors import raise_descriptor_limit
from rstar2.errors import EngineError

SERVE_DEADLINE_S = 30.0


class EngineActor:
    """An engine and its HTTP server."""

    def __init__(self, name: str, recipe: Recipe, model: str, gpus: tuple[int, ...]) -> None:
        os.environ.update(visible(gpus))
        self.name, self.recipe, self.model = name, recipe, model
        self._engine: Any = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, address: str, token: str) -> tuple[str, list[int]]:
        """Start the engine and its HTTP server; returns the URL and the process ids."""
        import uvicorn

        from rstar2.cluster.engine_http import KEEP_SERVER_S, EngineApp
        from rstar2.http_server import SignalFreeServer

        raise_descriptor_limit()
        self._engine = make_engine(self.name, self.recipe, self.model)
        await self._engine.start()
        config = uvicorn.Config(
            EngineApp(self._engine, token),
            host=address,
            port=0,
            log_level="error",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=KEEP_SERVER_S,
        )
        self._server = SignalFreeServer(config)
        self._serving = asyncio.ensure_future(self._server.serve())
        try:
            async with asyncio.timeout(SERVE_DEADLINE_S):
                while not self._server.started:
                    if self._serving.done():
                        self._serving.result()
                        raise EngineError(f"{self.name}: its HTTP server ended during startup")
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise EngineError(f"{self.name}: its HTTP server did not start") from error
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://{address}:{port}", [os.getpid(), *_children()]

    async def stop(self) -> None:
        """Stop the engine gracefully."""
        if self._server is not None:
            self._server.should_exit = True
        if self._engine is not None:
            await self._engine.close()


def make_engine(name: str, recipe: Recipe, model: str) -> Any:
    """Create an engine of the recipe's kind on this node."""
    from rstar2.engine.make import embedded_engine, gpus_here, server_settings

    if recipe.engine.kind == "embedded":
        return embedded_engine(name, recipe, model)
    from dataclasses import replace

    from rstar2.engine.vllm import VllmEngine
    from rstar2.plan.share import beside_learner

    colocated = recipe.cluster is not None and recipe.cluster.colocate
    # This actor sees the GPUs of its one engine only, all of which have a learner rank or none.
    alone = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"count": 1})})
    settings = server_settings(
        alone, model, 0, gpus_here()[:1], beside_learner(recipe) if colocated else None
    )
    size = recipe.cluster.gpus_per_engine if recipe.cluster is not None else 1
    parallel = (*settings.arguments, "--tensor-parallel-size", str(size)) if size > 1 else ()
    settings = replace(settings, arguments=parallel or settings.arguments, environment={})
    return VllmEngine(name, server=settings, seeded=recipe.engine.seeded)


class RankActor:
    """One learner rank; all ranks receive the same calls in the same order."""

    def __init__(self, rank: int, gpus: tuple[int, ...]) -> None:
        os.environ.update(visible(gpus))
        self.rank, self.gpus = rank, gpus
        self._learner: Any = None
        self._marks = 0

    def rendezvous(self, address: str) -> tuple[str, int]:
        """Address at which the ranks form their process group, and this process's id."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}", os.getpid()

    def join(self, address: str, ranks: int, args: tuple[Any, ...], options: dict[str, Any]) -> int:
        """Join the process group and create the learner; returns the process id."""
        import torch
        import torch.distributed as dist

        from rstar2.learner.group import CALL_S, collectives
        from rstar2.learner.learner import Learner

        cuda = bool(self.gpus) and torch.cuda.is_available()
        if not cuda and not args[1].threads:
            torch.set_num_threads(1)
        dist.init_process_group(
            collectives(args[1], cuda=cuda),
            init_method=address,
            rank=self.rank,
            world_size=ranks,
            timeout=timedelta(seconds=CALL_S),
        )
        device = "cuda:0" if cuda else "cpu"
        self._learner = Learner(*args, **{**options, "device": device})
        self._learner.on_progress = self._mark
        return os.getpid()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call one method of the learner; only rank 0 returns the result."""
        self._mark()
        value = getattr(self._learner, method)(*args)
        return value if self.rank == 0 else None

    def _mark(self) -> None:
        self._marks += 1

    def marks(self) -> int:
        """Micro-batches and calls so far; answered during a call, in a thread of its own."""
        return self._marks


class CodeEnvActor:
    """A code environment server."""

    def __init__(self, config: CodeEnvConfig, address: str) -> None:
        self.config, self.address = config, address
        self._server: Any = None

    async def start(self) -> tuple[str, str, list[int]]:
        """Start the server; returns its URL, its token and the process ids."""
        from rstar2.codeenv.client.owned import LocalServer

        self._server = LocalServer(self.config, host=self.address)
        ready = await self._server.start()
        return ready.url, self._server.token, [os.getpid(), self._server.pid]

    async def ended(self) -> int:
        """Wait for the server's process to end."""
        return int(await self._server.wait())

    async def stop(self) -> None:
        """Stop the server gracefully."""
        if self._server is not None:
            await self._server.stop()


def _children() -> list[int]:
    """Process ids of this process's children."""
    pids: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        pids += [int(pid) for pid in task.read_text().split()]
    return sorted(set(pids))

"""New weights on every node that has engines: one copy per node, without a shared file system.

Rank 0 writes an export to the memory of its own node (`/dev/shm`, or a temporary directory if it
does not fit). Each other node with engines receives the files once, in pieces through Ray's object
store, where a node that has a piece passes it on. All engines of a node read the same local files.
An engine whose node could not be reached gets no path; the others are not affected.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rstar2.cluster import nodes
from rstar2.cluster.nodes import NodeError
from rstar2.cluster.placement import Ledger, Node, Place
from rstar2.engine.base import Engine
from rstar2.errors import DeadlineError, EngineError
from rstar2.files import disk_full

log = logging.getLogger(__name__)

PIECE = 64 << 20
"""Bytes that are sent at once."""
PIECES_IN_FLIGHT = 8
ANSWER_S = 300.0
FAST_DIRECTORY = Path("/dev/shm")
PREFIX = "rstar2-weights-"


class FileStore:
    """Ray actor: the weight files of one node."""

    def prepare(self, size: int) -> str:
        """A new empty directory with room for `size` bytes, in memory if twice as many fit."""
        fits = FAST_DIRECTORY.is_dir() and shutil.disk_usage(FAST_DIRECTORY).free > 2 * size
        parent = FAST_DIRECTORY if fits else Path(tempfile.gettempdir())
        for other in (FAST_DIRECTORY, Path(tempfile.gettempdir())):
            remove_abandoned(other)
        return tempfile.mkdtemp(prefix=f"{PREFIX}{_namespace()}-{os.getpid()}-", dir=parent)

    def files(self, directory: str) -> list[tuple[str, int]]:
        """Names and sizes of all files below a directory."""
        root = Path(directory)
        found = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return [(str(path.relative_to(root)), path.stat().st_size) for path in found]

    def read(self, directory: str, name: str, offset: int, count: int) -> bytes:
        """One piece of a file."""
        with (Path(directory) / name).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def write(self, directory: str, name: str, offset: int, piece: bytes) -> None:
        """Write one piece of a file."""
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(piece)
        except OSError as error:
            raise disk_full(error, path, offset) or error from error

    def clear(self, directory: str) -> None:
        """Remove a directory."""
        shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of stores that were killed; those of other containers stay."""
    mine = f"{PREFIX}{_namespace()}-"
    for path in parent.glob(f"{mine}*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


class WeightCopies:
    """The stores of all nodes; called to spread one export (`learner.weights.Spread`)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stores: dict[str, Any] = {}

    @asynccontextmanager
    async def __call__(
        self, write: Any, size: int, engines: Sequence[Engine]
    ) -> AsyncIterator[dict[str, Path]]:
        """Let `write` write an export on rank 0's node, and copy it to the engines' nodes."""
        first = self._ledger.place_of("rank-0")
        if first is None:
            raise EngineError("rank 0 of the learner has no node that weights could come from")
        places = {engine.name: self._ledger.place_of(engine.name) for engine in engines}
        homes = {name: place.node for name, place in places.items() if place is not None}
        roots: dict[str, str] = {}
        try:
            roots[first.node.id] = await self._ask(first.node, "prepare", size)
            await write(Path(roots[first.node.id]) / "model")
            for node in {node.id: node for node in homes.values()}.values():
                if node.id != first.node.id:
                    try:
                        roots[node.id] = await self._ask(node, "prepare", size)
                    except (NodeError, DeadlineError) as error:
                        log.warning("no weights for the engines of %s: %s", node.address, error)
            await self._copy(first.node, roots)
            yield {
                name: Path(roots[node.id]) / "model"
                for name, node in homes.items()
                if node.id in roots
            }
        finally:
            for node_id, root in roots.items():
                self._stores[node_id].clear.remote(root)

    async def _copy(self, source: Node, roots: dict[str, str]) -> None:
        """Send all files of the source to the other nodes; a node that fails loses its root."""
        sending: deque[tuple[str, Any]] = deque()

        async def settle(limit: int) -> None:
            while len(sending) > limit:
                node_id, sent = sending.popleft()
                try:
                    await nodes.answer(sent, "copy of weights", ANSWER_S)
                except (NodeError, DeadlineError) as error:
                    if node_id in roots:
                        log.warning("weights did not reach node %s: %s", node_id[:6], error)
                        self._stores[node_id].clear.remote(roots.pop(node_id))

        root, store = roots[source.id], self._stores[source.id]
        for name, size in await self._ask(source, "files", root):
            for offset in range(0, max(1, size), PIECE):
                targets = [(n, r) for n, r in roots.items() if n != source.id]
                if not targets:
                    return
                piece = store.read.remote(root, name, offset, PIECE)
                for node_id, target in targets:
                    sent = self._stores[node_id].write.remote(target, name, offset, piece)
                    sending.append((node_id, sent))
                await settle(PIECES_IN_FLIGHT * len(targets))
        await settle(0)

    async def _ask(self, node: Node, method: str, *args: Any) -> Any:
        """Call the store of a node; it is made anew if it was lost."""
        if node.id not in self._stores:
            self._stores[node.id] = nodes.make_actor(FileStore, Place(node), 0)
        try:
            call = getattr(self._stores[node.id], method).remote(*args)
            return await nodes.answer(call, f"weights on {node.address}", ANSWER_S)
        except NodeError:
            del self._stores[node.id]
            raise

    def close(self) -> None:
        """End all stores."""
        for store in self._stores.values():
            nodes.kill(store)
        self._stores = {}

"""The server's side of a zygote: starts the process, requests workers, is notified of exits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rstar2.child import Child
from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import zygote
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError

if TYPE_CHECKING:
    from rstar2.codeenv.server.workers import WorkerLink


class WorkerLostError(CodeEnvError):
    """A worker or zygote exited without a reply."""


class ZygoteLink:
    """One zygote process and the workers it forked."""

    def __init__(self, flavour: str, functions: Mapping[str, str]) -> None:
        self.flavour = flavour
        self._functions = dict(functions)
        self._workers: dict[str, WorkerLink] = {}
        self._spawned: dict[str, asyncio.Future[int]] = {}
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self.alive = False
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    async def start(self) -> None:
        """Start the process and wait until it is warm."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        settings = json.dumps({"flavour": self.flavour, "functions": self._functions})
        try:
            self._child = Child(
                f"the {self.flavour} zygote",
                [*zygote.command(), settings, str(theirs.fileno())],
                parent_death_signal=None,  # it watches its control socket, and then cleans up
                grace_s=deadlines.ZYGOTE_STOP_S,
                environment=zygote.environment(),
                directory="/",
                descriptors=(theirs.fileno(),),
                quiet=not os.environ.get("RSTAR2_CODEENV_DEBUG"),
            )
        finally:
            theirs.close()
        self._control = ours
        try:
            async with asyncio.timeout(deadlines.ZYGOTE_WARM_UP_S):
                report = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        except TimeoutError:
            await self.close()
            raise DeadlineError(
                f"the {self.flavour} zygote was not warm in {deadlines.ZYGOTE_WARM_UP_S:g} s"
            ) from None
        if not report:
            await self.close()
            raise CodeEnvError(
                f"the {self.flavour} zygote ended during its warm-up: {self._child.describe_end()}"
            )
        self.ready = json.loads(report)
        self.alive = True
        self._reader = asyncio.create_task(self._listen(), name=f"zygote-{self.flavour}")

    async def _listen(self) -> None:
        assert self._control is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                packet = await loop.sock_recv(self._control, 1 << 16)
            except OSError:
                packet = b""
            if not packet:
                break
            self._on_message(json.loads(packet))
        self.alive = False
        for future in self._spawned.values():
            if not future.done():
                future.set_exception(WorkerLostError(f"the {self.flavour} zygote ended"))
        for link in list(self._workers.values()):
            link.on_exited(oom=False)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "spawned" in message or "failed" in message:
            name = message.get("spawned") or message["failed"]
            future = self._spawned.pop(name, None)
            if future is None or future.done():
                return
            if "pid" in message:
                future.set_result(message["pid"])
            else:
                future.set_exception(IsolationError(message["error"]))
        elif "exited" in message:
            link = self._workers.pop(message["exited"], None)
            if link is not None:
                link.on_exited(oom=message["oom"] > 0)

    async def spawn(self, link: WorkerLink) -> None:
        """Fork a worker into its jail, connect it to `link` and wait until it serves."""
        spec = link.spec
        if self._control is None or not self.alive:
            raise WorkerLostError(f"the {self.flavour} zygote has ended")
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._workers[spec.name] = link
        future: asyncio.Future[int] = loop.create_future()
        self._spawned[spec.name] = future
        try:
            message = json.dumps({"spec": asdict(spec)}).encode()
            socket.send_fds(self._control, [message], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(deadlines.SPAWN_S):
                link.on_spawned(await future)
            await loop.create_unix_connection(lambda: link, sock=ours)
            await link.greeted()
        except (OSError, TimeoutError) as error:
            ours.close()
            raise WorkerLostError(f"worker {spec.name} could not be started: {error!r}") from error
        except BaseException:
            link.kill()
            ours.close()
            raise
        finally:
            theirs.close()
            self._spawned.pop(spec.name, None)

    async def close(self) -> None:
        """Close the control socket: the zygote reaps its workers and ends, or is killed."""
        self.alive = False
        if self._reader is not None:
            self._reader.cancel()
            # The event loop must forget the socket before its number is used again.
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        if self._child is None:
            return
        if not self.ready:  # still warming up: it has no workers yet and does not listen
            self._child.kill()
        await self._child.stop()

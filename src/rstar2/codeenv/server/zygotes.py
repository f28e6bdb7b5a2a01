"""The server's side of the zygotes: `ZygoteLink` controls one process, `ZygotePool` keeps them all.

A zygote that dies is started again at once, for as long as the pool is open, so that no flavour is
lost for good. One that dies again soon after its start, or does not start, waits for a pause that
doubles up to REVIVE_MOST_S. A zygote that does not answer in SPAWN_S hangs and is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rstar2.child import Child
from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import warmup, zygote
from rstar2.codeenv.server import packages
from rstar2.codeenv.server.packages import InterpreterSetup
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError
from rstar2.tasks import cancel_all

if TYPE_CHECKING:
    from rstar2.codeenv.server.workers import WorkerLink

_log = logging.getLogger(__name__)


class WorkerLostError(CodeEnvError):
    """A worker or zygote exited without a reply."""


class ZygoteLink:
    """One zygote process and the workers it forked."""

    def __init__(self, flavour: str, functions: Mapping[str, str], setup: InterpreterSetup) -> None:
        self.flavour = flavour
        self._settings = packages.settings(flavour, functions, setup)
        self._python = sys.executable if flavour == "verify" else setup.python
        self._workers: dict[str, WorkerLink] = {}
        self._spawned: dict[str, asyncio.Future[int]] = {}
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self.alive = False
        self.ended = asyncio.Event()
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    async def start(self) -> None:
        """Start the process and wait until it is warm."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._child = Child(
                f"the {self.flavour} zygote",
                [*zygote.command(self._python), self._settings, str(theirs.fileno())],
                parent_death_signal=None,  # it watches its control socket, and then cleans up
                grace_s=deadlines.ZYGOTE_STOP_S,
                environment=zygote.environment(),
                directory="/",
                descriptors=(theirs.fileno(),),
                quiet=not os.environ.get("RSTAR2_CODEENV_DEBUG"),
            )
        except OSError as error:
            ours.close()
            raise CodeEnvError(
                f"the {self.flavour} zygote could not be started: {error}"
            ) from error
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
        self.ended.set()

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
            link.on_spawned(await self._forked(future))
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

    async def _forked(self, future: asyncio.Future[int]) -> int:
        """The pid of the new worker. A zygote that does not answer hangs: it is killed."""
        try:
            async with asyncio.timeout(deadlines.SPAWN_S):
                return await future
        except TimeoutError:
            if self._child is not None:
                self._child.kill()
            raise

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


class ZygotePool:
    """Starts every flavour and restarts those that die; see the module docstring."""

    def __init__(
        self,
        functions: Mapping[str, str],
        setup: InterpreterSetup | None = None,
        flavour_for: Callable[[bytes, Sequence[str]], str] = lambda code, packages: "plain",
    ) -> None:
        self.functions = dict(functions)
        self.setup = setup or InterpreterSetup()
        self._flavour_for = flavour_for
        """Which flavour a program runs in; warm-up programs run in theirs only."""
        self.restarts = 0
        self.live: dict[str, ZygoteLink] = {}
        """By flavour; those that are being started are not in it."""
        self._started: dict[str, asyncio.Future[ZygoteLink]] = {}
        """The current or next start of each flavour."""
        self._keepers: list[asyncio.Task[None]] = []

    async def get(self, flavour: str) -> ZygoteLink:
        """The live zygote of a flavour; waits while it is being started."""
        if flavour not in self._started:
            self._started[flavour] = asyncio.get_running_loop().create_future()
            keeper = asyncio.create_task(self._keep(flavour), name=f"keep-{flavour}")
            self._keepers.append(keeper)
        zygote = await asyncio.shield(self._started[flavour])
        if not zygote.alive:
            self._expect_start(flavour, zygote)
            zygote = await asyncio.shield(self._started[flavour])
        return zygote

    async def start_others(self) -> None:
        """Warm up the other flavours, one after the other, `base` first: it can run any program."""
        for flavour in ("base", *warmup.flavours(self.setup.packages)):
            await asyncio.gather(self.get(flavour), return_exceptions=True)  # _keep logs failures

    def _setup_of(self, flavour: str) -> InterpreterSetup:
        """The setup with the warm-up programs of one flavour."""
        setup = self.setup
        own = (
            p for p in setup.programs if self._flavour_for(p.encode(), setup.packages) == flavour
        )
        return replace(setup, programs=tuple(own))

    def _expect_start(self, flavour: str, ended: ZygoteLink | None = None) -> None:
        """From now on `get` waits for the next start, if it still returns the one that ended."""
        started = self._started[flavour]
        if ended is None or (started.done() and started.result() is ended):
            self._started[flavour] = asyncio.get_running_loop().create_future()

    async def _keep(self, flavour: str) -> None:
        """Start a flavour, and again whenever it has ended."""
        pause_s = 0.0
        while True:
            zygote = ZygoteLink(flavour, self.functions, self._setup_of(flavour))
            begun_s = time.monotonic()
            try:
                await zygote.start()
            except (CodeEnvError, DeadlineError) as error:
                _log.warning("the %s interpreter could not be started: %s", flavour, error)
                failed = self._started[flavour]
                self._expect_start(flavour)
                failed.set_exception(error)
                failed.exception()  # retrieved here: nothing may be waiting for this flavour
            except asyncio.CancelledError:
                await zygote.close()
                raise
            else:
                self.live[flavour] = zygote
                self._started[flavour].set_result(zygote)
                _report(zygote)
                await zygote.ended.wait()
                del self.live[flavour]
                self._expect_start(flavour, zygote)
                _log.warning("the %s interpreter ended and is started again", flavour)
                await zygote.close()
            self.restarts += 1
            if time.monotonic() - begun_s > deadlines.ZYGOTE_STABLE_S:
                pause_s = 0.0
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, deadlines.REVIVE_FIRST_S), deadlines.REVIVE_MOST_S)

    async def close(self) -> None:
        """End every zygote with its workers."""
        await cancel_all(self._keepers)
        for started in self._started.values():
            started.cancel()
        await asyncio.gather(*(zygote.close() for zygote in self.live.values()))
        self.live.clear()


def _report(zygote: ZygoteLink) -> None:
    """Log what the warm-up could not do; calls are slower without it."""
    for name, reason in zygote.ready["missing"].items():
        _log.warning("%s cannot be imported in advance: %s", name, reason)
    for trace in zygote.ready["failed"]:
        _log.warning("a warm-up program failed in the %s interpreter:\n%s", zygote.flavour, trace)

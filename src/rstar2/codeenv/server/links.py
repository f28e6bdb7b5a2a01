"""The pool's ends of the sockets to zygotes and workers. Event loop only, nothing blocks.

Every wait here has a deadline. A lost peer raises `Lost`, which the pool answers by replacing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rstar2.codeenv.jail import frames, zygote
from rstar2.codeenv.jail.confine import JailSpec
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError

_WARM_UP_S = 120.0
_SPAWN_S = 20.0


class Lost(CodeEnvError):
    """A worker or zygote ended without an answer."""

    def __init__(self, message: str, oom: bool = False) -> None:
        super().__init__(message)
        self.oom = oom


class WorkerLink(asyncio.Protocol):
    """One worker: a request goes out, a reply comes back, in turn."""

    def __init__(self, spec: JailSpec, flavour: str) -> None:
        self.spec = spec
        self.flavour = flavour
        self.pid = 0
        self._pidfd = -1
        self.calls = 0
        self.oom_seen = 0
        self.alive = True
        self.used_at = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._header: WorkerReply | None = None
        self._waiting: asyncio.Future[tuple[WorkerReply, bytes]] | None = None
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Set by the zygote's word that the worker was reaped: was it killed for memory?"""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def busy(self) -> bool:
        """Is a call running in it?"""
        return self._waiting is not None

    def born(self, pid: int) -> None:
        """Remember the process by a handle that is never reused, as a bare pid would be."""
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def gone(self, oom: bool) -> None:
        """The zygote has reaped the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.exited.done():
            self.exited.set_result(oom)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._hello.done():
            self._greet()
            return
        if self._header is None:
            size = frames.REPLY.size
            if len(self._buffer) < size:
                return
            self._header = WorkerReply(*frames.REPLY.unpack_from(self._buffer))
            del self._buffer[:size]
        if len(self._buffer) < self._header.body:
            return
        body, header = bytes(self._buffer[: self._header.body]), self._header
        del self._buffer[: header.body]
        self._header = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result((header, body))

    def _greet(self) -> None:
        if b"\n" not in self._buffer:
            return
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        if line + b"\n" == frames.HELLO:
            self._hello.set_result(None)
        else:
            self._hello.set_exception(IsolationError(line.decode("utf-8", "replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        lost = Lost(f"worker {self.name} ended without an answer")
        if not self._hello.done():
            self._hello.set_exception(lost)
            self._hello.exception()  # heard, even if its spawn was given up before it was awaited
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(lost)

    async def greeted(self, within_s: float) -> None:
        """Wait until the worker serves; IsolationError says why its jail could not be built."""
        try:
            async with asyncio.timeout(within_s):
                await self._hello
        except TimeoutError:
            self.kill()
            raise DeadlineError(f"worker {self.name} was not ready in {within_s:g} s") from None

    async def ask(
        self, request: WorkerRequest, parts: tuple[bytes, ...], grace_s: float
    ) -> tuple[WorkerReply, bytes]:
        """One call. A worker that is silent beyond the wall limit and a grace is killed."""
        if self._transport is None or not self.alive:
            raise Lost(f"worker {self.name} is gone")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.writelines([request.pack(), *parts])
        self.calls += 1
        self.used_at = time.monotonic()
        try:
            async with asyncio.timeout(request.wall_s + grace_s):
                header, body = await self._waiting
        except TimeoutError:
            self.kill()
            raise Lost(f"worker {self.name} hung and was killed") from None
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._waiting = None
        if header.seq != request.seq:
            self.kill()
            raise Lost(f"worker {self.name} answered {header.seq} instead of {request.seq}")
        return header, body

    def kill(self) -> None:
        """End the worker now; everything in its namespace goes with it."""
        self.alive = False
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()


class ZygoteLink:
    """One zygote process and the workers it forked."""

    def __init__(self, flavour: str, functions: Mapping[str, str]) -> None:
        self.flavour = flavour
        self._functions = dict(functions)
        self._workers: dict[str, WorkerLink] = {}
        self._spawned: dict[str, asyncio.Future[int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self.alive = False
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process and wait until it is warm."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        settings = json.dumps({"flavour": self.flavour, "functions": self._functions})
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._placed(theirs.fileno(), settings),
                env=zygote.environment(),
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=sys.stderr.fileno()
                if os.environ.get("RSTAR2_CODEENV_DEBUG")
                else asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._control = ours
        try:
            async with asyncio.timeout(_WARM_UP_S):
                data = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        except TimeoutError:
            await self.close()
            raise DeadlineError(
                f"the {self.flavour} zygote was not warm in {_WARM_UP_S} s"
            ) from None
        if not data:
            await self.close()
            raise CodeEnvError(f"the {self.flavour} zygote died while warming up")
        self.ready = json.loads(data)
        self.alive = True
        self._reader = asyncio.create_task(self._listen(), name=f"zygote-{self.flavour}")

    @staticmethod
    def _placed(descriptor: int, settings: str) -> list[str]:
        return [*zygote.command(), settings, str(descriptor)]

    async def _listen(self) -> None:
        assert self._control is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._control, 1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            self._heard(json.loads(data))
        self.alive = False
        for future in self._spawned.values():
            if not future.done():
                future.set_exception(Lost(f"the {self.flavour} zygote ended"))
        for link in list(self._workers.values()):
            link.gone(oom=False)

    def _heard(self, message: dict[str, Any]) -> None:
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
                link.gone(oom=message["oom"] > 0)

    async def spawn(self, spec: JailSpec) -> WorkerLink:
        """Fork a worker into its jail and wait until it serves."""
        if self._control is None or not self.alive:
            raise Lost(f"the {self.flavour} zygote is gone")
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        link = WorkerLink(spec, self.flavour)
        self._workers[spec.name] = link
        future: asyncio.Future[int] = loop.create_future()
        self._spawned[spec.name] = future
        try:
            message = json.dumps({"spec": asdict(spec)}).encode()
            socket.send_fds(self._control, [message], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(_SPAWN_S):
                link.born(await future)
            await loop.create_unix_connection(lambda: link, sock=ours)
            await link.greeted(_SPAWN_S)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise Lost(f"worker {spec.name} could not be started: {error!r}") from error
        except BaseException:
            link.kill()
            ours.close()
            raise
        finally:
            theirs.close()
            self._spawned.pop(spec.name, None)
        return link

    async def close(self, within_s: float = 10.0) -> None:
        """Hang up; the zygote reaps its workers and ends. Killed if it does not."""
        self.alive = False
        if self._reader is not None:
            self._reader.cancel()
        if self._control is not None:
            self._control.close()
        if self._process is None:
            return
        if not self.ready:  # still warming up: it has no workers yet and does not listen
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

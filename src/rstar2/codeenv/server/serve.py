"""A server process from start to end: bind, start the executor, serve, shut down.

    bind -> executor.start -> serve -> SIGTERM, Ctrl-C or end of the owner
         -> drain (finish what runs within the grace, then cancel) -> executor.close

A second signal skips the grace. An owned server (`python -m rstar2.codeenv.server.serve`) reads its
configuration from the first line of stdin. When stdin closes, or its parent process changes, its
owner has ended, and the server stops: it ends with its owner even on kill -9. It writes one line to
stdout, `{"url": ...}` or `{"error": ..., "message": ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import uvicorn

from rstar2.codeenv import deadlines
from rstar2.codeenv.protocol import Executor
from rstar2.codeenv.server.app import CodeEnvApp
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.connections import (
    MAX_HEAD_BYTES,
    HttpConnection,
    HttpServer,
    connection_bound,
)
from rstar2.codeenv.wire import ServerReady
from rstar2.config import CodeEnvConfig
from rstar2.config.codeenv import LOOPBACK
from rstar2.errors import CodeEnvError, RstarError, UserError
from rstar2.http_server import AsgiApp, LocalCallers, bind

log = logging.getLogger(__name__)

_START = (
    "the code environment cannot start: {error}; it needs a writable directory for temporary "
    "files (TMPDIR) and the right to start processes; see `rstar2 doctor`"
)


def http_config(app: AsgiApp, token: str | None) -> uvicorn.Config:
    """How uvicorn serves an application. Its warnings are off: callers could flood the log."""
    return uvicorn.Config(
        LocalCallers(app) if token is None else app,
        log_config=None, log_level="error", access_log=False, lifespan="off",
        server_header=False, timeout_keep_alive=int(deadlines.KEEP_ALIVE_S), ws="none",
        http=HttpConnection, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )  # fmt: skip


def make_executor(config: CodeEnvConfig) -> Executor:
    """The real executor, at the requested or the best available isolation level."""
    from rstar2.codeenv.server import probe
    from rstar2.codeenv.server.executor import WorkerExecutor

    try:
        return WorkerExecutor(config, probe.resolve(config.isolation).level)
    except OSError as error:
        raise CodeEnvError(_START.format(error=error)) from error


def check_exposure(config: CodeEnvConfig) -> None:
    """Refuse to serve beyond loopback without a token."""
    if config.host not in LOOPBACK and not config.token:
        raise UserError(
            f"host: {config.host} is reachable from other machines, and a server without a token "
            "would run code for all of them; set a token (RSTAR2_CODEENV_TOKEN or --token-file), "
            "or serve on 127.0.0.1"
        )


async def serve(
    config: CodeEnvConfig,
    *,
    on_ready: Callable[[ServerReady], None],
    owner: IO[bytes] | None = None,
    executor: Executor | None = None,
    grace_s: float = deadlines.DRAIN_S,
) -> None:
    """Serve until a signal or the end of the owner; returns when every process has ended."""
    check_exposure(config)
    connections = connection_bound(config.connections)
    stop = StopSignal()
    with bind(config.host, config.port) as sock, stop.on_signals():
        watching = asyncio.create_task(_watch_owner(owner, stop)) if owner else None
        executor = executor or make_executor(config)
        try:
            if await _start(executor, stop):
                await _serve(config, executor, sock, connections, stop, on_ready, grace_s)
        finally:
            if watching is not None:
                watching.cancel()
            await executor.close()


async def _start(executor: Executor, stop: StopSignal) -> bool:
    """True when the executor is ready; False if a stop was requested first."""
    starting = asyncio.create_task(executor.start())
    try:
        if await stop.unless(starting):
            return True
    except OSError as error:
        raise CodeEnvError(_START.format(error=error)) from error
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return False


async def _serve(
    config: CodeEnvConfig,
    executor: Executor,
    sock: socket.socket,
    connections: int,
    stop: StopSignal,
    on_ready: Callable[[ServerReady], None],
    grace_s: float,
) -> None:
    """Answer requests until a stop is requested, then shut down in order."""
    server_id = f"{socket.gethostname()}:{sock.getsockname()[1]}:{secrets.token_hex(3)}"
    table = CallTable(executor, config, server_id)
    server = HttpServer(http_config(CodeEnvApp(table, config.token), config.token), connections)
    gc.collect()
    gc.freeze()  # imported objects stay: no collection needs to visit them again
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    on_ready(ServerReady(url_of(config, sock), executor.stats().isolation, executor.slots))
    await stop.unless(serving)
    await _shut_down(server, table, serving, stop, grace_s)


async def _shut_down(
    server: HttpServer,
    table: CallTable,
    serving: asyncio.Task[None],
    stop: StopSignal,
    grace_s: float,
) -> None:
    """Drain within the grace unless forced, then end the HTTP server."""
    draining = asyncio.create_task(table.drain(0.0 if stop.forced.is_set() else grace_s))
    forced = asyncio.create_task(stop.forced.wait())
    await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    forced.cancel()
    table.abort()
    server.should_exit = True
    # Cancelled calls still get their last line; a caller that does not read it is disconnected.
    await asyncio.wait({serving}, timeout=deadlines.HTTP_STOP_S)
    server.force_exit = True
    await asyncio.wait({serving}, timeout=deadlines.HTTP_STOP_S)
    serving.cancel()
    await asyncio.gather(serving, draining, forced, return_exceptions=True)
    await table.close(0.0)


class StopSignal:
    """Set by the first signal; `forced` by the second, and by the end of the owner."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.forced.set()
        self.asked.set()

    def force(self) -> None:
        self.asked.set()
        self.forced.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def unless(self, task: asyncio.Task[None]) -> bool:
        """True if the task ended before a stop was requested; re-raises its exception."""
        asked = asyncio.create_task(self.asked.wait())
        done, _ = await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if task in done:
            task.result()
        return task in done


async def _watch_owner(owner: IO[bytes], stop: StopSignal) -> None:
    """Force a stop when stdin ends or the parent changes.

    The pipe is noticed at once; the parent's pid also works if a fork of the owner holds the pipe.
    """
    loop = asyncio.get_running_loop()
    parent = os.getppid()
    ended = asyncio.Event()
    os.set_blocking(owner.fileno(), False)

    def readable() -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(owner.fileno(), 4096):
                ended.set()

    loop.add_reader(owner.fileno(), readable)
    try:
        while not ended.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), deadlines.OWNER_POLL_S)
    finally:
        loop.remove_reader(owner.fileno())
    stop.force()


def url_of(config: CodeEnvConfig, sock: socket.socket) -> str:
    """The URL of a server that listens on this socket."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


def main() -> int:
    """Entry point of an owned server; see the module docstring for its protocol."""
    logging.basicConfig(level=logging.WARNING, format="codeenv: %(levelname)s %(message)s")
    owner = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115

    def say(ready: ServerReady) -> None:
        os.write(1, msgspec.json.encode(ready) + b"\n")

    try:
        config = CodeEnvConfig.model_validate_json(_first_line(owner))
        asyncio.run(serve(config, on_ready=say, owner=owner))
    except RstarError as error:
        say(ServerReady(error=type(error).__name__, message=str(error)))
        return 1
    return 0


def _first_line(stream: IO[bytes]) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = stream.read(1)
        if not byte:
            raise UserError("stdin ended before the configuration; this entry is for owners")
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())

"""An event loop on a thread of its own, and the clients that sandboxes share on it.

One loop per process serves every `Sandbox` and `AsyncSandbox`, from any thread and beside any other
event loop. Sandboxes with the same settings share one client, and with it one warm server.

Invariants:
- A client that no sandbox uses is closed: at once if its servers run elsewhere, KEEP_WARM_S later
  if it owns a server, and at the exit of the process in any case.
- A forked child never uses the loop of its parent; it gets its own on first use.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rstar2.codeenv import deadlines
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import CodeEnvConfig

KEEP_WARM_S = 60.0
"""How long an owned server stays after its last sandbox was closed: the next one starts at once."""
_QUIET_START_S = 0.1
"""A start that takes longer is announced on a terminal."""

T = TypeVar("T")


class SharedClient:
    """A client, started in the background, and the number of sandboxes that use it."""

    def __init__(self, config: CodeEnvConfig) -> None:
        self.users = 0
        self.starting = asyncio.create_task(CodeEnvClient.start(config))
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def failed(self) -> bool:
        """True if the client could not be started."""
        starting = self.starting
        return starting.done() and (starting.cancelled() or starting.exception() is not None)

    async def close(self) -> None:
        """Stop the client and its server, also in the middle of their start."""
        if self.expiry is not None:
            self.expiry.cancel()
        self.starting.cancel()
        (client,) = await asyncio.gather(self.starting, return_exceptions=True)
        if isinstance(client, CodeEnvClient):
            await client.close()


class BackgroundLoop:
    """The loop of this process; see the module docstring."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._clients: dict[CodeEnvConfig, SharedClient] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="rstar2-sandbox", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, from any thread. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """At exit: stop every client and server, then the thread."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        try:
            self.submit(self._close_all()).result(deadlines.OWNED_STOP_S)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(1.0)

    # ----------------------------------------------------------------- on the loop

    async def acquire(self, config: CodeEnvConfig) -> CodeEnvClient:
        """The shared client of these settings; every `acquire` needs one `release`."""
        shared = self._clients.get(config)
        if shared is None:
            shared = self._clients[config] = SharedClient(config)
        shared.users += 1
        if shared.expiry is not None:
            shared.expiry.cancel()
            shared.expiry = None
        try:
            return await _announced(shared.starting)
        except BaseException:
            self._leave(config, shared)
            raise

    def release(self, config: CodeEnvConfig) -> None:
        """One sandbox stopped using the client of these settings."""
        shared = self._clients.get(config)
        if shared is not None:  # else the process is ending
            self._leave(config, shared)

    def _leave(self, config: CodeEnvConfig, shared: SharedClient) -> None:
        """One user less. Only a client that is still the one of these settings is dropped."""
        shared.users -= 1
        if self._clients.get(config) is not shared:
            return
        if shared.failed:
            del self._clients[config]  # the next sandbox tries again
        elif shared.users == 0:
            wait_s = 0.0 if config.urls else KEEP_WARM_S
            shared.expiry = self.loop.call_later(wait_s, self._expire, config)

    def _expire(self, config: CodeEnvConfig) -> None:
        closing = self.loop.create_task(self._clients.pop(config).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients), *self._closing)


async def _announced(starting: asyncio.Task[CodeEnvClient]) -> CodeEnvClient:
    """Wait for a client; on a terminal, say so if that takes long."""
    await asyncio.wait({starting}, timeout=_QUIET_START_S)
    if starting.done() or sys.stderr is None or not sys.stderr.isatty():
        return await asyncio.shield(starting)
    sys.stderr.write("\rstarting the sandbox ...")
    sys.stderr.flush()
    try:
        return await asyncio.shield(starting)
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


_background: BackgroundLoop | None = None
_lock = threading.Lock()


def background() -> BackgroundLoop:
    """The background loop of this process, started on first use."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _forget_in_child() -> None:
    global _background, _lock
    _background, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)

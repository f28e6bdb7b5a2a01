"""The life of a viewer: bind to loopback, follow the runs in a thread, serve until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import uvicorn

from rstar2.errors import UserError
from rstar2.viewer.app import App
from rstar2.viewer.run import Run

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_S = 0.5
"""How often run directories are looked at when nothing is new."""
STOP_S = 5.0


class Follower:
    """One thread that keeps all runs up to date; ends within STOP_S of being asked to."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = list(runs.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="viewer", daemon=True)
        self.caught_up = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _follow(self) -> None:
        while not self._stop.is_set():
            changed = False
            for run in self._runs:
                try:
                    changed |= run.refresh()
                except OSError as error:
                    log.warning("%s cannot be read: %s", run.path, error)
                if self._stop.is_set():
                    return
            if not changed:
                self.caught_up.set()
                self._stop.wait(POLL_S)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: `serve` owns the order of shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(port: int) -> socket.socket:
    """A listening socket on loopback, or one clear error."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise UserError(
            f"--port: cannot listen on {HOST}:{port} ({error.strerror}); choose another "
            "(0 takes a free one), or stop what uses it"
        ) from error
    sock.setblocking(False)
    return sock


async def serve(runs: Mapping[str, Run], port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    follower = Follower(runs)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    with bind(port) as sock:
        server = _Server(
            uvicorn.Config(
                App(runs), log_config=None, access_log=False, lifespan="off", ws="none",
                server_header=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        waiting = asyncio.create_task(stopped.wait())
        follower.start()
        try:
            on_ready(f"http://{HOST}:{sock.getsockname()[1]}/")
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=STOP_S)
            follower.stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    if serving.done():
        serving.result()

"""A server process that a client starts, owns and restarts; it ends with its owner, on kill -9 too.

The child is `python -m rstar2.codeenv.server.serve`. The pipe to its stdin carries the
configuration and then stays open: when it closes, the server knows that its owner has ended.
"""

from __future__ import annotations

import secrets
import sys

import msgspec

from rstar2.child import Child
from rstar2.codeenv import deadlines
from rstar2.codeenv.wire import ServerReady
from rstar2.config import CodeEnvConfig
from rstar2.errors import (
    CodeEnvError,
    DeadlineError,
    InfrastructureError,
    InvariantError,
    IsolationError,
    RstarError,
    UserError,
)

COMMAND = ("-m", "rstar2.codeenv.server.serve")
ERRORS: dict[str, type[RstarError]] = {
    kind.__name__: kind
    for kind in (UserError, DeadlineError, IsolationError, InfrastructureError, InvariantError)
}
"""Errors that a server which cannot start reports by name; any other is a CodeEnvError."""


class LocalServer:
    """One owned server process at a time."""

    def __init__(self, config: CodeEnvConfig, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(16)
        self.config = config.model_copy(update={"urls": (), "token": self.token, "host": host})
        self.ready = ServerReady()
        self.child: Child | None = None

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None else None

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    async def start(self) -> ServerReady:
        """Start the process and wait until it serves; raises the error that it reports."""
        assert not self.running, "one owned server at a time"
        self.child = Child(
            "the local code environment",
            [sys.executable, *COMMAND],
            parent_death_signal=None,  # it watches its stdin, and then cleans up
            grace_s=deadlines.OWNED_STOP_S,
            stdin=self.config.model_dump_json().encode() + b"\n",
            reads_line=True,
        )
        self.ready = await self.child.ready(self._first_line(self.child), deadlines.OWNED_START_S)
        return self.ready

    async def _first_line(self, child: Child) -> ServerReady:
        line = await child.read_line()
        if not line:
            await child.wait()
            raise CodeEnvError(
                f"the local code environment could not start: {child.describe_end()}; "
                "its message is on stderr, and `rstar2 doctor` shows what this machine supports"
            )
        ready = msgspec.json.decode(line, type=ServerReady)
        if ready.error:
            raise ERRORS.get(ready.error, CodeEnvError)(ready.message)
        return ready

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        assert self.child is not None
        return await self.child.wait()

    async def stop(self) -> None:
        """Stop the process: close its stdin, SIGTERM, then SIGKILL after the grace period."""
        child, self.child = self.child, None
        if child is not None:
            await child.stop()

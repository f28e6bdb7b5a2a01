"""The seam between the service (server, client, compat) and what executes calls (pool, jail).

The server knows an `Executor`; the client knows the wire form of the same requests. Every
request has an id chosen by the caller: results carry it back and are checked against it end to
end, and executing the same id twice on one server returns the first result (idempotence).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rstar2.types import Limits, ToolResult

Isolation = Literal["strict", "portable"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Execute `code`. `deadline_s` is the caller's whole budget, time in the queue included."""

    id: str
    code: str
    stdin: str = ""
    limits: Limits = Limits()
    session: str | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Call a trusted function by name (see verify.FUNCTIONS) in the pool, under a deadline."""

    id: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """`value` if the function returned; else `error` names why (timeout, exception, ...)."""

    id: str
    value: Any = None
    error: str | None = None
    message: str = ""
    infrastructure: bool = False
    wall_s: float = 0.0
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A live interpreter that keeps state across calls; rolled back when a call fails."""

    id: str
    ttl_s: float
    calls: int = 0
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What the executor is doing now, for /health and /metrics."""

    isolation: str
    slots: int
    busy: int
    queued: int
    sessions: int
    restarts: int
    completed: Mapping[str, int] = field(default_factory=dict)
    """Calls finished since start, by outcome."""
    warm: tuple[str, ...] = ()
    """Flavours of interpreters that are ready to be forked (see warmup)."""


class Executor(Protocol):
    """Runs calls. Raises QueueFullError (with retry_after_s) instead of queueing without bound."""

    async def start(self) -> None: ...

    async def run(self, request: RunRequest) -> ToolResult: ...

    async def verify(self, request: VerifyRequest) -> VerifyResult: ...

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo: ...

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo: ...

    async def close_session(self, session: str) -> None: ...

    def stats(self) -> PoolStats: ...

    async def close(self, grace_s: float) -> None:
        """Finish what runs within the grace, kill the rest, leave no process, mount or file."""
        ...

"""The types shared by client and server: requests, results, sessions, and the `Executor` interface.

Every request has an id that its caller chose. The result carries the same id, and both ends check
it. A server executes an id once: a second request with the same id gets the first result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rstar2.types import Limits, Outcome, ToolResult

Isolation = Literal["strict", "portable"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Execute `code`. `deadline_s` is the caller's whole budget, time in the queue included.

    `files` are in the program's working directory when it starts, by relative path. With `collect`
    the result has the files that the program created or changed there. `reuse` names a group: a
    deterministic program that has run in this group may be answered from memory.
    """

    id: str
    code: str
    stdin: str = ""
    limits: Limits = Limits()
    session: str | None = None
    deadline_s: float | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    collect: bool = False
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Call a trusted function by name (see verify.FUNCTIONS) in a worker, under a deadline."""

    id: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """`value` if the function returned; else `error` names the reason (timeout, exception, ...)."""

    id: str
    value: Any = None
    error: str | None = None
    message: str = ""
    infrastructure: bool = False
    wall_s: float = 0.0
    attempts: int = 1


CallRequest = RunRequest | VerifyRequest
CallResult = ToolResult | VerifyResult


def outcome_name(result: CallResult) -> str:
    """The outcome of a run, or `ok` or the error name of a verification."""
    if isinstance(result, ToolResult):
        return result.outcome.value
    return "ok" if result.error is None else result.error


def is_infrastructure(result: CallResult) -> bool:
    """True if a result says nothing about the program, so that the call may be retried."""
    if isinstance(result, ToolResult):
        return result.outcome is Outcome.INFRASTRUCTURE
    return result.infrastructure


def infrastructure_result(
    request: CallRequest, message: str, server: str, attempts: int = 1
) -> CallResult:
    """The result of a call that could not be executed."""
    if isinstance(request, RunRequest):
        return ToolResult(
            request.id, Outcome.INFRASTRUCTURE, message=message, server=server, attempts=attempts
        )
    return VerifyResult(
        request.id, error="infrastructure", message=message, infrastructure=True, attempts=attempts
    )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A live interpreter that keeps state across calls; rolled back when a call fails."""

    id: str
    ttl_s: float
    calls: int = 0
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """The executor's share of /health and /metrics; the call table adds queue and outcomes."""

    isolation: str
    sessions: int = 0
    restarts: int = 0
    warm: tuple[str, ...] = ()
    """Flavours of interpreters that are ready to be forked (see jail/warmup.py)."""
    packages: tuple[str, ...] = ()
    """Modules that the server's owner made available, warm with the flavour `packages`."""


class Executor(Protocol):
    """Executes calls that the call table has admitted, at most `slots` at once."""

    @property
    def slots(self) -> int: ...

    async def start(self) -> None: ...

    def turn(self, request: RunRequest) -> AbstractAsyncContextManager[None] | None:
        """What the caller of `run` must hold; None if the call may run beside all others.

        Calls of a session and its branches run one after another. Those that wait for their turn
        need no slot.
        """
        ...

    async def run(self, request: RunRequest, deadline: float) -> ToolResult:
        """Execute a program; `deadline` is a time of the event loop's clock."""
        ...

    async def verify(self, request: VerifyRequest, deadline: float) -> VerifyResult:
        """Call a trusted function by name."""
        ...

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo: ...

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo: ...

    async def close_session(self, session: str) -> None: ...

    def stats(self) -> ExecutorStats: ...

    async def close(self) -> None:
        """End every worker and session; leave no process, mount or file."""
        ...

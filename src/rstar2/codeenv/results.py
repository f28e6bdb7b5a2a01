"""Questions that both ends ask of a result, and the result of a call that nobody could execute."""

from __future__ import annotations

from rstar2.codeenv.protocol import RunRequest, VerifyResult
from rstar2.codeenv.wire import Request, Result
from rstar2.types import Outcome, ToolResult


def outcome(result: Result) -> str:
    """The outcome of a run, or ok / error name of a verification."""
    if isinstance(result, ToolResult):
        return result.outcome.value
    return "ok" if result.error is None else result.error


def infrastructure(result: Result) -> bool:
    """True where a result says nothing about the program, so that it may be tried again."""
    if isinstance(result, ToolResult):
        return result.outcome is Outcome.INFRASTRUCTURE
    return result.infrastructure


def failure(request: Request, message: str, server: str, attempts: int = 1) -> Result:
    """The infrastructure result of a call that could not be executed."""
    if isinstance(request, RunRequest):
        return ToolResult(
            request.id, Outcome.INFRASTRUCTURE, message=message, server=server, attempts=attempts
        )
    return VerifyResult(
        request.id, error="infrastructure", message=message, infrastructure=True, attempts=attempts
    )

"""A code environment that answers immediately, to measure what stands before it."""

from __future__ import annotations

from rstar2.codeenv.protocol import RunRequest, SessionInfo, VerifyRequest, VerifyResult
from rstar2.types import Outcome, ToolResult


class InstantSandbox:
    """Every program prints 42. There are no sessions, and no answer needs algebra."""

    async def run(self, request: RunRequest) -> ToolResult:
        return ToolResult(request.id, Outcome.OK, stdout="42\n")

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        raise AssertionError("integer answers are graded in process")

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        raise AssertionError("the Python tool is stateless")

    async def close_session(self, session: str) -> None:
        raise AssertionError("the Python tool is stateless")

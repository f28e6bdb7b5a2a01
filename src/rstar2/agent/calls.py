"""The tool calls of one rollout: run in order, each under a deadline, attributed once.

A call that is none comes back as its error; a program's own failure is data for the model; a
failure of ours ends the rollout and is never shown to it. Shared by the token loop and the
text-only dialogue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig
from rstar2.errors import CodeEnvError, DeadlineError, InfrastructureError
from rstar2.types import Failure, Outcome, StopReason, ToolCall, ToolResult

GRACE_S = 5.0
"""How much later than an engine's or a client's own deadline the loop gives up on it."""


class ToolRunner(Protocol):
    """The one method of the code environment's client that the loop needs."""

    async def run(self, request: RunRequest) -> ToolResult: ...


@dataclass(slots=True)
class CallRunner:
    """Runs the calls of one rollout and remembers how many in a row were none."""

    tools: ToolRunner
    agent: AgentConfig
    on_result: Callable[[int, ToolCall, ToolResult], None] | None = None
    invalid: int = 0
    failure: Failure | None = None

    async def run(
        self, turn: int, calls: Sequence[ToolCall], results: list[ToolResult]
    ) -> StopReason | None:
        """Fill `results` in order; the reason why the rollout must stop, if there is one."""
        for call in calls:
            if call.error is not None:
                self.invalid += 1
                result = ToolResult(call.id, call.error, message=call.message)
            else:
                self.invalid = 0
                try:
                    result = await self._execute(call)
                except (InfrastructureError, OSError) as error:
                    self.failure = failure_of(error)
                    return StopReason.TOOL_FAILED
            results.append(result)
            if result.outcome is Outcome.INFRASTRUCTURE:
                message = result.message or "a tool call could not be executed"
                self.failure = failure_of(CodeEnvError(message))
                return StopReason.TOOL_FAILED
            if self.on_result is not None:
                self.on_result(turn, call, result)
            if self.invalid >= self.agent.invalid_calls:
                return StopReason.INVALID_CALLS
        return None

    async def _execute(self, call: ToolCall) -> ToolResult:
        deadline = self.agent.tool_deadline_s
        request = RunRequest(call.id, call.code, stdin=call.stdin, deadline_s=deadline)
        try:
            async with asyncio.timeout(deadline + GRACE_S):
                result = await self.tools.run(request)
        except TimeoutError as error:
            raise DeadlineError(f"no tool result within {deadline + GRACE_S:g} s") from error
        if result.call_id != call.id:
            raise CodeEnvError(f"asked for call {call.id}, got the result of {result.call_id}")
        return result


def failure_of(error: InfrastructureError | OSError) -> Failure:
    """The failure as data, under the error's own name."""
    name = error.name if isinstance(error, InfrastructureError) else "connection"
    return Failure(name, str(error) or type(error).__name__)

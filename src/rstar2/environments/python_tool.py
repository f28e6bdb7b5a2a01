"""The Python tool: code of the model runs in the code environment.

`python()` starts every call afresh. `python(session=True)` gives each episode one interpreter
session, opened at the first call and closed with the episode: variables are kept between calls. If
the session is lost with its server, the rollout ends with the failure `session_lost`; it never
continues with a fresh state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rstar2.codeenv.protocol import RunRequest
from rstar2.environments.base import OpenTool, SandboxClient, ToolSpec, kind_of, printable
from rstar2.errors import InvariantError, SessionLostError
from rstar2.paper_format import TOOL, TOOL_NAME
from rstar2.types import Outcome, ToolCall, ToolResult

_FRESH = "Every call starts afresh: variables are not kept."
_KEPT = "Variables, functions and imports are kept between calls."


class PythonSpec(ToolSpec):
    """The Python tool's signature. `input` may be left out, and `code` must not be empty."""

    __slots__ = ()

    @property
    def example(self) -> str:
        return json.dumps({"name": self.name, "arguments": {"code": "...", "input": ""}})

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        unknown = sorted(printable(key)[:40] for key in arguments if key not in ("code", "input"))
        if unknown:
            return f"unexpected {', '.join(map(repr, unknown[:3]))}."
        if "code" not in arguments:
            return '"code" is missing.'
        for key in ("code", "input"):
            value = arguments.get(key, "")
            if not isinstance(value, str):
                return f'"{key}" must be a string, got {kind_of(value)}.'
            if value != printable(value):
                return f'"{key}" holds a lone surrogate (\\ud800-\\udfff).'
        return None if arguments["code"].strip() else '"code" is empty.'


def python_spec(name: str = TOOL_NAME, *, session: bool = False) -> PythonSpec:
    """What the model reads about the Python tool."""
    function = TOOL["function"]
    description = function["description"]
    if session:
        description = description.replace(_FRESH, _KEPT)
    return PythonSpec(name, description, function["parameters"], stateful=session)


@dataclass(frozen=True, slots=True)
class OpenPython:
    """The Python tool without state."""

    sandbox: SandboxClient

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Run the code of a call; a failure of the program is an outcome."""
        code, stdin = call.arguments["code"], call.arguments.get("input", "")
        request = RunRequest(call.id, code, stdin=stdin, deadline_s=deadline_s)
        return await self.sandbox.run(request)

    async def close(self) -> None:
        """Nothing is held."""


class OpenPythonSession:
    """The Python tool with one interpreter session, opened at the first call."""

    def __init__(self, sandbox: SandboxClient) -> None:
        self._sandbox = sandbox
        self._session: str | None = None

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Run the code of a call in the episode's session."""
        if self._session is None:
            self._session = (await self._sandbox.open_session()).id
        code, stdin = call.arguments["code"], call.arguments.get("input", "")
        request = RunRequest(
            call.id, code, stdin=stdin, session=self._session, deadline_s=deadline_s
        )
        result = await self._sandbox.run(request)
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise SessionLostError(result.message or "the session could not execute a call")
        return result

    async def close(self) -> None:
        """End the session; one that was lost is closed already."""
        session, self._session = self._session, None
        if session is not None:
            await self._sandbox.close_session(session)


@dataclass(frozen=True, slots=True)
class PythonTool:
    """The Python tool of an environment; `python()` makes one."""

    spec: PythonSpec
    needs_sandbox: ClassVar[bool] = True

    def open(self, sandbox: SandboxClient | None) -> OpenTool:
        """The tool for one episode."""
        if sandbox is None:
            raise InvariantError(f"tool {self.spec.name} needs the code environment")
        return OpenPythonSession(sandbox) if self.spec.stateful else OpenPython(sandbox)

    def call_text(self, code: str, stdin: str = "") -> str:
        """A call as the model writes it, for demonstrations."""
        body = json.dumps({"name": self.spec.name, "arguments": {"code": code, "input": stdin}})
        return f"<tool_call>\n{body}\n</tool_call>"


def python(*, session: bool = False, name: str = TOOL_NAME) -> PythonTool:
    """A tool that runs the model's Python in the code environment.

    session: keep variables between the calls of an episode; otherwise every call starts afresh
    name: the tool's name

    Example:

        env = rstar2.Environment("problems.jsonl", reward, tools=[rstar2.python(session=True)])
    """
    return PythonTool(python_spec(name, session=session))

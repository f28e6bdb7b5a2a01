"""`@rstar2.tool`: a Python function as a tool. Its schema comes from signature and docstring.

    @rstar2.tool
    def population(city: str, year: int = 2020) -> int:
        '''How many people live in a city.

        city: its English name
        '''

What a call becomes:

| the function                              | outcome                                            |
|-------------------------------------------|----------------------------------------------------|
| returns text or a JSON value              | OK; a text beyond MAX_CHARS is cut, with a note    |
| returns None or an empty text             | NO_OUTPUT                                          |
| raises                                    | EXCEPTION with a trimmed traceback                 |
| takes longer than `timeout_s`             | TIMEOUT                                            |
| gets arguments that its types refuse      | BAD_ARGUMENTS                                      |
| raises rstar2.InfrastructureError         | the rollout is lost, by name, and retried          |
| returns anything else (bytes, an object)  | the rollout is lost: the tool has a bug            |

A plain function runs in a thread of its own, an async one on the event loop. A thread cannot be
stopped: after TIMEOUT it runs on, and when ABANDONED threads of a tool still run, its calls fail.
With `sandboxed=True` the function's source runs in the code environment instead: it can be stopped,
it may not use anything defined outside of it, and its arguments and result are JSON.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import textwrap
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import msgspec

from rstar2.codeenv.protocol import RunRequest
from rstar2.environments.base import OpenTool, SandboxClient
from rstar2.environments.schema import parameters_of, spec_of
from rstar2.environments.threads import call_function
from rstar2.errors import InfrastructureError, InvariantError, UserError
from rstar2.types import Limits, Outcome, ToolCall, ToolResult, Truncation

MAX_CHARS = 100_000
"""Maximum length of a tool's result; agent.response_tokens limits what the model reads of it."""
MAX_FRAMES = 4
MAX_ERROR_CHARS = 2000
ABANDONED = 32


class FunctionTool:
    """A function as a tool; it can still be called as a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        sandboxed: bool = False,
        stateful: bool = False,
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise UserError(f"tool {function.__name__}: timeout_s = {timeout_s} must be above 0")
        self.function = function
        self.spec = spec_of(function, name=name, stateful=stateful)
        self.timeout_s = timeout_s
        self._parameters = parameters_of(function)
        self._program = _program(function) if sandboxed else None
        self._abandoned: set[threading.Thread] = set()

    @property
    def needs_sandbox(self) -> bool:
        return self._program is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.spec.name}>"

    def call_text(self, **arguments: Any) -> str:
        """A call as the model writes it, for demonstrations."""
        return call_text(self.spec.name, arguments)

    def open(self, sandbox: SandboxClient | None) -> OpenTool:
        """The tool for one episode; it has no state of its own."""
        return _OpenFunction(self, sandbox)

    async def run(
        self, call: ToolCall, deadline_s: float, sandbox: SandboxClient | None
    ) -> ToolResult:
        """Execute a call."""
        timeout_s = min(self.timeout_s or deadline_s, deadline_s)
        if self._program is not None:
            return await self._run_sandboxed(call, deadline_s, sandbox)
        try:
            arguments = self._converted(call.arguments)
        except msgspec.ValidationError as error:
            message = f"Wrong arguments: {error} Expected {self.spec.expected}."
            return ToolResult(call.id, Outcome.BAD_ARGUMENTS, message=message)
        try:
            async with asyncio.timeout(timeout_s) as waiting:
                value = await self._value(arguments)
        except InfrastructureError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - data for the model
            if waiting.expired():
                message = f"{self.spec.name} gave no result within {timeout_s:g} s."
                return ToolResult(call.id, Outcome.TIMEOUT, message=message)
            return ToolResult(call.id, Outcome.EXCEPTION, traceback=trimmed_traceback(error))
        return value_result(call.id, self.spec.name, value)

    def _converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments with the types of the signature (enums, floats given as integers)."""
        return {
            name: msgspec.convert(value, type=self._parameters[name].annotation)
            for name, value in arguments.items()
        }

    async def _value(self, arguments: Mapping[str, Any]) -> Any:
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        if len(self._abandoned) >= ABANDONED:
            raise InfrastructureError(
                f"tool {self.spec.name}: {ABANDONED} calls still run after their deadline; make "
                "it async, give it its own time-outs, or use sandboxed=True"
            )
        return await call_function(self.function, on_abandoned=self._abandoned.add, **arguments)

    async def _run_sandboxed(
        self, call: ToolCall, deadline_s: float, sandbox: SandboxClient | None
    ) -> ToolResult:
        if sandbox is None:
            raise InvariantError(f"tool {self.spec.name} needs the code environment")
        assert self._program is not None
        code = self._program.replace("__ARGUMENTS__", repr(json.dumps(dict(call.arguments))))
        limits = Limits(wall_s=self.timeout_s)
        return await sandbox.run(RunRequest(call.id, code, limits=limits, deadline_s=deadline_s))


class _OpenFunction:
    """A function tool in one episode."""

    def __init__(self, tool: FunctionTool, sandbox: SandboxClient | None) -> None:
        self._tool, self._sandbox = tool, sandbox

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        return await self._tool.run(call, deadline_s, self._sandbox)

    async def close(self) -> None:
        """Nothing is held."""


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    sandboxed: bool = False,
    stateful: bool = False,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    sandboxed: bool = False,
    stateful: bool = False,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function a tool: `@rstar2.tool`, or `@rstar2.tool(timeout_s=5)`.

    The schema that the model reads comes from the signature and the docstring: the first paragraph
    describes the tool, a line `name: text` one of its parameters. The function stays callable, and
    `call_text(**arguments)` writes a call as the model does, for demonstrations.

    name: the tool's name; the function's by default
    timeout_s: longest time of a call; agent.tool_deadline_s is the upper limit
    sandboxed: run the function's source in the code environment; it must import and define
        everything inside
    stateful: the calls of one turn run one after another instead of at the same time

    Raises UserError for a parameter that has no type, or a type without a JSON schema.

    Example:

        @rstar2.tool
        def population(city: str, year: int = 2020) -> int:
            '''How many people live in a city.

            city: its English name
            '''
            return TABLE[city, year]
    """

    def make(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            function, name=name, timeout_s=timeout_s, sandboxed=sandboxed, stateful=stateful
        )

    return make if function is None else make(function)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


# --------------------------------------------------------------------------- results


def value_result(call_id: str, name: str, value: Any) -> ToolResult:
    """The result of a call that returned; raises TypeError for a value that is neither text nor
    JSON."""
    if isinstance(value, ToolResult):
        return replace(value, call_id=call_id)
    if value is None:
        return ToolResult(call_id, Outcome.NO_OUTPUT)
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"tool {name} returned {type(value).__name__}: return text or a JSON value")
    if isinstance(value, str):
        text = value
    else:
        try:
            text = msgspec.json.encode(value, order="sorted").decode()
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise TypeError(
                f"tool {name} returned a {kind}, which is neither text nor JSON: {error}"
            ) from error
    text = text.encode("utf-8", "replace").decode("utf-8")
    cut = len(text) - MAX_CHARS
    if cut > 0:
        half = MAX_CHARS // 2
        text = f"{text[:half]}\n[... {cut} characters left out ...]\n{text[-half:]}"
    outcome = Outcome.OK if text.strip() else Outcome.NO_OUTPUT
    return ToolResult(call_id, outcome, stdout=text, truncated=Truncation(stdout=max(0, cut)))


def trimmed_traceback(error: BaseException) -> str:
    """The last frames of a tool's own code, without directories, and the error."""
    here = Path(__file__).resolve().parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().parent != here
    ]
    lines = ["Traceback (most recent call last):"] if frames else []
    for frame in frames[-MAX_FRAMES:]:
        lines.append(f'  File "{Path(frame.filename).name}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"    {frame.line}")
    message = "".join(traceback.format_exception_only(error)).rstrip()
    return "\n".join([*lines, message[:MAX_ERROR_CHARS]])


# --------------------------------------------------------------------------- sandboxed functions


def _program(function: Callable[..., Any]) -> str:
    """The program that defines a function and prints what it returns."""
    name = function.__name__
    if inspect.iscoroutinefunction(function):
        raise UserError(f"tool {name}: a sandboxed tool must be a plain function, not async")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:
        raise UserError(f"tool {name}: the source of a sandboxed tool is needed: {error}") from None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise UserError(f"tool {name}: a sandboxed tool must be defined with def")
    outside = inspect.getclosurevars(function)
    names = sorted({*outside.nonlocals, *outside.globals} - {name})
    if names:
        raise UserError(
            f"tool {name} is sandboxed but uses {', '.join(names)} from outside: only its own "
            "source is sent, so import and define everything inside the function"
        )
    definition.decorator_list = []
    return (
        "from __future__ import annotations\nimport json as _json\n"
        f"{ast.unparse(definition)}\n"
        f"_result = {name}(**_json.loads(__ARGUMENTS__))\n"
        "if _result is not None:\n"
        "    print(_result if isinstance(_result, str) else _json.dumps(_result))\n"
    )

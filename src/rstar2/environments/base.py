"""The protocols between the agent loop and an environment.

    EnvironmentProtocol    problems, and episodes for them
      EpisodeProtocol      one rollout of one problem: prompt, tools, private state, reward
        ToolSpec           what the model reads about a tool
    Tool                   a tool that an environment gives to its episodes
      OpenTool             the tool in one episode, with that episode's state

The agent loop knows only the first three. What it does with an episode, in this order:

    open       -> messages and tools become the prompt
    every turn -> its calls run (`call`); after a turn without a call the environment replies
                  (`reply`), or it was the last one
    answer     -> what the model answered, from the text of its turns
    reward     -> a Reward, or a named Failure; skipped after an infrastructure failure
    close      -> exactly once, also after an error or a cancellation

Who is to blame decides how an error is reported:

| what happened                                            | becomes                           |
|----------------------------------------------------------|-----------------------------------|
| a call failed because of its arguments                   | ToolResult with a failed Outcome  |
| a call could not be executed (a server is gone)          | raise InfrastructureError         |
| the environment itself is broken (an exception)          | the rollout's Failure, by name    |
| the reward cannot be computed                            | Failure, never a reward of 0      |

Failures are retried, then dropped and counted by name; the model never reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rstar2.codeenv.protocol import RunRequest, SessionInfo, VerifyRequest, VerifyResult
from rstar2.types import (
    Conversation,
    Failure,
    Message,
    Problem,
    Reward,
    Split,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "a boolean"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
    "null": (type(None), "null"),
}
_EXAMPLES = {"string": "...", "integer": 0, "number": 0.0, "boolean": False, "array": []}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model reads about a tool, and the check of a call's arguments.

    A subclass may check more than the schema says (`fault`) or show another example.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    """JSON schema of the arguments: an object."""
    stateful: bool = False
    """Calls of one turn depend on each other: they run one after another, in order."""

    @property
    def signature(self) -> dict[str, Any]:
        """The tool in the form that chat templates render."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    @property
    def example(self) -> str:
        """A call as the model should write it; shown after a call that is not valid JSON."""
        required = self.parameters.get("required", ())
        values = {
            name: schema["enum"][0]
            if schema.get("enum")
            else _EXAMPLES.get(schema.get("type", ""), {})
            for name, schema in self.parameters.get("properties", {}).items()
            if name in required
        }
        return json.dumps({"name": self.name, "arguments": values}, ensure_ascii=False)

    @property
    def expected(self) -> str:
        """The arguments and their types; shown after a call with wrong arguments."""
        parts = []
        for name, schema in self.parameters.get("properties", {}).items():
            kind = schema.get("type", "value")
            optional = "" if name in self.parameters.get("required", ()) else "?"
            listed = "|".join(kind) if isinstance(kind, list) else kind
            parts.append(f'"{name}"{optional}: {listed}')
        return "{" + ", ".join(parts) + "}"

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        """Why these arguments cannot be used, as a sentence; None if they can.

        Checks names, required arguments, types and enums of the first level; deeper levels are
        the tool's own.
        """
        properties = self.parameters.get("properties", {})
        unknown = sorted(printable(key)[:40] for key in arguments if key not in properties)
        if unknown and not self.parameters.get("additionalProperties"):
            return f"unexpected {', '.join(map(repr, unknown[:3]))}."
        for name in self.parameters.get("required", ()):
            if name not in arguments:
                return f'"{name}" is missing.'
        for name, value in arguments.items():
            if reason := _value_fault(name, value, properties.get(name, {})):
                return reason
        return None


def _value_fault(name: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds] if kinds else []
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        wanted = " or ".join(_KINDS[kind][1] if kind in _KINDS else kind for kind in kinds)
        return f'"{name}" must be {wanted}, got {kind_of(value)}.'
    if "enum" in schema and value not in schema["enum"]:
        return f'"{name}" must be one of {json.dumps(schema["enum"], ensure_ascii=False)}.'
    return _wire_fault(name, value)


def _is_kind(value: Any, kind: str) -> bool:
    if kind not in _KINDS:
        return True
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    return isinstance(value, _KINDS[kind][0])


def _wire_fault(name: str, value: Any) -> str | None:
    """Why a value cannot be recorded as JSON in UTF-8."""
    if isinstance(value, str) and value != printable(value):
        return f'"{name}" holds a lone surrogate (\\ud800-\\udfff).'
    if isinstance(value, float) and not math.isfinite(value):
        return f'"{name}" must be a finite number.'
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f'"{name}" must be a number of at most 64 bits.'
    inner: Sequence[Any] = ()
    if isinstance(value, list):
        inner = value
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    return next((fault for item in inner if (fault := _wire_fault(name, item))), None)


def kind_of(value: Any) -> str:
    """The JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def printable(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answered in an episode."""

    text: str | None
    """What is graded; None if there is nothing to grade."""
    count: int = 1
    """How often the model answered; 0 makes the rollout unanswered."""
    complete: bool = True
    """Whether the last turn holds a complete answer: StopReason.ANSWERED or NO_ANSWER."""


def as_reward(value: object, answer: str | None, grader: str) -> Reward | Failure:
    """What a reward function returned, as a Reward; all but a finite number is a Failure."""
    if isinstance(value, Failure):
        return value
    number = value.value if isinstance(value, Reward) else value
    if not isinstance(number, int | float):  # a bool is an int
        kind = type(number).__name__
        return Failure("reward", f"the reward must be a number, got {number!r:.200} of type {kind}")
    try:
        worth = float(number)
    except OverflowError:
        digits = int(math.log10(abs(number))) + 1
        return Failure("reward", f"the reward is an integer of {digits} digits: too large a number")
    if not math.isfinite(worth):
        return Failure("reward", f"the reward is {worth}, not a finite number")
    return value if isinstance(value, Reward) else Reward(worth, answer, grader)


class SandboxClient(Protocol):
    """The methods of the code environment's client that tools and graders use."""

    async def run(self, request: RunRequest) -> ToolResult: ...

    async def verify(self, request: VerifyRequest) -> VerifyResult: ...

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo: ...

    async def close_session(self, session: str) -> None: ...


class EpisodeProtocol(Protocol):
    """One rollout of one problem. It is used by one task, and closed exactly once."""

    @property
    def messages(self) -> Sequence[Message]:
        """What the model reads first; the last message is the user's."""
        ...

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools of this episode; the loop refuses calls of others and wrong arguments."""
        ...

    @property
    def answer_tags(self) -> tuple[str, str] | None:
        """The tags around an answer, if answers have tags: calls between them are refused."""
        ...

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Execute a call that `tools` accept, and return within the deadline.

        The calls of one turn run at the same time unless one of their tools is stateful. Raises
        InfrastructureError if the call could not be executed.
        """
        ...

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The user's messages after the last of all turns, which has no call; None ends the
        episode."""
        ...

    def answer(self, turns: Sequence[Turn]) -> Answer:
        """Read the answer from the text of all turns. Pure."""
        ...

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Reward | Failure:
        """What the finished rollout is worth, or why that is unknown."""
        ...

    async def close(self) -> None:
        """Release what the episode holds."""
        ...


@runtime_checkable
class EnvironmentProtocol(Protocol):
    """A task: its problems, and episodes for them. Many episodes are open at the same time."""

    @property
    def name(self) -> str:
        """A short name for records and messages."""
        ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `open` needs the code environment; a run starts it only then."""
        ...

    @property
    def prefill(self) -> str:
        """The beginning of every first turn, which the model reads instead of sampling it."""
        ...

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """At most `count` problems of a split; None means all, or the environment's default.

        A pure function of its arguments.
        """
        ...

    def demonstrations(self, count: int, seed: int) -> Iterator[Conversation]:
        """`count` conversations for SFT; none if the environment has no demonstrations."""
        ...

    async def open(
        self, problem: Problem, *, seed: int, sandbox: SandboxClient | None
    ) -> EpisodeProtocol:
        """Start an episode. The seed is the rollout's own; use it for everything random."""
        ...

    def format_penalty(self, trajectory: Trajectory) -> float:
        """RoC's p_format: 0 for a rollout whose format is as it should be, at most 1."""
        ...

    async def close(self) -> None:
        """Release what is shared by all episodes (a tool server). It may be used again after."""
        ...


class OpenTool(Protocol):
    """A tool in one episode."""

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """As EpisodeProtocol.call."""
        ...

    async def close(self) -> None:
        """Release what the tool holds for this episode."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool that an environment gives to its episodes."""

    @property
    def spec(self) -> ToolSpec: ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `open` needs the code environment."""
        ...

    def open(self, sandbox: SandboxClient | None) -> OpenTool:
        """The tool for one episode; expensive state is created at the first call."""
        ...

"""A trajectory as a person reads it: thought, code, what came back, answer. Pure.

Text is cut at the agent's tags. Code and results come from the trajectory's fields, in order, so
what is shown as an outcome is what was recorded; a tool response that the model made up in its
own text is shown as its thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rstar2.agent.prompts import tool_text
from rstar2.types import Outcome, ToolResult, Trajectory

_BLOCK = re.compile(
    r"<reason>(?P<reason>.*?)(?:</reason>|(?=<tool_call>|<answer>)|\Z)"
    r"|<(?P<tag>tool_call|tool_response|answer)>(?P<body>.*?)(?:</(?P=tag)>|\Z)",
    re.S,
)
_MARKS = re.compile(
    r"<\|im_start\|>\w*\n?|<\|im_end\|>|</?(?:reason|tool_call|tool_response|answer)>"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece: `kind` is thought, code, result or answer; `outcome` only of a result."""

    kind: str
    text: str
    outcome: str = ""
    failed: bool = False
    turn: int = 0
    """Number of the turn that it belongs to, and for a result its number in that turn."""
    result: int = 0


def segments(trajectory: Trajectory) -> list[Segment]:
    """The pieces of a trajectory, in order."""
    calls = [
        (number, call, turn.results if call is turn.calls[-1] else ())
        for number, turn in enumerate(trajectory.turns)
        for call in turn.calls
    ]
    found: list[Segment] = []
    awaited = turn = 0
    for kind, text in _blocks(trajectory.text):
        if kind == "tool_call" and calls:
            turn, call, results = calls.pop(0)
            found.append(Segment("code", call.code or call.raw or text, turn=turn))
            found += [_result(result, turn, number) for number, result in enumerate(results)]
            awaited += len(results)
            turn += bool(results)  # they end it
        elif kind == "tool_response" and awaited:
            awaited -= 1
        elif text:
            shown = {"tool_call": "code", "answer": "answer"}.get(kind, "thought")
            found.append(Segment(shown, text, turn=turn))
    return found


def _result(result: ToolResult, turn: int, number: int) -> Segment:
    ours = result.outcome is Outcome.INFRASTRUCTURE
    text = (result.message if ours else tool_text(result)).strip()
    failed = not result.outcome.succeeded
    return Segment("result", text, result.outcome.value, failed, turn, number)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(tag, content) in order; text outside of tags comes as reason."""
    end = 0
    for match in _BLOCK.finditer(text):
        yield "reason", _clean(text[end : match.start()])
        if match["tag"]:
            yield match["tag"], _clean(match["body"])
        else:
            yield "reason", _clean(match["reason"])
        end = match.end()
    yield "reason", _clean(text[end:])


def _clean(text: str) -> str:
    return _MARKS.sub("", text).strip()

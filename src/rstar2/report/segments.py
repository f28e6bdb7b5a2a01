"""Splits a trajectory into readable segments: thought, code, result, answer. Pure.

Text is split at the agent's tags. Code and results come from the trajectory's fields, in order, so
a shown outcome is a recorded one; a tool response that the model wrote itself is shown as thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rstar2.tool_text import tool_text
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
    """`kind` is thought, code, result or answer; only results have an `outcome`."""

    kind: str
    text: str
    outcome: str = ""
    failed: bool = False
    turn: int = 0
    """The number of its turn, and for a result its number in the turn."""
    result: int = 0


def segments(trajectory: Trajectory) -> list[Segment]:
    """The segments of a trajectory, in order."""
    calls = [
        (number, call, turn.results if call is turn.calls[-1] else ())
        for number, turn in enumerate(trajectory.all_turns)
        for call in turn.calls
    ]
    parts: list[Segment] = []
    awaited = turn = 0
    for kind, text in _blocks(trajectory.text):
        if kind == "tool_call" and calls:
            turn, call, results = calls.pop(0)
            parts.append(Segment("code", call.shown or text, turn=turn))
            parts += [_result(result, turn, number) for number, result in enumerate(results)]
            awaited += len(results)
            turn += bool(results)  # results end the turn
        elif kind == "tool_response" and awaited:
            awaited -= 1
        elif text:
            shown = {"tool_call": "code", "answer": "answer"}.get(kind, "thought")
            parts.append(Segment(shown, text, turn=turn))
    return parts


def _result(result: ToolResult, turn: int, number: int) -> Segment:
    ours = result.outcome is Outcome.INFRASTRUCTURE
    text = (result.message if ours else tool_text(result)).strip()
    failed = not result.outcome.succeeded
    return Segment("result", text, result.outcome.value, failed, turn, number)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(tag, content) in order; text outside of tags counts as `reason`."""
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

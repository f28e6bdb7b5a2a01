"""Text of one assistant turn -> tool calls. Pure; needs no tokenizer.

The format is that of Hermes: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`. No
text can make the parser raise: an invalid call becomes a ToolCall with `error` and a `message` that
tells the model what to write instead. The outcomes:

| the model wrote                                  | outcome        |
|--------------------------------------------------|----------------|
| JSON that does not parse, or is no object        | BAD_JSON       |
| a tag that is never closed, text after the JSON  | BAD_JSON       |
| a name that is missing or not a known tool       | UNKNOWN_TOOL   |
| arguments that the tool's schema does not accept | BAD_ARGUMENTS  |
| a call between answer tags                       | BAD_ARGUMENTS  |
| calls beyond the limit of a turn (one for all)   | BAD_ARGUMENTS  |

Invariants: calls are in the order of the text; at most `max_calls` of them are executable and at
most `max_calls + 1` are returned; ids are unique and a function of the turn and the call's own
text, so that executing one twice can never return another call's result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rstar2.environments.base import ToolSpec, kind_of, printable
from rstar2.types import Outcome, ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

_ANY_CALL = '{"name": "...", "arguments": {...}}'
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


class _Refused(Exception):
    """Internal: why a text is not a valid call."""

    def __init__(self, outcome: Outcome, message: str, name: str = "") -> None:
        super().__init__(message)
        self.outcome, self.message, self.name = outcome, message, name


@dataclass(frozen=True, slots=True)
class CallParser:
    """Reads the calls of turns; made once per rollout, from its episode's tools."""

    tools: Sequence[ToolSpec]
    max_calls: int
    answer_tags: tuple[str, str] | None = None
    """Calls between these tags are refused."""

    def parse(self, text: str, turn_id: str) -> tuple[ToolCall, ...]:
        """Every tool call of a turn, in order."""
        calls: list[ToolCall] = []
        position = seen = 0
        in_answer = False
        while len(calls) < self.max_calls and (start := text.find(CALL_OPEN, position)) >= 0:
            body = start + len(CALL_OPEN)
            in_answer = self._inside_answer(text, seen, start, in_answer)
            seen = start
            position, payload, refused = self._scan(text, body)
            raw = text[body:position].removesuffix(CALL_CLOSE).strip()
            if refused is None and in_answer and self.answer_tags is not None:
                refused = _Refused(
                    Outcome.BAD_ARGUMENTS,
                    f"A tool call inside {self.answer_tags[0]} is not executed. "
                    "Call the tool before you answer.",
                )
            calls.append(self._call(_call_id(turn_id, len(calls), raw), raw, payload, refused))
        if excess := text.count(CALL_OPEN, position):
            note = f"{excess} more tool call(s) not executed: at most {self.max_calls} per turn."
            calls.append(
                ToolCall(
                    id=_call_id(turn_id, len(calls), note),
                    name="",
                    error=Outcome.BAD_ARGUMENTS,
                    message=note,
                )
            )
        return tuple(calls)

    def _inside_answer(self, text: str, start: int, end: int, before: bool) -> bool:
        """Whether an answer is open at `end`, given whether one was at `start`."""
        if self.answer_tags is None:
            return False
        opened, closed = (text.rfind(tag, start, end) for tag in self.answer_tags)
        return before if opened == closed else opened > closed

    def _scan(self, text: str, body: int) -> tuple[int, Any, _Refused | None]:
        """Decode the JSON at `body`; return where the call ends, its value and why it is refused.

        The JSON is decoded before searching for the closing tag: code may contain "</tool_call>".
        """
        start = _space(text, body)
        try:
            payload, stop = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as error:
            end, closed = _resume(text, body)
            return end, None, self._bad_json(_explain(error, text[body:end], start, closed))
        except (ValueError, RecursionError) as error:  # huge integers, very deep nesting
            end, _ = _resume(text, body)
            return end, None, self._bad_json(f"{type(error).__name__} while reading the JSON.")
        after = _space(text, stop)
        if text.startswith(CALL_CLOSE, after):
            return after + len(CALL_CLOSE), payload, None
        end, closed = _resume(text, stop)
        reason = f"Unexpected text after the JSON object before {CALL_CLOSE}."
        if not closed:
            reason = f"{CALL_OPEN} is not closed by {CALL_CLOSE}."
        return end, None, self._bad_json(reason)

    def _call(self, call_id: str, raw: str, payload: Any, refused: _Refused | None) -> ToolCall:
        if refused is None:
            try:
                spec, arguments = self._checked(payload)
            except _Refused as error:
                refused = error
            else:
                return ToolCall(id=call_id, name=spec.name, arguments=arguments, raw=raw)
        return ToolCall(
            id=call_id, name=refused.name, raw=raw, error=refused.outcome, message=refused.message
        )

    def _checked(self, payload: Any) -> tuple[ToolSpec, dict[str, Any]]:
        """The tool of a decoded call and its arguments."""
        if not isinstance(payload, dict):
            raise self._bad_json(f"expected a JSON object, got {kind_of(payload)}.")
        name = payload.get("name")
        spec = next((tool for tool in self.tools if tool.name == name), None)
        if spec is None:
            shown = printable(name)[:80] if isinstance(name, str) else ""
            what = f"Unknown tool {shown!r}." if shown else 'The tool call has no "name".'
            raise _Refused(Outcome.UNKNOWN_TOOL, f"{what} {self._known()}", shown)
        arguments = payload.get("arguments")
        if isinstance(arguments, dict):
            fault = spec.fault(arguments)
        else:
            fault = f'"arguments" must be an object, got {kind_of(arguments)}.'
        if fault is not None:
            message = f"Wrong arguments: {fault} Expected {spec.expected}."
            raise _Refused(Outcome.BAD_ARGUMENTS, message, spec.name)
        return spec, payload["arguments"]

    def _known(self) -> str:
        names = [tool.name for tool in self.tools]
        if len(names) == 1:
            return f"The only tool is {names[0]}."
        return f"The tools are {', '.join(names)}." if names else "There are no tools."

    def _bad_json(self, reason: str) -> _Refused:
        expected = self.tools[0].example if len(self.tools) == 1 else _ANY_CALL
        message = f"The tool call is not valid: {reason} Expected {expected}"
        return _Refused(Outcome.BAD_JSON, message)


def _space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _resume(text: str, position: int) -> tuple[int, bool]:
    """Where a broken call ends: its closing tag, else the next opening one, else the text's end."""
    reopen = text.find(CALL_OPEN, position)
    end = reopen if reopen >= 0 else len(text)
    close = text.find(CALL_CLOSE, position, end)
    return (close + len(CALL_CLOSE), True) if close >= 0 else (end, False)


def _explain(error: json.JSONDecodeError, raw: str, start: int, closed: bool) -> str:
    if not closed and not raw.strip():
        return f"{CALL_OPEN} is empty and not closed by {CALL_CLOSE}."
    hint = ""
    if "control character" in error.msg:
        hint = " Write line breaks inside a JSON string as \\n."
    elif "escape" in error.msg:
        hint = " Write a backslash inside a JSON string as \\\\."
    unclosed = "" if closed else f" {CALL_OPEN} is not closed by {CALL_CLOSE}."
    return f"{error.msg} at character {error.pos - start}.{hint}{unclosed}"


def _call_id(turn_id: str, index: int, raw: str) -> str:
    digest = hashlib.blake2b(raw.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{turn_id}.{index}-{digest}"

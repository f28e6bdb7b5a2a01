"""Text of one assistant turn -> tool calls and answer tags. Pure; needs no tokenizer.

The format is that of Hermes: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`. No
text can make the parser raise: an invalid call becomes a ToolCall with `error` and a `message` that
tells the model what to write instead. The outcomes:

| the model wrote                                  | outcome        |
|--------------------------------------------------|----------------|
| JSON that does not parse, or is no object        | BAD_JSON       |
| a tag that is never closed, text after the JSON  | BAD_JSON       |
| a name that is missing or not a known tool       | UNKNOWN_TOOL   |
| arguments missing, of a wrong type or unknown    | BAD_ARGUMENTS  |
| a call inside <answer>                           | BAD_ARGUMENTS  |
| calls beyond the limit of a turn (one for all)   | BAD_ARGUMENTS  |

Invariants: calls are in the order of the text; at most `max_calls` of them are executable and at
most `max_calls + 1` are returned; ids are unique and a function of the turn and the call's own
text, so that executing one twice can never return another call's result.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from rstar2.types import Outcome, ToolCall

TOOL_NAME = "execute_python_code_with_standard_io"

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"

_SHAPE = f'{{"name": "{TOOL_NAME}", "arguments": {{"code": "...", "input": ""}}}}'
_DECODER = json.JSONDecoder()
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, which may be a brace that does not count."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The tool calls and answer tags of one turn. Without a call the rollout ends."""

    calls: tuple[ToolCall, ...]
    answer_tags: int
    answered: bool
    """The turn holds a complete <answer>...</answer>."""


class _Refused(Exception):
    """Internal: why a text is not a valid call."""

    def __init__(self, outcome: Outcome, message: str, name: str = "") -> None:
        super().__init__(message)
        self.outcome, self.message, self.name = outcome, message, name


def parse_turn(text: str, *, turn_id: str, max_calls: int) -> ParsedTurn:
    """Read every tool call of a turn, in order, and count its answer tags."""
    calls: list[ToolCall] = []
    position = seen = 0
    in_answer = False
    while len(calls) < max_calls and (start := text.find(CALL_OPEN, position)) >= 0:
        body = start + len(CALL_OPEN)
        in_answer = _inside_answer(text, seen, start, in_answer)
        seen = start
        position, payload, refused = _scan(text, body)
        raw = text[body:position].removesuffix(CALL_CLOSE).strip()
        if refused is None and in_answer:
            refused = _Refused(
                Outcome.BAD_ARGUMENTS,
                "A tool call inside <answer> is not executed. Call the tool before you answer.",
            )
        calls.append(_call(_call_id(turn_id, len(calls), raw), raw, payload, refused))
    if excess := text.count(CALL_OPEN, position):
        note = f"{excess} more tool call(s) not executed: at most {max_calls} per turn."
        calls.append(
            ToolCall(
                id=_call_id(turn_id, len(calls), note),
                name="",
                error=Outcome.BAD_ARGUMENTS,
                message=note,
            )
        )
    return ParsedTurn(tuple(calls), count_answer_tags(text), last_answer(text) is not None)


def count_answer_tags(text: str) -> int:
    """The number of <answer> tags; RoC's p_format penalises none and more than one."""
    return text.count(ANSWER_OPEN)


def last_answer(text: str) -> str | None:
    """Content of the last complete <answer>...</answer>."""
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = text[start + len(ANSWER_OPEN) : end]
    # "<answer>a</answer> b</answer>": the content ends at the first closing tag.
    return content.split(ANSWER_CLOSE, 1)[0]


def answer_of(text: str) -> str | None:
    """Content of the last complete \\boxed{} of the last <answer>; None if there is none."""
    answer = last_answer(text)
    return None if answer is None else boxed_content(answer)


def boxed_content(text: str) -> str | None:
    """Content of the last \\boxed{} whose braces close; nested braces are kept.

    One pass over the text, so that thousands of unclosed boxes cost no more than their length.
    """
    boxes = {match.end() for match in _BOXED.finditer(text)}
    opened: list[int] = []
    """Where the content of each open brace starts."""
    last = (-1, -1)
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened and (start := opened.pop()) in boxes:
            last = max(last, (start, match.start()))
    return text[slice(*last)].strip() if last[0] >= 0 else None


def _inside_answer(text: str, start: int, end: int, before: bool) -> bool:
    """Whether an answer is open at `end`, given whether one was at `start`."""
    opened = text.rfind(ANSWER_OPEN, start, end)
    closed = text.rfind(ANSWER_CLOSE, start, end)
    return before if opened == closed else opened > closed


def _scan(text: str, body: int) -> tuple[int, Any, _Refused | None]:
    """Decode the JSON at `body`; return where the call ends, its value and why it is refused.

    The JSON is decoded before searching for the closing tag: code may contain "</tool_call>".
    """
    start = _space(text, body)
    try:
        payload, stop = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        end, closed = _resume(text, body)
        return end, None, _bad_json(_explain(error, text[body:end], start, closed))
    except (ValueError, RecursionError) as error:  # huge integers, very deep nesting
        end, _ = _resume(text, body)
        return end, None, _bad_json(f"{type(error).__name__} while reading the JSON.")
    after = _space(text, stop)
    if text.startswith(CALL_CLOSE, after):
        return after + len(CALL_CLOSE), payload, None
    end, closed = _resume(text, stop)
    reason = f"Unexpected text after the JSON object before {CALL_CLOSE}."
    return end, None, _bad_json(reason if closed else f"{CALL_OPEN} is not closed by {CALL_CLOSE}.")


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


def _bad_json(reason: str) -> _Refused:
    return _Refused(Outcome.BAD_JSON, f"The tool call is not valid: {reason} Expected {_SHAPE}")


def _call_id(turn_id: str, index: int, raw: str) -> str:
    digest = hashlib.blake2b(raw.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{turn_id}.{index}-{digest}"


def _call(call_id: str, raw: str, payload: Any, refused: _Refused | None) -> ToolCall:
    if refused is None:
        try:
            arguments = _arguments(payload)
        except _Refused as error:
            refused = error
        else:
            return ToolCall(id=call_id, name=TOOL_NAME, arguments=arguments, raw=raw)
    return ToolCall(
        id=call_id, name=refused.name, raw=raw, error=refused.outcome, message=refused.message
    )


def _arguments(payload: Any) -> dict[str, Any]:
    """Check a decoded call against the tool's signature; returns its arguments."""
    if not isinstance(payload, dict):
        raise _bad_json(f"expected a JSON object, got {_kind(payload)}.")
    name = payload.get("name")
    if name != TOOL_NAME:
        shown = _clean(name)[:80] if isinstance(name, str) else ""
        what = f"Unknown tool {shown!r}." if shown else 'The tool call has no "name".'
        raise _Refused(Outcome.UNKNOWN_TOOL, f"{what} The only tool is {TOOL_NAME}.", shown)
    arguments = payload.get("arguments")
    if not isinstance(arguments, dict):
        raise _bad_arguments(f'"arguments" must be an object, got {_kind(arguments)}.')
    unknown = sorted(_clean(key)[:40] for key in arguments if key not in ("code", "input"))
    if unknown:
        raise _bad_arguments(f"unexpected {', '.join(map(repr, unknown[:3]))}.")
    if "code" not in arguments:
        raise _bad_arguments('"code" is missing.')
    code, stdin = arguments["code"], arguments.get("input", "")
    for key, value in (("code", code), ("input", stdin)):
        if not isinstance(value, str):
            raise _bad_arguments(f'"{key}" must be a string, got {_kind(value)}.')
        if value != _clean(value):
            raise _bad_arguments(f'"{key}" holds a lone surrogate (\\ud800-\\udfff).')
    if not code.strip():
        raise _bad_arguments('"code" is empty.')
    return arguments


def _bad_arguments(reason: str) -> _Refused:
    return _Refused(
        Outcome.BAD_ARGUMENTS,
        f'Wrong arguments: {reason} Expected {{"code": string, "input": string}}.',
        TOOL_NAME,
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _clean(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")

"""Converters: how a row of each public data set becomes a conversation.

A converter is a pure function from a row's fields to a `ParsedConversation`. It raises
`UnusableRow` if a row does not have its publisher's shape or is of a kind that is not wanted, and
`BadCall` if a tool call does not parse. It never guesses.

| name      | published as                                      | what it gives                  |
|-----------|---------------------------------------------------|--------------------------------|
| toolace   | Team-ACE/ToolACE                                  | calls in brackets -> JSON      |
| apigen    | Salesforce/APIGen-MT-5k                           | JSON calls, many turns         |
| glaive    | glaiveai/glaive-function-calling-v2               | <functioncall> -> JSON         |
| magicoder | ise-uiuc/Magicoder-OSS-Instruct-75K,              | Python solutions -> calls of   |
|           | ise-uiuc/Magicoder-Evol-Instruct-110K             | our tool; other languages out  |
| tulu      | allenai/tulu-3-sft-personas-instruction-following | as it is                       |
| nemotron  | nvidia/Llama-Nemotron-Post-Training-Dataset       | chat without reasoning traces  |
| messages  | any; OpenAI-style messages, tool_calls, tools     | as it is                       |
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar2.errors import UserError
from rstar2.paper_format import TOOL
from rstar2.problems.sft.calls import (
    BadCall,
    FunctionCall,
    Signature,
    bracketed_calls,
    call_of,
    json_call,
    meant_as_bracketed,
    quoted_call,
    signature,
    signatures,
)
from rstar2.types import Conversation, Message


class UnusableRow(ValueError):
    """A row that cannot be used: `kind` is counted, the message says why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One message, with its calls separate from its text."""

    role: str
    text: str
    calls: tuple[FunctionCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedConversation:
    """One conversation as a converter reads it; `notes` name what it left out on purpose."""

    messages: tuple[ParsedMessage, ...]
    tools: tuple[Signature, ...] = ()
    notes: tuple[str, ...] = ()
    id: str = ""
    """Source and row number; `prepare_sft` sets it."""


Converter = Callable[[Mapping[str, Any]], ParsedConversation]


def to_conversation(talk: ParsedConversation, source: str) -> Conversation:
    """Write the calls into the text, as the model should write them."""
    messages = tuple(
        Message(said.role, "\n".join([*filter(None, [said.text]), *(c.text() for c in said.calls)]))
        for said in talk.messages
    )
    return Conversation(talk.id, messages, talk.tools, source)


# --------------------------------------------------------------------------- fields


def _text(fields: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    if name not in fields:
        raise UnusableRow(
            "missing field", f"field {name!r} is missing; the row has {sorted(map(str, fields))}"
        )
    value = fields[name]
    if not isinstance(value, str):
        raise UnusableRow("wrong type", f"field {name!r} is a {type(value).__name__}, not text")
    if not value.strip() and not empty:
        raise UnusableRow("empty text", f"field {name!r} is empty")
    return value.strip()


def _list(fields: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise UnusableRow("wrong type", f"field {name!r} should be a non-empty list")
    if not all(isinstance(each, Mapping) for each in value):
        raise UnusableRow("wrong type", f"field {name!r} should hold objects")
    return value


def _system(text: str) -> tuple[ParsedMessage, ...]:
    return (ParsedMessage("system", text),) if text else ()


def _turns(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(from, value) of ShareGPT-style conversations."""
    return [(_text(turn, "from"), _text(turn, "value")) for turn in _list(fields, "conversations")]


def _unknown_role(role: str) -> UnusableRow:
    return UnusableRow("unknown role", f"role {role!r} is not one of this publisher's")


# --------------------------------------------------------------------------- function calls

_TOOLACE_LIST = "Here is a list of functions in JSON format that you can invoke:"


def _toolace(fields: Mapping[str, Any]) -> ParsedConversation:
    """The functions are in the system text; the instructions on call syntax are left out."""
    before, marker, after = _text(fields, "system").partition(_TOOLACE_LIST)
    if not marker:
        raise UnusableRow("no functions", "the system text lists no functions")
    try:
        listed, _ = json.JSONDecoder().raw_decode(after.lstrip())
    except ValueError as error:
        raise BadCall(f"the list of functions does not parse: {error}") from error
    if not isinstance(listed, list):
        raise BadCall("the functions are not a JSON array")
    tools = tuple(signature(each) for each in listed)
    names = [tool["function"]["name"] for tool in tools]
    messages = list(_system(before.strip()))
    for role, value in _turns(fields):
        if role == "assistant" and meant_as_bracketed(value):
            messages.append(ParsedMessage("assistant", "", bracketed_calls(value, names)))
        elif role in ("user", "assistant", "tool"):
            messages.append(ParsedMessage(role, value))
        else:
            raise _unknown_role(role)
    return ParsedConversation(tuple(messages), tools)


def _apigen(fields: Mapping[str, Any]) -> ParsedConversation:
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    tools = signatures(_text(fields, "tools"))
    messages = list(_system(_text(fields, "system", empty=True)))
    for role, value in _turns(fields):
        if role == "function_call":
            messages.append(ParsedMessage("assistant", "", (json_call(value),)))
        elif role in roles:
            messages.append(ParsedMessage(roles[role], value))
        else:
            raise _unknown_role(role)
    return ParsedConversation(tuple(messages), tools)


_GLAIVE_TURN = re.compile(r"(?:\A|\n{2,})(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_END, _GLAIVE_CALL = "<|endoftext|>", "<functioncall>"


def _glaive(fields: Mapping[str, Any]) -> ParsedConversation:
    system = _text(fields, "system").removeprefix("SYSTEM:").strip()
    head, brace, listed = system.partition("{")
    tools = _glaive_tools(brace + listed) if brace else ()
    head = head.strip().removesuffix("-").strip()
    parts = _GLAIVE_TURN.split(_text(fields, "chat"))
    if parts[0].strip():
        raise UnusableRow("wrong shape", f"the chat begins with {parts[0][:40]!r}")
    messages = list(_system(head))
    for speaker, value in zip(parts[1::2], parts[2::2], strict=True):
        value = value.strip().removesuffix(_GLAIVE_END).strip()
        said, called, call = value.partition(_GLAIVE_CALL)
        if called and speaker == "ASSISTANT":
            messages.append(ParsedMessage("assistant", said.strip(), (quoted_call(call),)))
        else:
            messages.append(ParsedMessage(_GLAIVE_ROLES[speaker], value))
    return ParsedConversation(tuple(messages), tools)


def _glaive_tools(text: str) -> tuple[Signature, ...]:
    """JSON objects one after the other."""
    decoder, place = json.JSONDecoder(), 0
    tools: list[Signature] = []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError as error:
            raise BadCall(f"the list of functions does not parse: {error}") from error
        tools.append(signature(value))
        while place < len(text) and text[place].isspace():
            place += 1
    return tuple(tools)


_FENCE = re.compile(r"^```[ \t]*([\w+#-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def _magicoder(fields: Mapping[str, Any]) -> ParsedConversation:
    """A Python solution becomes a call of our tool.

    Text after the code would follow the tool response, which is unknown, so it is left out and
    noted.
    """
    oss = "problem" in fields
    problem = _text(fields, "problem" if oss else "instruction")
    solution = _text(fields, "solution" if oss else "response")
    if oss and (language := _text(fields, "lang")) != "python":
        raise UnusableRow("not Python", f"lang is {language!r}")
    blocks = list(_FENCE.finditer(solution))
    if len(blocks) != 1:
        raise UnusableRow("not one code block", f"the solution has {len(blocks)} code blocks")
    tag, code = blocks[0][1].lower(), blocks[0][2]
    if tag not in (("python", "py", "python3", "") if oss else ("python", "py", "python3")):
        raise UnusableRow("not Python", f"the code block is {tag or 'untagged'!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes do not matter here
            ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise BadCall(f"the code is not Python: {error}") from error
    name = TOOL["function"]["name"]
    call = FunctionCall(name, {"code": code.rstrip("\n"), "input": ""})
    after = solution[blocks[0].end() :].strip()
    return ParsedConversation(
        (
            ParsedMessage("user", problem),
            ParsedMessage("assistant", solution[: blocks[0].start()].strip(), (call,)),
        ),
        (TOOL,),
        ("text after the code left out",) if after else (),
    )


# --------------------------------------------------------------------------- chat


def _messages(fields: Mapping[str, Any], name: str = "messages") -> tuple[ParsedMessage, ...]:
    """OpenAI-style messages."""
    parsed: list[ParsedMessage] = []
    for message in _list(fields, name):
        role = _text(message, "role")
        if role not in ("system", "user", "assistant", "tool"):
            raise _unknown_role(role)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise BadCall("tool_calls is not a list")
        made = tuple(call_of(c.get("function", c) if isinstance(c, Mapping) else c) for c in calls)
        if made and message.get("content") is None:
            parsed.append(ParsedMessage(role, "", made))
        else:
            parsed.append(ParsedMessage(role, _text(message, "content", empty=bool(made)), made))
    return tuple(parsed)


def _tulu(fields: Mapping[str, Any]) -> ParsedConversation:
    return ParsedConversation(_messages(fields))


_HEADERS = re.compile(
    r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(?:<\|eot_id\|>|\Z)", re.S
)
_SWITCH = re.compile(r"detailed thinking (?:on|off)\.?\s*")


def _nemotron(fields: Mapping[str, Any]) -> ParsedConversation:
    """Chat without reasoning; the switch "detailed thinking off" of another model is removed."""
    if (reasoning := str(fields.get("reasoning", "off"))) != "off":
        raise UnusableRow("reasoning trace", f"reasoning is {reasoning!r}")
    if (category := str(fields.get("category", "chat"))) != "chat":
        raise UnusableRow("not chat", f"category is {category!r}")
    if "messages" in fields:
        messages = _messages(fields)
    else:
        messages = _nemotron_input(fields)
        output = _text(fields, "output").removesuffix("<|eot_id|>").strip()
        messages = (*messages, ParsedMessage("assistant", output))
    system = _text(fields, "system_prompt", empty=True) if fields.get("system_prompt") else ""
    if messages[0].role == "system":
        system, messages = messages[0].text, messages[1:]
    return ParsedConversation((*_system(_SWITCH.sub("", system).strip()), *messages))


def _nemotron_input(fields: Mapping[str, Any]) -> tuple[ParsedMessage, ...]:
    """Version 1.1 has messages, version 1 one text in the Llama 3 template."""
    if not isinstance(fields.get("input"), str):
        return _messages(fields, "input")
    turns = [(role, text.strip()) for role, text in _HEADERS.findall(fields["input"])]
    if turns and turns[-1] == ("assistant", ""):
        turns.pop()
    if not turns:
        return (ParsedMessage("user", _text(fields, "input")),)
    return tuple(ParsedMessage(role, text) for role, text in turns)


def _any_messages(fields: Mapping[str, Any]) -> ParsedConversation:
    tools = fields.get("tools") or ()
    if isinstance(tools, str):
        return ParsedConversation(_messages(fields), signatures(tools))
    return ParsedConversation(_messages(fields), tuple(signature(each) for each in tools))


CONVERTERS: dict[str, Converter] = {
    "toolace": _toolace,
    "apigen": _apigen,
    "glaive": _glaive,
    "magicoder": _magicoder,
    "tulu": _tulu,
    "nemotron": _nemotron,
    "messages": _any_messages,
}

_MARKS: tuple[tuple[str, set[str]], ...] = (
    ("apigen", {"conversations", "system", "tools"}),
    ("toolace", {"conversations", "system"}),
    ("glaive", {"chat", "system"}),
    ("magicoder", {"problem", "solution", "lang"}),
    ("magicoder", {"instruction", "response"}),
    ("tulu", {"messages", "constraints"}),
    ("nemotron", {"input", "output"}),
    ("nemotron", {"messages", "category", "reasoning"}),
    ("messages", {"messages"}),
)


def recognise(fields: Mapping[str, Any]) -> str:
    """The name of the converter for a row's fields; a UserError lists the choices."""
    for name, wanted in _MARKS:
        if wanted <= fields.keys():
            return name
    raise UserError(
        f"no converter knows a row with the fields {sorted(map(str, fields))}; "
        f"name one of {sorted(CONVERTERS)} (CONVERTER:FILE)"
    )

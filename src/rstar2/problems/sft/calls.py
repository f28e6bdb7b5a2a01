"""Parse tool calls as publishers write them, and check them against their signatures.

Each of three notations has a strict grammar. Other text is a `BadCall`, which the caller counts and
drops. Nothing is repaired: no quotes are added and no names are guessed.

| notation                                            | written by                   |
|-----------------------------------------------------|------------------------------|
| {"name": "f", "arguments": {...} or "{...}"}        | APIGen-MT, OpenAI-style      |
| {"name": "f", "arguments": '{...}'}                 | Glaive; \\' is an apostrophe |
| [f(a="x", b=[1, 2]), g h(c=True)]                   | ToolACE                      |

Signatures become JSON schema: Python type names (dict, int, float ...) are translated.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar2.problems.rows import refuse_constant

Signature = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}."""


class BadCall(ValueError):
    """A call that does not parse, or that its signature does not allow."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a named tool."""

    name: str
    arguments: Mapping[str, Any]

    def text(self) -> str:
        """The call as the model should write it, and as our chat template writes `tool_calls`."""
        name = json.dumps(self.name, ensure_ascii=False)
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


# --------------------------------------------------------------------------- reading calls


def json_call(text: str) -> FunctionCall:
    """A call written as a JSON object; its arguments may be an object or JSON in a string."""
    return call_of(_json(text, "the call"))


def call_of(value: Any) -> FunctionCall:
    """A call from a decoded JSON object."""
    if not isinstance(value, Mapping):
        raise BadCall(f"a call should be a JSON object, not {type(value).__name__}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise BadCall("the call has no name")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"the arguments of {name}")
    if not isinstance(arguments, Mapping):
        raise BadCall(f"the arguments of {name} are not a JSON object")
    return FunctionCall(name, arguments)


_QUOTED = re.compile(r"""\{"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)


def quoted_call(text: str) -> FunctionCall:
    """A call whose arguments are JSON between apostrophes."""
    match = _QUOTED.fullmatch(text.strip())
    if match is None:
        return json_call(text)
    return call_of({"name": match[1], "arguments": match[2].replace("\\'", "'")})


_BRACKETED = re.compile(
    r"""\[\s*[^\[\](){}"']+(?:\([^()]*\)[^\[\](){}"']*)?\(.*\)\s*\]""", re.DOTALL
)
_ARGUMENT = re.compile(r"""\s*([^\s=,()"'\[\]{}]+)\s*=(?!=)\s*""")
_SPACE = re.compile(r"\s*")


def meant_as_bracketed(text: str) -> bool:
    """Whether a text has the shape of [f(...), ...]."""
    return _BRACKETED.fullmatch(text.strip()) is not None


def bracketed_calls(text: str, names: Sequence[str]) -> tuple[FunctionCall, ...]:
    """Calls written as [f(a=1), g(b="x")]; names may contain spaces, so only listed ones parse."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise BadCall("the calls are not between brackets")
    by_length = sorted(names, key=len, reverse=True)
    calls: list[FunctionCall] = []
    place = 1
    while True:
        place = _after_space(text, place)
        name = next((n for n in by_length if text.startswith(n, place)), None)
        opening = _after_space(text, place + len(name)) if name else place
        if name is None or not text.startswith("(", opening):
            raise BadCall(f"no listed function at {text[place : place + 40]!r}")
        arguments, place = _arguments(text, opening + 1, name)
        calls.append(FunctionCall(name, arguments))
        place = _after_space(text, place)
        if text.startswith(",", place):
            place += 1
        elif place == len(text) - 1:
            return tuple(calls)
        else:
            raise BadCall(f"unexpected text after {name}(...): {text[place : place + 40]!r}")


def _arguments(text: str, place: int, name: str) -> tuple[dict[str, Any], int]:
    """Read `a=1, b=2)`; returns the arguments and the place after the parenthesis."""
    arguments: dict[str, Any] = {}
    while True:
        place = _after_space(text, place)
        if text.startswith(")", place):
            return arguments, place + 1
        match = _ARGUMENT.match(text, place)
        if match is None:
            raise BadCall(f"{name}: expected name=value at {text[place : place + 40]!r}")
        if match[1] in arguments:
            raise BadCall(f"{name}: argument {match[1]} is given twice")
        end = _value_end(text, match.end(), name)
        arguments[match[1]] = _literal(text[match.end() : end], f"{name}: argument {match[1]}")
        place = end + text.startswith(",", end)


def _value_end(text: str, place: int, name: str) -> int:
    """Where a value ends: at a comma or parenthesis outside quotes and brackets."""
    depth, quote = 0, ""
    while place < len(text):
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif depth:
            depth -= char in ")]}"
        elif char in ",)":
            return place
        place += 1
    raise BadCall(f"{name}: a value is not closed")


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _literal(text: str, what: str) -> Any:
    """A JSON or a Python literal."""
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: it may be Python's spelling
        return _decode(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an invalid escape is not a literal
            value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value, allow_nan=False))  # tuples become lists
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise BadCall(f"{what} is not a literal: {text[:60]!r}") from error


def _json(text: str, what: str) -> Any:
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{what} does not parse: {error}: {text[:60]!r}") from error


def _decode(text: str) -> Any:
    """Decode JSON with finite numbers only, so that it can be encoded again."""
    value = json.loads(text, parse_constant=refuse_constant)
    json.dumps(value, allow_nan=False)
    return value


# --------------------------------------------------------------------------- signatures

_TYPES = {
    "dict": "object",
    "int": "integer",
    "float": "number",
    "double": "number",
    "str": "string",
    "list": "array",
    "tuple": "array",
    "bool": "boolean",
}


def signature(value: Any) -> Signature:
    """Normalise the signature of a tool; raise BadCall if it is not one."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise BadCall(f"not a function signature: {str(value)[:80]!r}")
    parameters = inner.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise BadCall(f"the parameters of {inner['name']} are not a JSON schema")
    return {
        "type": "function",
        "function": {
            "name": inner["name"],
            "description": str(inner.get("description") or ""),
            "parameters": _schema(parameters or {"type": "object", "properties": {}}),
        },
    }


def signatures(text: str) -> tuple[Signature, ...]:
    """The signatures of a JSON array."""
    listed = _json(text, "the list of functions")
    if not isinstance(listed, list):
        raise BadCall("the functions are not a JSON array")
    return tuple(signature(each) for each in listed)


def _schema(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema with JSON type names at every level."""
    made = dict(value)
    if isinstance(kind := made.get("type"), str):
        made["type"] = _TYPES.get(kind.lower(), kind)
    if isinstance(properties := made.get("properties"), Mapping):
        made["properties"] = {
            name: _schema(each) if isinstance(each, Mapping) else each
            for name, each in properties.items()
        }
    if isinstance(items := made.get("items"), Mapping):
        made["items"] = _schema(items)
    return made


# --------------------------------------------------------------------------- checking calls


def check_call(call: FunctionCall, tools: Sequence[Signature]) -> None:
    """Refuse a call that its signature does not allow."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == call.name]
    if not functions:
        raise BadCall(f"no such function: {call.name}")
    if why := _mismatch(call.arguments, functions[0]["parameters"], "arguments"):
        raise BadCall(f"{call.name}: {why}")


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict, Mapping),
    "null": (type(None),),
}


def _mismatch(value: Any, schema: Any, path: str) -> str | None:
    """Why a value does not fit a schema: types, enums, required and unknown names; else None."""
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and not any(_is_a(value, kind) for kind in kinds):
        return f"{path} should be {' or '.join(map(str, kinds))}, not {json.dumps(value)[:60]}"
    enum = schema.get("enum")
    if isinstance(enum, list) and enum and value not in enum:
        return f"{path} is {json.dumps(value)[:60]}, which is not one of its choices"
    if isinstance(value, Mapping):
        return _object_mismatch(value, schema, path)
    if isinstance(value, list):
        reasons = (_mismatch(v, schema.get("items"), f"{path}[{i}]") for i, v in enumerate(value))
        return next((why for why in reasons if why), None)
    return None


def _object_mismatch(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    properties, required = schema.get("properties"), schema.get("required")
    missing = [n for n in required if n not in value] if isinstance(required, list) else []
    if missing:
        return f"{path} lack {', '.join(map(str, missing))}"
    if not isinstance(properties, Mapping):
        return None
    unknown = [name for name in value if name not in properties]
    if unknown and not schema.get("additionalProperties"):
        return f"{path} have unknown {', '.join(unknown)}"
    reasons = (_mismatch(v, properties.get(n), f"{path}.{n}") for n, v in value.items())
    return next((why for why in reasons if why), None)


def _is_a(value: Any, kind: Any) -> bool:
    wanted = _PYTHON_TYPES.get(kind)
    if wanted is None:  # not a JSON schema type: nothing to check
        return True
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, wanted)

"""The JSON schema of a function, from its signature and docstring.

Types: str, int, float, bool, list, dict, None, Literal, enums, unions and Annotated[type, "text"].
Parameters are described in the docstring by lines `name: text` (also under `Args:`, or as
`:param name: text`). What cannot be derived is a UserError that names the parameter.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from rstar2.environments.base import ToolSpec
from rstar2.errors import UserError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DESCRIBED = re.compile(r"(?::param\s+)?(\w+)(?:\s*\([^)]*\))?\s*:\s+(\S.*)")
_HEADINGS = ("args:", "arguments:", "parameters:", "params:", "returns:", "return:", "raises:")


def spec_of(
    function: Callable[..., Any], *, name: str | None = None, stateful: bool = False
) -> ToolSpec:
    """What the model reads about a function."""
    name = name or function.__name__
    if not _NAME.fullmatch(name):
        raise UserError(
            f"tool {name!r}: a name has 1 to 64 letters, digits and _.- (give one with name=)"
        )
    parameters = parameters_of(function)
    description, texts = _docstring(function, set(parameters))
    if not description:
        raise UserError(
            f"tool {name} has no docstring: the model needs a sentence that says what it does"
        )
    properties: dict[str, Any] = {}
    for parameter in parameters.values():
        schema = _schema(parameter.annotation, name, parameter.name)
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
            default = parameter.default
            schema["default"] = default.value if isinstance(default, enum.Enum) else default
        properties[parameter.name] = schema
    required = [p.name for p in parameters.values() if p.default is inspect.Parameter.empty]
    shape: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name, description, shape, stateful=stateful)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function with resolved annotations."""
    shown = f"tool {function.__name__}"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"{shown}: its annotations cannot be read: {error}") from error
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"{shown}: parameter *{name} has no schema: name every parameter")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"{shown}: parameter {name} must not be positional-only")
        if name not in hints:
            raise UserError(
                f"{shown}: parameter {name} has no type: annotate it, as in {name}: str"
            )
        parameters[name] = parameter.replace(annotation=hints[name])
    return parameters


def _schema(annotation: Any, tool: str, parameter: str) -> dict[str, Any]:
    """The JSON schema of a type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)

    def inner(part: Any) -> dict[str, Any]:
        return _schema(part, tool, parameter)

    if origin is typing.Annotated:
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        return inner(arguments[0]) | ({"description": texts[0]} if texts else {})
    if annotation is Any:
        return {}
    if annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    if origin is typing.Literal:
        return _choices(list(arguments))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices([member.value for member in annotation])
    if origin in (typing.Union, types.UnionType):
        options = [inner(part) for part in arguments]
        if all(set(option) == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if annotation is list or origin is list:
        return {"type": "array"} | ({"items": inner(arguments[0])} if arguments else {})
    if annotation is dict or origin is dict:
        if arguments and arguments[0] is not str:
            raise UserError(f"tool {tool}: parameter {parameter}: the keys of a dict must be str")
        return {"type": "object"} | (
            {"additionalProperties": inner(arguments[1])} if arguments else {}
        )
    raise UserError(
        f"tool {tool}: parameter {parameter} has type {annotation!r}, for which there is no "
        "schema: use str, int, float, bool, list, dict, Literal, an enum or a union of these"
    )


def _choices(values: list[Any]) -> dict[str, Any]:
    kinds = {_PLAIN[type(value)] for value in values if type(value) in _PLAIN}
    return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": values}


def _docstring(function: Callable[..., Any], parameters: set[str]) -> tuple[str, dict[str, str]]:
    """The description of a function, and the texts of its parameters."""
    description: list[str] = []
    texts: dict[str, str] = {}
    current, indent = "", 0
    for line in (inspect.getdoc(function) or "").splitlines():
        match = _DESCRIBED.fullmatch(line.strip())
        depth = len(line) - len(line.lstrip())
        if match is not None and match[1] in parameters:
            current, indent = match[1], depth
            texts[current] = match[2].strip()
        elif line.strip().lower() in _HEADINGS:
            current = "-"
        elif current in texts and line.strip() and depth > indent:
            texts[current] += f" {line.strip()}"
        elif not current:
            description.append(line.strip())
        elif not line.strip():
            current = current if current == "-" else "-"
    return "\n".join(description).strip(), texts

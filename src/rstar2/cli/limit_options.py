"""The limits of a call as options of a command, written once for all commands that take them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer

from rstar2.types import Limits

_HELP: dict[str, tuple[type, str]] = {
    "wall_s": (float, "Wall-time limit of a call in seconds."),
    "cpu_s": (float, "CPU-time limit of a call in seconds."),
    "memory_mb": (int, "Memory limit in MB of a call and its child processes."),
    "processes": (int, "Maximum number of processes and threads of a call."),
    "file_mb": (int, "Maximum size in MB of a file that a call writes."),
    "scratch_mb": (int, "Maximum scratch space in MB of a call."),
    "output_chars": (int, "Maximum number of characters kept of each output stream."),
}
_CAPPED = {name: name for name in _HELP} | {"processes": "number of processes"}


def limit_options(
    command: Callable[..., None], parameter: str = "limits", prefix: str = ""
) -> Callable[..., None]:
    """The command with one option per limit (`--wall-s`) in place of a parameter of type Limits.

    With the prefix `max` the options are the caps of a server (`--max-wall-s`).
    """
    names = {name: f"{prefix}_{name}" if prefix else name for name in _HELP}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        limits = Limits(**{name: given.pop(option) for name, option in names.items()})
        command(**given, **{parameter: limits})

    parameters: list[Parameter] = []
    for existing in inspect.signature(command, eval_str=True).parameters.values():
        if existing.name == parameter:
            parameters += [
                _option(
                    names[name],
                    kind,
                    f"Highest {_CAPPED[name]} that a call may request." if prefix else text,
                )
                for name, (kind, text) in _HELP.items()
            ]
        else:
            parameters.append(existing.replace(kind=Parameter.KEYWORD_ONLY))
    # Typer reads both; `__wrapped__` would lead it to the command without the options.
    del called.__dict__["__wrapped__"]
    called.__dict__["__signature__"] = inspect.Signature(parameters)
    called.__annotations__ = {option.name: option.annotation for option in parameters}
    return called


def _option(name: str, kind: type, text: str) -> Parameter:
    annotation = Annotated[kind | None, typer.Option(help=text)]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

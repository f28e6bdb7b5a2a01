"""Trusted functions that the server runs for its callers, under the same deadlines as programs.

`FUNCTIONS` maps a public name to "module:function". A function takes keyword arguments and returns
a JSON value. It runs in a new child of a warm worker that contains no untrusted code, so that an
endless simplification can be killed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rstar2.codeenv.jail import frames, runner
from rstar2.codeenv.jail.frames import Record

FUNCTIONS: dict[str, str] = {"math": "rstar2.reward.math_equal:math_equal"}
"""Public name -> import string."""


def resolve(target: str) -> Callable[..., Any]:
    """Import "module:function"."""
    module, _, name = target.partition(":")
    function: object = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{target} is not callable")
    return function


def preload(functions: Mapping[str, str]) -> dict[str, str]:
    """Import the functions; returns the errors of those that cannot be imported, by name."""
    missing: dict[str, str] = {}
    for name, target in functions.items():
        try:
            resolve(target)
        except (ImportError, AttributeError, TypeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


def run(functions: Mapping[str, str], body: bytes, result_fd: int) -> NoReturn:
    """In the child: call the function and write its result. Never returns."""
    record = _call(functions, body)
    runner.finish(record, result_fd)
    os._exit(0)


def _call(functions: Mapping[str, str], body: bytes) -> Record:
    request = json.loads(body)
    name, arguments = request["function"], request["arguments"]
    if name not in functions:
        known = ", ".join(sorted(functions))
        return Record(
            frames.REFUSED, f"no function {name!r}; there are: {known}", "unknown_function"
        )
    try:
        function = resolve(functions[name])
    except (ImportError, AttributeError, TypeError) as error:
        return Record(frames.REFUSED, f"{functions[name]}: {error}", "unknown_function")
    try:
        with contextlib.suppress(ValueError):  # a builtin without a signature: the call reports it
            inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return Record(frames.REFUSED, f"{name}: {error}", "bad_arguments")
    try:
        value = function(**arguments)
        return Record(frames.JSON, text=json.dumps(value))
    except Exception as error:  # noqa: BLE001 - any exception of a grader is reported
        return Record(frames.REFUSED, runner.headline(error), "exception")

"""User functions, named in a recipe as `module:function`.

The module must be importable: installed, next to the recipe, or in the current directory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rstar2.errors import RecipeError


def make_importable(folder: str | Path | None) -> list[str]:
    """Make the modules in a folder and in the current directory importable, before the installed
    ones; returns both places.

    None means no folder beside the current directory.
    """
    places = list(dict.fromkeys(str(Path(one).resolve()) for one in (folder or ".", ".")))
    for place in reversed(places):
        if place not in sys.path:
            sys.path.insert(0, place)
    importlib.invalidate_caches()  # a module may have been written a moment ago
    return places


def folder_of(recipe: str | Path) -> Path | None:
    """The folder of a recipe file; None for the name of a shipped recipe."""
    return Path(recipe).resolve().parent if Path(recipe).is_file() else None


def load_function(setting: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """The function that a setting names: one of `known`, or `module:function`."""
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise RecipeError(unknown_name(setting, name, tuple(known)))
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # whatever the module raises while it is imported
        raise RecipeError(
            f"{setting} = {name}: module {module} cannot be imported: "
            f"{type(error).__name__}: {error} (it must be installed, next to the recipe, or in the "
            "current directory)"
        ) from error
    function = vars(loaded).get(attribute)
    if not callable(function):
        own = [key for key, value in vars(loaded).items() if callable(value) and key[0] != "_"]
        raise RecipeError(
            f"{setting} = {name}: {module} has no function {attribute}{_close(attribute, own)}"
        )
    return function


def unknown_name(setting: str, name: str, known: tuple[str, ...]) -> str:
    """The message for a name that is neither known nor of the form `module:function`."""
    return (
        f"{setting} = {name!r} is not known{_close(name, known)} (use {', '.join(known)}, or your "
        "own as module:function)"
    )


def _close(name: str, names: list[str] | tuple[str, ...]) -> str:
    close = get_close_matches(name, names, n=1)
    return f": did you mean {close[0]}?" if close else ""

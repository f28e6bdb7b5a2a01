"""Look up settings in the schema by dotted path, and suggest names for unknown ones."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from rstar2.config.schema import Recipe


def settings(cls: type) -> dict[str, Any]:
    """The settings of a section (pydantic model or dataclass), each with its annotation."""
    hints = typing.get_type_hints(cls)
    if issubclass(cls, BaseModel):
        return {name: hints[name] for name in cls.model_fields}
    assert dataclasses.is_dataclass(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def section(annotation: Any) -> type | None:
    """The section behind an annotation (`X`, `X | None`), or None for a plain value."""
    for option in options(annotation):
        if isinstance(option, type) and (
            issubclass(option, BaseModel) or dataclasses.is_dataclass(option)
        ):
            return option
    return None


def item(annotation: Any) -> Any:
    """The item type of a list setting (`tuple[X, ...]`), or None if it is not a list."""
    for option in options(annotation):
        if typing.get_origin(option) is tuple and typing.get_args(option)[-1] is Ellipsis:
            return typing.get_args(option)[0]
    return None


def options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def annotation_at(path: list[str]) -> Any:
    """The annotation of the setting at a path, or None if there is none."""
    annotation: Any = Recipe
    for part in path:
        if typing.get_origin(annotation) is dict:
            return Any
        if (inner := section(annotation)) is not None:
            annotation = settings(inner).get(part)
        else:
            annotation = item(annotation)
        if annotation is None:
            return None
    return annotation


def all_paths(annotation: Any = Recipe, prefix: str = "") -> Iterator[str]:
    """Every setting of the schema; list items are under `*`."""
    if (inner := section(annotation)) is not None:
        for name, sub in settings(inner).items():
            yield prefix + name
            yield from all_paths(sub, f"{prefix}{name}.")
    elif (held := item(annotation)) is not None and section(held):
        yield from all_paths(held, f"{prefix}*.")


def unknown(values: Any, annotation: Any = Recipe, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, suggestion) for each key that is not a setting."""
    if isinstance(values, dict) and (inner := section(annotation)) is not None:
        known = settings(inner)
        for key, value in values.items():
            path = f"{prefix}{key}"
            if key in known:
                yield from unknown(value, known[key], f"{path}.")
            else:
                yield path, suggestion(str(key), prefix, list(known))
    elif isinstance(values, list) and (held := item(annotation)) is not None:
        for index, value in enumerate(values):
            yield from unknown(value, held, f"{prefix}{index}.")


def suggestion(key: str, prefix: str, known: list[str]) -> str:
    """The nearest valid name: in this section, else in the whole schema, else all names here."""
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {prefix}{near[0]}?"
    everywhere = list(all_paths())
    names = {path.rpartition(".")[2] for path in everywhere}
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        meant = [path for path in everywhere if path.rpartition(".")[2] == near[0]]
        return f"did you mean {max(meant, key=lambda path: path.startswith(prefix))}?"
    where = prefix.rstrip(".") or "a recipe"
    return f"{where} has {', '.join(known)}"

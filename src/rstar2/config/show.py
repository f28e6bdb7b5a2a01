"""A resolved recipe as YAML, each line with where its value came from. What it prints is itself
a recipe that loads to the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from rstar2.config.load import LoadedRecipe

COLUMN = 48


def render(loaded: LoadedRecipe) -> str:
    """The whole recipe; secrets are left out."""
    values = loaded.recipe.model_dump(mode="json")
    values["codeenv"]["token"] = None
    lines = []
    for text, path in _lines(values, "", 0):
        origin = f"# {loaded.origin(path)}" if path else ""
        lines.append(f"{text:<{COLUMN}} {origin}".rstrip())
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    """(line of YAML, path of the value on it or "" for a heading)."""
    indent = "  " * depth
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, f"{path}.", depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:", ""
            for index, entry in enumerate(value):
                for n, (text, where) in enumerate(_lines(entry, f"{path}.{index}.", depth + 2)):
                    yield (f"{indent}  - {text.lstrip()}" if n == 0 else text), where
        else:
            yield f"{indent}{key}: {scalar(value)}", path


def scalar(value: Any) -> str:
    """A plain value or a list of them on one line of YAML."""
    if isinstance(value, list):
        return f"[{', '.join(scalar(v) for v in value)}]"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n...\n").strip()

"""The exception hierarchy that `errors.py` draws is the one in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rstar2 import errors

SOURCE = Path(errors.__file__).parent
ROOT = "RstarError"
DRAWN = re.compile(
    r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \[(?P<module>[\w.]+)\])?(?:  |$)"
)
INDENT = len("├── ")

Drawing = dict[str, tuple[str, str]]
"""Class -> (the class it derives from, the module that defines it)."""


def drawn() -> Drawing:
    """The hierarchy as the docstring draws it."""
    drawing: Drawing = {}
    ancestors = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if match := DRAWN.match(line):
            depth = len(match["branch"]) // INDENT
            ancestors[depth + 1 :] = [match["name"]]
            drawing[match["name"]] = (ancestors[depth], match["module"] or "errors")
    return drawing


def defined() -> Drawing:
    """The hierarchy in the source, read without importing it: some modules need extras."""
    classes: dict[str, list[tuple[str, str]]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    parent = ast.unparse(base).rpartition(".")[2]
                    classes.setdefault(parent, []).append((node.name, module))
    hierarchy: Drawing = {ROOT: ("Exception", "errors")}
    pending = [ROOT]
    while pending:
        parent = pending.pop()
        for name, module in classes.get(parent, []):
            hierarchy[name] = (parent, module)
            pending.append(name)
    return hierarchy


def test_the_drawing_is_the_hierarchy_in_the_source() -> None:
    assert drawn() == defined()


def test_an_error_has_a_snake_case_name_for_records() -> None:
    assert errors.QueueFullError("full", retry_after_s=1.0).name == "queue_full"
    assert errors.EngineError("died").name == "engine"

"""docs/api.md, the reference of `import rstar2`, from signatures and docstrings.
`reference_pages.py` writes it.

A docstring is Markdown, with two additions: lines `name: text` describe parameters and become a
list, and the indented block below `Example:` is Python. Fields and enum members are described by
the string below them, or by a comment `#: text` behind them.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rstar2
import rstar2.config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"

SECTIONS = {
    "Environments": ("Environment", "tool", "python", "EpisodeView"),
    "Training and evaluation": ("train", "evaluate_model", "Agent", "Recipe"),
    "Sandbox": ("Sandbox", "AsyncSandbox"),
    "Resampling on correct": ("resample_on_correct",),
    "Data types": ("Problem", "Trajectory", "Reward", "ToolResult", "Outcome"),
    "Errors": ("RstarError", "UserError", "InfrastructureError", "CodeEnvError", "RolloutFailure"),
}
"""Every public name, in the order of the page."""

RETURNED = ("types.Turn", "types.ToolCall", "types.Evaluation", "types.Estimate", "types.Failure")
"""Types that the public names return and that are not imported by name."""

METHODS = {
    "Environment": ("problems",),
    "EpisodeView": ("text",),
    "Agent": ("run",),
    "Sandbox": ("run", "map", "session", "close", "isolation"),
    "Trajectory": ("segments", "calls", "failed_calls"),
    "Outcome": ("succeeded", "malformed", "failed"),
    "RstarError": ("name",),
}
"""Methods and properties for users, by class. The others serve the package itself."""

INTRODUCTION = """\
# Python API

`import rstar2` offers the names on this page and imports each of them on first use. The import
itself takes milliseconds and does not load torch. [Environments](environments.md) and
[the sandbox](sandbox.md) have pages with longer examples.

This page is generated from the docstrings by `scripts/reference_pages.py`.
"""

PARAMETER = re.compile(r"(\w+): (.+)", re.DOTALL)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        listed = ", ".join(f"[`{name}`](#rstar2{name.lower()})" for name in names)
        parts.append(f"- {title}: {listed}")
    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}")
        for name in names:
            parts += entry(f"rstar2.{name}", getattr(rstar2, name))
    parts.append("\n## Types that these return")
    for path in RETURNED:
        module, name = path.split(".")
        parts += entry(f"rstar2.{path}", getattr(importlib.import_module(f"rstar2.{module}"), name))
    return "\n".join(parts) + "\n"


def entry(title: str, value: Any) -> Iterator[str]:
    """A function or a class with its signature, description, fields and methods."""
    yield f"\n### {title}\n"
    fields = list(described_fields(value)) if inspect.isclass(value) else []
    if not fields:
        yield f"```python\n{signature(title, value)}\n```\n"
    yield prose(value)
    if fields:
        yield f"\n| {'value' if is_enum(value) else 'field'} | |\n|---|---|"
        yield from (f"| `{name}` | {' '.join(text.split())} |" for name, text in fields if text)
    if others := [f"`{name.partition(':')[0]}`" for name, text in fields if not text]:
        yield f"\nFurther fields: {', '.join(others)}."
    for name in METHODS.get(title.removeprefix("rstar2."), ()):
        yield f"\n{method(name, inspect.getattr_static(value, name))}"


def method(name: str, member: Any) -> str:
    """A method with the names and defaults of its parameters, or a property."""
    if isinstance(member, property):
        return f"**`.{name}`** {prose(member)}"
    parameters, _ = parts_of(member, types=False)
    return f"**`.{name}({', '.join(parameters)})`** {prose(member)}"


def is_enum(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, enum.Enum)


def described_fields(value: type) -> Iterator[tuple[str, str]]:
    """(declaration, description) of the fields of a class, or of the members of an enum."""
    source = textwrap.dedent(inspect.getsource(value))
    tree, lines = ast.parse(source).body[0], source.splitlines()
    assert isinstance(tree, ast.ClassDef)
    following = [*tree.body[1:], ast.Pass()]
    for node, after in zip(tree.body, following, strict=True):
        text = lines[(node.end_lineno or 0) - 1].partition("#: ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        if isinstance(node, ast.AnnAssign):
            kind = ast.unparse(node.annotation)
            section = getattr(rstar2.config, kind.removesuffix(" | None"), None)
            text = text or summary(section)
            default = "" if node.value is None else f" = {ast.unparse(node.value)}"
            if section is not None or default.startswith(" = field("):
                default = ""
            yield f"{ast.unparse(node.target)}: {kind}{default}".replace("|", "\\|"), text
        elif is_enum(value) and isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), text


def signature(title: str, value: Any) -> str:
    """A call with all parameters, one per line if it is long."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"class {title}({bases})"
    parameters, returned = parts_of(value)
    short = f"{title}({', '.join(parameters)}){returned}"
    if len(short) <= 100:
        return short
    lines = (f"    {parameter}," for parameter in parameters)
    return "\n".join([f"{title}(", *lines, f"){returned}"])


def parts_of(value: Any, *, types: bool = True) -> tuple[list[str], str]:
    """The parameters of a call as text, and what it returns."""
    given = inspect.signature(value)
    parts: list[str] = []
    star = False
    for parameter in given.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        text = ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
        if types and parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if types else f"={parameter.default!r}"
        parts.append(text.replace("'", '"'))
    returned = given.return_annotation
    shown = returned is not given.empty and not inspect.isclass(value)
    return parts, f" -> {annotation(returned)}" if shown else ""


def annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def summary(section: Any) -> str:
    """The first paragraph of a section's docstring."""
    return "" if section is None else (inspect.getdoc(section) or "").split("\n\n")[0]


def prose(value: Any) -> str:
    """A docstring as Markdown."""
    parts = joined(inspect.getdoc(value) or "")
    return "\n\n".join(block(part) for part in parts if part != "Example:")


def joined(text: str) -> Iterator[str]:
    """The paragraphs of a docstring; blank lines inside of an indented block do not end it."""
    pending = ""
    for part in text.split("\n\n"):
        if pending and part.startswith("    "):
            pending += "\n\n" + part
            continue
        if pending:
            yield pending
        pending = part if part.startswith("    ") else ""
        if not pending:
            yield part
    if pending:
        yield pending


def block(part: str) -> str:
    """One paragraph: Python if it is indented, a list if it describes parameters, else as it is."""
    if part.startswith("    "):
        code = textwrap.dedent(part).replace("'''", '"""')  # an example inside of a docstring
        return f"```python\n{code}\n```"
    items = re.split(r"\n(?! )", part)
    described = [PARAMETER.fullmatch(item) for item in items]
    if not all(described):
        return part
    return "\n".join(
        f"- `{match[1]}`: {' '.join(match[2].split())}" for match in described if match is not None
    )

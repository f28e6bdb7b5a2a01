"""The commands that README and docs print: found in shell blocks, tables and text.

A shell block (```bash or ```sh) and the column `command` of a table hold commands for the reader to
run; other code in the text mentions a command. `<!-- not run: REASON -->` above a block or in a
table row says why no test runs the commands there; with a prefix in backquotes
(<!-- not run `docker`: REASON -->) it concerns only the commands that begin so.

    python -m tests.doc_commands    # every command, and why it is not run
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from rstar2 import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(```+)(\w*)")
MARK = re.compile(r"(?<!`)<!-- not run(?: `([^`]+)`)?: (.+?) -->")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMAND = re.compile(r"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:rstar2|make|python|pip|docker) \S")
SETTING = re.compile(r"[A-Z][A-Z0-9_]*=.*")
PLACEHOLDER = re.compile(r"(?<![\w.-])(?:[A-Z]{2,}|[A-Z])(?![\w-])|\.\.\.")
SHELLS = ("bash", "sh")


@dataclass(frozen=True)
class DocCommand:
    """One printed command."""

    page: str
    line: int
    text: str
    mention: bool
    """Named in a sentence, where it may lack its arguments."""
    not_run: str | None
    """Why no test runs it."""

    @property
    def words(self) -> list[str]:
        """The words without comments and without the variables that are set for the command."""
        words = shlex.split(self.text, comments=True)
        while words and SETTING.fullmatch(words[0]):
            del words[0]
        return words

    @property
    def placeholder(self) -> str | None:
        """A word that the reader replaces: MODEL, OWNER/NAME or `...`."""
        words = shlex.split(self.text, comments=True)
        values = [part for word in words for part in word.split("=")[bool(SETTING.match(word)) :]]
        return next((m[0] for value in values if (m := PLACEHOLDER.search(value))), None)


def commands(name: str, text: str) -> Iterator[DocCommand]:
    """Every command of a page, in order."""
    lines = text.splitlines()
    marks: list[tuple[str, str]] = []
    block: str | None = None
    fence, number = "", 0
    column: int | None = None
    while number < len(lines):
        line = lines[number]
        number += 1
        opening = FENCE.match(line)
        if block is None and opening:
            fence, block = opening[1], opening[2]
            continue
        if block is not None:
            if line.startswith(fence):
                block, marks = None, []
            elif block in SHELLS and line.strip() and not line.lstrip().startswith("#"):
                first = number
                while line.endswith("\\"):
                    line = line[:-1] + lines[number].strip()
                    number += 1
                yield DocCommand(name, first, line, False, _reason(line, marks))
            continue
        marks = [*marks, *MARK.findall(line)] if line.strip() else []
        if not line.startswith("|"):
            column = None
        elif column is None:
            cells = [cell.strip() for cell in line.split("|")]
            column = cells.index("command") if "command" in cells else 0
        for cell, part in enumerate(MARK.sub("", line).split("|")):
            for text in filter(COMMAND.match, CODE.findall(part)):
                mention = not column or cell != column
                reason = _reason(text, MARK.findall(line) if column else marks)
                yield DocCommand(name, number, text, mention, reason)


def unlabelled(text: str) -> Iterator[tuple[int, str]]:
    """Lines of code blocks without a language, and indented lines, with their numbers."""
    language: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if opening := FENCE.match(line):
            language = opening[2] if language is None else None
        elif language == "" or (language is None and line.startswith("    ")):
            yield number, line.strip()


def _reason(text: str, marks: list[tuple[str, str]]) -> str | None:
    return next((reason for prefix, reason in marks if text.startswith(prefix)), None)


def all_commands() -> list[DocCommand]:
    """The commands of README, CONTRIBUTING and docs."""
    return [
        command
        for page in PAGES
        for command in commands(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]


def parse(words: list[str]) -> None:
    """Parse the arguments of `rstar2` as the command line does, without running anything."""
    command: Any = typer.main.get_command(cli.app)
    name, context = "rstar2", None
    while True:
        context = command.make_context(name, list(words), parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest or not hasattr(command, "resolve_command"):
            return
        name, command, words = command.resolve_command(context, rest)


if __name__ == "__main__":
    for each in all_commands():
        why = each.not_run or (each.placeholder and f"placeholder {each.placeholder}") or ""
        why = why or ("mentioned in text" if each.mention else "run")
        print(f"{each.page}:{each.line}: {each.text}   [{why}]")

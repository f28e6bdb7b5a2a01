"""The documentation: links lead somewhere, images are shown somewhere, examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rstar2
from rstar2 import Sandbox
from rstar2.codeenv.client.background import background
from rstar2.sandbox import TOKEN_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = {path for path in (ROOT / "docs" / "images").iterdir() if path.is_file()}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Targets of the relative links of a page, as file and anchor."""
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer derives from the headings of a page."""
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_relative_links_resolve() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_every_image_is_linked() -> None:
    linked = {target for page in PAGES for target, _ in links(page)}
    assert sorted(path.name for path in IMAGES - linked) == []


def test_every_page_is_linked() -> None:
    linked = {target for page in PAGES for target, _ in links(page)}
    pages = {page for page in PAGES if page.parent != ROOT}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []


# --------------------------------------------------------------------------- examples that run

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_examples_of_the_sandbox_run() -> None:
    """In order and in one namespace, as a reader would type them."""
    examples = PYTHON.findall((ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8"))
    assert len(examples) >= 8
    program = "\n".join(examples)
    for three_lines in PYTHON.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        program += three_lines
    with Sandbox() as box:
        endpoint = background().submit(box._calls.client()).result(120).endpoints[0]
        assert endpoint.owned is not None
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "SANDBOX_URL": endpoint.url, TOKEN_VARIABLE: endpoint.owned.token},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("42\n")


# --------------------------------------------------------------------------- messages


def test_the_messages_that_troubleshooting_explains_exist() -> None:
    """Headings in backquotes quote a message of the source, a metric, or the shell's own."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### .*?`([^`]+)`", page, re.MULTILINE)
    assert len(quoted) > 8
    parts = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", "\n".join(parts))  # strings that are written on several lines
    missing = [text for text in quoted if text not in source and "command not found" not in text]
    assert missing == []


def test_the_quickstart_table_is_the_same_everywhere() -> None:
    tables = {
        re.search(r"```\n( +tool errors .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    }
    assert len({match[1] for match in tables if match}) == 1
    assert None not in tables


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == rstar2.__version__
    assert {"cff-version", "title", "message", "authors"} <= cited.keys()

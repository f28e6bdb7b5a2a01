"""Run directories to look at (a real one, and nasty ones), a served viewer, a browser."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.request import urlopen

import pytest

from rstar2.viewer.run import ViewedRun, open_runs
from tests.viewer.nasty import WIDE_NAME, write_hostile, write_plain, write_wide
from tests.viewer.served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Theme = Literal["light", "dark"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
READY_MS = 60_000


# --------------------------------------------------------------------------- runs


@pytest.fixture(scope="session")
def runs(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A real run, the same without index and token values (`bare`), and runs of nasty.py."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(finished, root / "real")
    bare = shutil.copytree(finished, root / "bare")
    shutil.rmtree(bare / "index")
    shutil.rmtree(bare / "tokens")
    write_hostile(root / "hostile")
    torn = write_plain(root / "torn", steps=2)
    for name in ("metrics.jsonl", "trajectories/stage1.jsonl", "index/stage1.jsonl"):
        with (torn / name).open("ab") as file:
            file.write(b'{"stage":"stage1","step":3,"gro')
    older = write_plain(root / "older", steps=1)
    about = json.loads((older / "environment.json").read_text())
    (older / "environment.json").write_text(json.dumps(about | {"schema": 0, "rstar2": "0.0.9"}))
    wide = write_wide(root / WIDE_NAME)
    named = {name: root / name for name in ("real", "bare", "hostile", "torn", "older")}
    return named | {"wide": wide}


@pytest.fixture(scope="session")
def read_run() -> Callable[[Path], ViewedRun]:
    """Opens a run directory and takes all of it in."""

    def read(path: Path) -> ViewedRun:
        (run,) = open_runs([path]).values()
        while run.refresh():
            pass
        return run

    return read


# --------------------------------------------------------------------------- server


@pytest.fixture(scope="session")
def url(runs: dict[str, Path]) -> Iterator[str]:
    """A viewer over all of the runs."""
    with serving(*runs.values()) as address:
        yield address


@pytest.fixture(scope="session")
def ask(url: str) -> Callable[[str], Any]:
    """What the API answers to a path."""

    def get(path: str) -> Any:
        with urlopen(f"{url}/api/{path}", timeout=60) as answer:
            return json.load(answer)

    return get


# --------------------------------------------------------------------------- browser


def absent(what: str) -> None:
    """No browser is a skip for people and a failure in CI, which installs one."""
    if os.environ.get("RSTAR2_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, driven by Playwright.

    Its event loop runs in the main thread until it is closed, so it must not outlive its module:
    asynchronous tests of other modules could not run.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("no browser tests: playwright is not installed (pip install playwright)")
    path = os.environ.get("RSTAR2_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), "")
    if not path:
        absent("no browser tests: no Chromium on PATH (scripts/install-debian.sh installs one)")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Complaints(list[str]):
    """What the browser complained of, and which other hosts the page asked for."""


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def page(browser: Browser, complaints: Complaints) -> Iterator[Page]:
    """A fresh page of desktop size; whatever it complains of fails the test."""
    with opened(browser, complaints, 1280, 860) as page:
        yield page


@pytest.fixture
def phone(browser: Browser, complaints: Complaints) -> Iterator[Page]:
    """The same at the width of a phone, with touch."""
    with opened(browser, complaints, 390, 800) as page:
        yield page


@contextlib.contextmanager
def opened(
    browser: Browser, complaints: Complaints, width: int, height: int, theme: Theme = "light"
) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(READY_MS)
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.on(
        "console",
        lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None,
    )
    page.on(
        "request",
        lambda r: (
            complaints.append(r.url)
            if not r.url.startswith(("http://127.0.0.1:", "data:image"))
            else None
        ),
    )
    yield page
    context.close()
    assert complaints == []

"""Run directories to look at (a real one, and nasty ones), a served viewer, a browser."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.request import urlopen

import pytest

from rstar2.viewer.run import ViewedRun, open_runs
from tests.viewer.nasty import WIDE_NAME, write_hostile, write_plain, write_wide
from tests.viewer.served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

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


class PageSettings(NamedTuple):
    width: int
    height: int
    theme: Theme = "light"


class Complaints(list[str]):
    """What the browser complained of, and which other hosts the page asked for."""


class Pages:
    """The pages of a browser that tests take in turn: a new page takes twice as much CPU time."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._kept: dict[PageSettings, Page] = {}
        self._complaints = Complaints()

    @contextlib.contextmanager
    def opened(
        self, complaints: Complaints, width: int, height: int, theme: Theme = "light"
    ) -> Iterator[Page]:
        """An empty page; whatever it complains of fails the test."""
        settings = PageSettings(width, height, theme)
        page = self._kept.pop(settings, None) or self._open(settings)
        self._complaints = complaints
        try:
            yield page
            page.mouse.move(0, 0)
            page.evaluate("() => { try { localStorage.clear(); } catch { /* no address */ } }")
            assert complaints == []
            self._complaints = Complaints()  # of requests that end with the page
            page.goto("about:blank")
        except BaseException:
            page.context.close()
            raise
        self._kept[settings] = page

    def _open(self, settings: PageSettings) -> Page:
        context = self._browser.new_context(
            viewport={"width": settings.width, "height": settings.height},
            color_scheme=settings.theme,
            reduced_motion="reduce",
        )
        context.set_default_timeout(READY_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: self._complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self._complaints.append(f"dialog: {dialog.message}"))
        page.on("console", self._log)
        page.on("request", self._see)
        return page

    def _log(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._complaints.append(message.text)

    def _see(self, request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:image", "about:blank")):
            self._complaints.append(request.url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Pages]:
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
        yield Pages(chromium)
        chromium.close()


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def page(browser: Pages, complaints: Complaints) -> Iterator[Page]:
    """An empty page of desktop size."""
    with browser.opened(complaints, 1280, 860) as page:
        yield page


@pytest.fixture
def phone(browser: Pages, complaints: Complaints) -> Iterator[Page]:
    """The same at the width of a phone."""
    with browser.opened(complaints, 390, 800) as page:
        yield page

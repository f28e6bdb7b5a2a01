"""Every view in a real browser: nothing is cut off at desktop width, and axe-core finds nothing.

axe-core checks names, roles, order, landmarks and contrast (4.5:1 for text) in both themes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from rstar2.cli import main
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.page import write_page
from rstar2.evaluate.scores import GradedAnswer
from rstar2.evaluate.store import EvalDirectory
from rstar2.evaluate.sweep import score_answers
from rstar2.record import read_groups
from rstar2.report.page import render
from rstar2.report.summary import summarise
from tests.evaluate.evaluate_helpers import settings
from tests.viewer.conftest import Pages, Theme, absent
from tests.viewer.nasty import WIDE_NAME

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

WIDE = quote(WIDE_NAME, safe="")
VIEWS = {
    "runs": "/?all",
    "run": "/run/real",
    "step": "/run/real/step/short/1",
    "group": "/run/real/group/short/1/0?diff=0,1",
    "wide group": f"/run/{WIDE}/group/stage1/1/0",
    "rollout": "/run/real/rollout/short/1/0/0",
    "wide rollout": f"/run/{WIDE}/rollout/stage1/1/0/0",
    "tokens": "/run/real/rollout/short/1/0/0?tab=tokens&color=entropy",
    "classes": "/run/real/rollout/short/1/0/0?tab=tokens&color=class",
    "search": f"/run/{WIDE}/rollouts?outcome=failed",
    "timeline": "/run/real/timeline/short/1",
    "stages compared": "/compare?a=real&b=real",
    "runs compared": "/compare?a=real&b=bare&problem=coin-41",
}
CUT = """() => [...document.querySelectorAll('main .scroll, main .groups, main .modes, main .tabs')]
    .filter((node) => node.scrollWidth > node.clientWidth)
    .map((node) => `${node.className}: ${node.scrollWidth} > ${node.clientWidth}`)"""


def visit(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("#main[data-ready]")


def findings(page: Page) -> list[str]:
    """What axe-core objects to, one line for each rule."""
    from axe_playwright_python.sync_playwright import Axe

    results: Any = Axe().run(page)
    return [
        f"{rule['id']}: {node['html'][:200]} {[c['message'] for c in node['any']]}"
        for rule in results.response["violations"]
        for node in rule["nodes"]
    ]


@pytest.fixture(scope="module", autouse=True)
def axe() -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        absent("no accessibility tests: axe-playwright-python is not installed (extra dev)")


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_cut_off_at_desktop_width_and_axe_is_content(
    page: Page, url: str, view: str
) -> None:
    visit(page, f"{url}{VIEWS[view]}")
    assert page.evaluate(CUT) == []
    assert findings(page) == []


@pytest.mark.parametrize(
    "view", ["runs", "run", "step", "wide group", "tokens", "search", "runs compared"]
)
def test_axe_is_content_on_a_phone_in_the_dark(
    browser: Pages, complaints: Any, url: str, view: str
) -> None:
    with browser.opened(complaints, 390, 800, "dark") as phone:
        visit(phone, f"{url}{VIEWS[view]}")
        assert findings(phone) == []


def report(run: Path, out: Path) -> Path:
    page = out / "report.html"
    page.write_text(render(summarise(run)))
    return page


def entropy(run: Path, out: Path) -> Path:
    """What `rstar2 entropy` writes about a run."""
    with pytest.raises(SystemExit) as ended:
        main(["entropy", str(run), "--points", "2", "--out", str(out)])
    assert ended.value.code == 0
    return out / "entropy.html"


def evaluation(run: Path, out: Path) -> Path:
    """The page of an evaluation whose answers are those that a run recorded at its end."""
    groups = [line.group for line in read_groups(run, "eval-hard-sampled")]
    benchmark = Benchmark("set", "coins", tuple(group.problem for group in groups))
    with EvalDirectory.open(out / "eval", settings(), [benchmark]) as directory:
        for group in groups:
            for sample, t in enumerate(group.trajectories):
                directory.add(GradedAnswer("set", t.problem_id, sample, len(t.token_ids), t))
        directory.finish(score_answers(directory.path, ["set"], 2))
    return write_page(out / "eval")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("write", [report, entropy, evaluation])
def test_pages_in_files_pass_too(
    browser: Pages,
    complaints: Any,
    runs: dict[str, Path],
    tmp_path: Path,
    write: Callable[[Path, Path], Path],
    width: int,
    theme: Theme,
) -> None:
    file = write(runs["real"], tmp_path)
    with browser.opened(complaints, width, 860, theme) as page:
        page.goto(file.as_uri())
        complaints.clear()  # the request for the file itself
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if width == 1280:
            assert page.evaluate(CUT) == []
        assert findings(page) == []

"""Two evaluations side by side: the figures by hand, and the page in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rstar2.types import Estimate
from rstar2.viewer.compare import compare_runs
from rstar2.viewer.run import NotRecordedError, ViewedRun
from tests.viewer.nasty import write_evaluated
from tests.viewer.served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

BEFORE = {"gcd1": [0, 0], "gcd2": [1, 0], "lcm1": [1, 1], "only_here": [1, 1]}
AFTER = {"gcd1": [1, 1], "gcd2": [1, 1], "lcm1": [1, 0]}
EARLIER = {"gcd1": [0, 0], "gcd2": [0, 0], "lcm1": [0, 0]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("compared")
    return (
        write_evaluated(root / "first", {"sft": EARLIER, "stage1": BEFORE}),
        write_evaluated(root / "second", {"sft": EARLIER, "stage1": AFTER}),
    )


@pytest.fixture
def pair(
    paths: tuple[Path, Path], read_run: Callable[[Path], ViewedRun]
) -> tuple[ViewedRun, ViewedRun]:
    return read_run(paths[0]), read_run(paths[1])


def test_problems_are_the_pairs(pair: tuple[ViewedRun, ViewedRun]) -> None:
    made = compare_runs(*pair, ("", ""), "")
    assert (made["a"]["stage"], made["b"]["stage"], made["mode"]) == ("stage1", "stage1", "sampled")
    assert made["unmatched"] == 1
    assert made["first"].mean == pytest.approx(0.5)  # (0 + 0.5 + 1) / 3
    assert made["second"].mean == pytest.approx(2.5 / 3)
    paired = made["paired"]
    assert (paired.problems, paired.better, paired.worse) == (3, 2, 1)
    assert paired.difference.mean == pytest.approx(1 / 3)
    # of the 8 patterns of signs of (1, 0.5, -0.5), 6 have a sum of at least 1 in size
    assert paired.p == pytest.approx(6 / 8)
    rows = [(r["problem"], r["difference"]) for r in made["problems"]]
    assert rows == [("gcd1", 1.0), ("gcd2", 0.5), ("lcm1", -0.5)]
    assert made["problems"][0]["rewards"] == ((0.0, 0.0), (1.0, 1.0))


def test_kinds_have_their_own_differences(pair: tuple[ViewedRun, ViewedRun]) -> None:
    gcd, lcm = compare_runs(*pair, ("", ""), "")["kinds"]
    assert (gcd["kind"], gcd["difference"].mean, gcd["difference"].count) == ("gcd", 0.75, 2)
    assert (lcm["kind"], lcm["difference"]) == ("lcm", Estimate(-0.5, -0.5, -0.5, 1))


def test_one_run_is_compared_before_and_after(pair: tuple[ViewedRun, ViewedRun]) -> None:
    made = compare_runs(pair[1], pair[1], ("", ""), "")
    assert (made["a"]["stage"], made["b"]["stage"]) == ("sft", "stage1")
    assert made["paired"].difference.mean == pytest.approx(2.5 / 3)


@pytest.mark.parametrize(
    ("stages", "mode", "words"),
    [
        (("", ""), "greedy", "no greedy evaluation in common"),
        (("stage7", ""), "sampled", "no sampled evaluation after 'stage7'"),
    ],
)
def test_what_is_not_recorded_is_named(
    pair: tuple[ViewedRun, ViewedRun], stages: tuple[str, str], mode: str, words: str
) -> None:
    with pytest.raises(NotRecordedError, match=words):
        compare_runs(*pair, stages, mode)


@pytest.fixture(scope="module")
def url(paths: tuple[Path, Path]) -> Iterator[str]:
    with serving(*paths) as address:
        yield address


@pytest.mark.slow
def test_two_runs_and_one_problem_side_by_side(page: Page, url: str) -> None:
    page.goto(f"{url}/")
    page.click("button:has-text('Compare side by side')")
    page.wait_for_selector("h1:has-text('first and second')")
    tiles = page.locator(".tile").all_inner_texts()
    assert "50%" in tiles[0]
    assert "83.3%" in tiles[1]
    assert "+33.3 points" in tiles[2]
    assert page.locator("figure[data-chart='Reward']").count() == 1
    assert "1 problem that only one side has" in page.locator(".notice").inner_text()
    page.select_option("#which", "worse")
    assert page.locator("table.problems tbody tr").count() == 1
    page.click("button[value=lcm1]")
    page.wait_for_selector("#problem[data-ready='lcm1 0,0']")
    assert page.locator("#problem pre.diff").count() == 2
    page.select_option("#problem select >> nth=1", "1")
    page.wait_for_selector("#problem[data-ready='lcm1 0,1']")
    assert "wrong" in page.locator("#problem .card >> nth=1").inner_text()
    assert page.locator("#problem mark").count() > 0
    page.reload()  # the address has the problem
    page.wait_for_selector("#problem[data-ready='lcm1 0,0']")
    page.goto("about:blank")

"""The page in a real browser: every level of a real run, and of runs that are not so nice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from rstar2.record import RunDirectory, read_groups, read_metrics
from rstar2.report.summary import percent
from tests.viewer.nasty import HOSTILE, LATEX, WIDE_NAME, recipe, write_plain, write_step
from tests.viewer.served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


def open_page(page: Page, address: str) -> None:
    """Go to an address and wait until its view is shown."""
    page.goto(address)
    page.wait_for_selector("#main[data-ready]")


def settled(page: Page, act: Callable[[], Any]) -> None:
    """Do something that opens another view, and wait for it."""
    before = page.get_attribute("#main", "data-ready")
    act()
    page.wait_for_function(
        "before => document.getElementById('main').dataset.ready !== before", arg=before
    )


def training_group(path: Path) -> Any:
    """A group of a real run that was used to learn from."""
    return next(line for line in read_groups(path, "short") if line.selection is not None)


# --------------------------------------------------------------------------- levels


def test_every_level_is_a_click_away(page: Page, url: str, runs: dict[str, Path]) -> None:
    open_page(page, f"{url}/")
    assert page.locator("table.runs tbody tr").count() == len(runs)
    settled(page, lambda: page.click("table.runs a:text-is('real')"))
    assert page.locator(".tile").count() == 4
    settled(page, lambda: page.locator(".strip a.cell").first.click())
    groups = {line.group.id for line in read_groups(runs["real"], "short") if line.step == 1}
    assert page.locator(".grouprow").count() == len(groups)
    settled(page, lambda: page.locator(".grouprow .prompt").first.click())
    assert page.locator("table.rollouts tbody tr").count() == 8
    settled(page, lambda: page.locator("table.rollouts tbody th a").first.click())
    assert page.locator(".turn").count() >= 2
    settled(page, lambda: page.click(".tab:has-text('Tokens')"))
    assert page.locator(".tok.sampled").count() > 0
    settled(page, lambda: page.click("#crumbs a:has-text('real')"))
    assert page.title().startswith("real")


def test_curves_of_a_real_run_answer_what_people_ask(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/real")
    charts = page.locator("figure").evaluate_all("all => all.map(f => f.dataset.chart)")
    for wanted in (
        *("Reward", "Held-out accuracy", "Accuracy by kind", "Tool-error rate"),
        *("Response length", "Truncated and unanswered", "Entropy", "Mismatch", "Seconds per step"),
        *("KV cache in use", "Idle engines", "Code environment: calls per second"),
        *("Code environment: latency", "SFT loss"),
    ):
        assert wanted in charts
    legend = page.locator("figure[data-chart='Accuracy by kind'] .legend").inner_text()
    assert "even" in legend
    assert "odd" in legend


def test_the_viewer_rounds_as_the_report_does(page: Page, url: str) -> None:
    values = [n / 480 for n in range(481)] + [n / 1000 for n in range(1001)] + [-0.5, 2.5, 12.34]
    open_page(page, f"{url}/run/real")
    shown = page.evaluate(
        "async values => values.map((await import('/static/format.js')).percent)", values
    )
    assert shown == [percent(value) for value in values]


def test_a_click_on_a_curve_opens_the_step(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/real")
    settled(page, lambda: page.locator("figure[data-chart='Reward'] svg").click())
    assert re.search(r"/run/real/step/(short|hard)/\d$", page.url)


def test_a_group_says_why_each_rollout_was_kept(
    page: Page, url: str, runs: dict[str, Path]
) -> None:
    line = training_group(runs["real"])
    open_page(page, f"{url}/run/real/group/{line.group.id}")
    rows = page.locator("table.rollouts tbody tr")
    for index, choice in enumerate(line.selection.choices):
        text = rows.nth(index).inner_text()
        assert ("kept" if choice.kept else "dropped") in text
        assert choice.reason in text
        assert ("correct" if choice.reward else "wrong") in text
    kept = sum(choice.kept for choice in line.selection.choices)
    assert f"{kept} of {len(line.selection.choices)} kept" in page.locator(".notice").inner_text()


def test_two_rollouts_side_by_side(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/torn/group/stage1/1/0")
    boxes = page.locator("input[name=diff]")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.wait_for_selector("#compare[data-ready='0,1']")
    marked = page.locator("#compare mark").all_inner_texts()
    assert "0" in marked
    assert "1" in marked
    assert "diff=0%2C1" in page.url
    boxes.nth(2).check()
    page.wait_for_selector("#compare[data-ready='1,2']")
    assert page.locator("input[name=diff]:checked").count() == 2


def test_a_rollout_reads_as_thought_code_result_and_answer(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/torn/rollout/stage1/1/0/1")
    assert "think 1" in page.locator(".seg.thought").first.inner_text()
    assert page.locator(".seg.code i.f").inner_text() == "print"
    assert "exception" in page.locator(".seg.result.failed").inner_text()
    assert page.locator(".seg.answer.failed math .boxed").text_content() == "4"


def test_latex_is_drawn_and_its_source_is_a_key_away(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/{WIDE_NAME}/rollout/stage1/1/0/0")
    question = page.locator("h1.question")
    assert question.locator("math mfrac msqrt").count() == 1
    assert question.locator("math[display=block] munderover").count() == 1
    assert question.locator("math").first.bounding_box() is not None
    assert question.inner_text().endswith("if tickets cost $5 and $6.")
    assert "frac" not in question.inner_text()
    page.keyboard.press("m")
    assert question.inner_text() == LATEX
    page.click("#tex")
    assert "frac" not in question.inner_text()
    open_page(page, f"{url}/run/{WIDE_NAME}/step/stage1/1")
    assert page.locator(".grouprow .prompt math").count() >= 3
    open_page(page, f"{url}/run/real")
    assert page.locator("#tex").is_hidden()


def test_tokens_show_all_that_is_known_of_them(page: Page, url: str, runs: dict[str, Path]) -> None:
    line = training_group(runs["real"])
    kept = next(
        t for t, c in zip(line.group.trajectories, line.selection.choices, strict=True) if c.kept
    )
    open_page(page, f"{url}/run/real/rollout/{kept.id}?tab=tokens")
    assert page.locator(".tok").count() == len(kept.token_ids)
    assert page.locator(".tok.sampled").count() == sum(kept.mask)
    joined = "".join(page.locator(".tok.sampled").evaluate_all("all => all.map(t => t.innerText)"))
    assert "execute_python_code" in joined
    for mode in ("mask", "logprob", "entropy", "ratio", "mismatch", "version", "class"):
        page.click(f"button[data-mode={mode}]")
        assert page.locator(".tokens").get_attribute("data-mode") == mode
    page.locator(".tok.sampled").first.click()
    pinned = page.locator(".tokendetail").inner_text()
    for fact in ("logprob", "entropy", "ratio", "mismatch", "version", "class"):
        assert fact in pinned
    underlined = page.locator(".tok.topent").count()
    assert underlined == round(0.2 * kept.sampled_tokens)


def test_ratios_are_off_where_they_are_not_on_record(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/bare/rollout/short/1/0/0?tab=tokens")
    assert page.locator("button[data-mode=ratio]").is_disabled()


def test_the_timeline_draws_and_exports(page: Page, url: str, ask: Callable[[str], Any]) -> None:
    open_page(page, f"{url}/run/real/timeline/short/1")
    painted = page.evaluate(
        """() => {
            const canvas = document.querySelector('canvas.gantt');
            const pen = canvas.getContext('2d');
            const all = pen.getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(all.buffer)).size;
        }"""
    )
    assert painted > 4
    trace = ask("trace/real?stage=short&step=1")
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"generating", "tool"} <= names


# --------------------------------------------------------------------------- finding


def test_filters_find_what_is_there_and_nothing_else(
    page: Page, url: str, runs: dict[str, Path]
) -> None:
    expected = sum(
        t.correct and t.failed_calls > 0
        for line in read_groups(runs["real"], "short")
        for t in line.group.trajectories
    )
    open_page(page, f"{url}/run/real/rollouts")
    settled(page, lambda: page.select_option("select[name=stage]", "short"))
    settled(page, lambda: page.select_option("select[name=reward]", "1"))
    settled(page, lambda: page.select_option("select[name=outcome]", "failed"))
    assert page.locator("table.matches tbody tr").count() == expected
    assert "outcome=failed" in page.url


def test_text_is_found_in_code(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/torn/rollouts")
    page.fill("#q", "PRINT(2 + 3)")
    settled(page, lambda: page.press("#q", "Enter"))
    ids = page.locator("table.matches tbody tr").evaluate_all("all => all.map(r => r.dataset.row)")
    assert len(ids) == 4
    assert all(row.endswith("/3") for row in ids)
    assert page.locator("#count").inner_text().startswith("4 matches in 16")


def test_a_deep_link_opens_the_very_token(page: Page, url: str, runs: dict[str, Path]) -> None:
    line = training_group(runs["real"])
    trajectory = line.group.trajectories[0]
    place = len(trajectory.prompt_ids) + 1
    open_page(
        page, f"{url}/run/real/rollout/{trajectory.id}?tab=tokens&color=version&token={place}"
    )
    assert page.locator(".tokens").get_attribute("data-mode") == "version"
    assert page.locator(".tok.pinned").get_attribute("data-i") == str(place)
    assert f"id {trajectory.token_ids[place]}" in page.locator(".tokendetail").inner_text()


def test_a_link_to_nothing_says_so(page: Page, url: str, complaints: list[str]) -> None:
    open_page(page, f"{url}/run/real/group/short/99/0")
    assert "no group 'short/99/0'" in page.locator("[role=alert]").inner_text()
    complaints.clear()  # the browser logs the 404


def test_the_keyboard_is_enough(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/torn/step/stage1/1")
    page.keyboard.press("j")
    settled(page, lambda: page.keyboard.press("Enter"))
    assert "/group/stage1/1/0" in page.url
    settled(page, lambda: page.keyboard.press("]"))
    assert "/group/stage1/1/1" in page.url
    settled(page, lambda: page.keyboard.press("u"))
    assert page.url.endswith("/step/stage1/1")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement.id === 'q'")


def focused(page: Page) -> Any:
    """The tag of the element that has focus, and what identifies it."""
    return page.evaluate(
        "(({tagName, name, dataset, innerText, id}) => [tagName, name || dataset.row || "
        "dataset.mode || id || innerText])(document.activeElement)"
    )


def test_focus_follows_the_reader(page: Page, url: str) -> None:
    step = "/run/torn/step/stage1/1"
    open_page(page, f"{url}{step}")
    page.keyboard.press("j")
    settled(page, lambda: page.keyboard.press("Enter"))
    assert focused(page) == ["H1", "What is 1 + 4?"]  # a screen reader reads the new heading
    settled(page, lambda: page.keyboard.press("u"))
    assert focused(page) == ["LI", "/run/torn/group/stage1/1/0"]
    settled(page, lambda: page.locator("#sort").select_option("hard"))
    page.locator("#sort").focus()
    settled(page, lambda: page.locator("#sort").select_option("easy"))
    assert focused(page) == ["SELECT", "sort"]
    settled(page, lambda: page.locator("a[aria-label='next step']").press("Enter"))
    assert page.url.endswith("/step/stage1/2")
    settled(page, page.go_back)
    assert page.evaluate("document.activeElement.ariaLabel") == "next step"


def test_focus_stays_on_a_control_that_is_drawn_again(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/torn/rollouts")
    page.locator("select[name=reward]").focus()
    settled(page, lambda: page.select_option("select[name=reward]", "1"))
    assert focused(page) == ["SELECT", "reward"]
    open_page(page, f"{url}/run/real/rollout/short/1/0/0?tab=tokens")
    page.locator("button[data-mode=class]").press("Enter")
    assert focused(page) == ["BUTTON", "class"]


def test_light_and_dark(page: Page, url: str) -> None:
    open_page(page, f"{url}/")
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.click("#theme")
    assert page.evaluate(shade) != light
    page.reload()
    page.wait_for_selector("#main[data-ready]")
    assert page.evaluate(shade) != light


@pytest.mark.parametrize("run", ["real", "hostile"])
def test_nothing_is_wider_than_a_phone(phone: Page, url: str, run: str) -> None:
    group = "short/1/0" if run == "real" else "stage1/1/0"
    stage = group.partition("/")[0]
    for path in (
        *("/", f"/run/{run}", f"/run/{run}/step/{stage}/1", f"/run/{run}/group/{group}"),
        *(f"/run/{run}/rollout/{group}/0", f"/run/{run}/rollout/{group}/0?tab=tokens"),
        *(f"/run/{run}/rollouts", f"/run/{run}/timeline/{stage}/1"),
    ):
        open_page(phone, f"{url}{path}")
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


# --------------------------------------------------------------------------- runs that are not nice


def cells(page: Page, count: int) -> None:
    """Wait until the map of steps has so many."""
    page.wait_for_function(
        "count => document.querySelectorAll('.strip .cell').length === count", arg=count
    )


def test_a_run_that_is_writing_is_followed(page: Page, tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "live", recipe()) as run:
        write_step(run, 1)
        with serving(tmp_path / "live") as url:
            open_page(page, f"{url}/run/live")
            assert page.locator(".badge:has-text('running')").count() == 1
            assert page.locator(".strip .cell").count() == 1
            page.evaluate("window.same = true")
            page.locator("#settings summary").press("Enter")
            write_step(run, 2)
            cells(page, 2)
            assert page.evaluate("document.activeElement.parentNode.id") == "settings"
            assert page.locator("#settings").get_attribute("open") is not None
            run.rewind("stage1", 1)  # a resumed run goes back
            cells(page, 1)
            write_step(run, 2)
            write_step(run, 3)
            cells(page, 3)
            run.event("finished")
            page.wait_for_selector(".badge:has-text('finished')")
            assert page.evaluate("window.same") is True, "the page was not loaded again"
            page.goto("about:blank")  # or it would ask a server that is gone


def test_a_torn_last_line_is_not_there_yet(page: Page, url: str, runs: dict[str, Path]) -> None:
    assert not (runs["torn"] / "metrics.jsonl").read_bytes().endswith(b"\n")
    open_page(page, f"{url}/run/torn")
    assert page.locator(".strip .cell").count() == 2
    assert page.locator(".notice").count() == 0
    open_page(page, f"{url}/run/torn/step/stage1/2")
    assert page.locator(".grouprow").count() == 2


def test_a_run_of_an_older_format_says_so(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/older")
    said = page.locator("[role=alert]").inner_text()
    assert "written in format 0" in said
    assert "0.0.9" in said
    open_page(page, f"{url}/")
    assert "written in format 0" in page.locator("[role=alert]").inner_text()
    assert page.locator("table.runs a:text-is('real')").count() == 1


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/step/stage1/1",
        "/group/stage1/1/0?diff=0,1",
        "/rollout/stage1/1/0/0",
        "/rollouts?text=script",
    ],
)
def test_hostile_text_is_only_text(page: Page, url: str, path: str) -> None:
    open_page(page, f"{url}/run/hostile{path}")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert page.evaluate("window.owned") is None
    assert page.locator("main script, main iframe, main img, main textarea").count() == 0
    shown = page.evaluate("document.body.textContent")
    assert HOSTILE[:40] in shown
    if "rollout/" in path:
        assert "␛[31mred" in shown
        assert "⟨U+202E⟩" in shown


def test_a_huge_line_is_cut_until_asked_for(page: Page, url: str) -> None:
    open_page(page, f"{url}/run/hostile/rollout/stage1/2/0/0")
    result = page.locator(".seg.result pre")
    assert len(result.inner_text()) < 10_000
    page.locator(".seg.result .more").click()
    assert len(result.inner_text()) == 200_000
    assert "100,000 more characters" in page.locator(".seg.result").inner_text()


def test_script_cannot_be_made_from_text_at_all(
    page: Page, url: str, complaints: list[str]
) -> None:
    """The policy holds even if the page's own code were careless."""
    open_page(page, f"{url}/run/hostile")
    outcome = page.evaluate(
        """() => {
            const bad = '<img src=x onerror=window.owned=1>';
            try { document.getElementById('main').innerHTML = bad; }
            catch (error) { return error.name; }
            return 'allowed';
        }"""
    )
    assert outcome == "TypeError"
    assert page.evaluate("window.owned") is None
    complaints.clear()  # the browser reports the violation


def test_figures_on_the_page_are_those_on_record(
    page: Page, url: str, runs: dict[str, Path]
) -> None:
    step = next(m for m in read_metrics(runs["real"]) if m["stage"] == "short")
    open_page(page, f"{url}/run/real/step/short/1")
    shown = page.locator(".figure:has-text('reward') b").first.inner_text()
    assert float(shown.rstrip("%")) == pytest.approx(100 * step["reward"], abs=0.06)


def test_names_with_strange_characters_can_be_opened(page: Page, tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a run #1 (50%)", steps=1)
    with serving(path) as url:
        open_page(page, f"{url}/run/{quote(path.name, safe='')}/step/stage1/1")
        settled(page, lambda: page.locator(".grouprow .prompt").first.click())
        assert page.evaluate("location.pathname").startswith("/run/a%20run%20%231%20(50%25)/group/")
        page.goto("about:blank")

"""report.html: complete, self-contained, and harmless whatever the trajectories say."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from rstar2.config import load_recipe
from rstar2.record import RunDirectory
from rstar2.report.page import choose_examples, figures, write_report
from rstar2.report.summary import duration, summarise
from rstar2.report.table import end_table

MakeRun = Callable[..., Path]
VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = (
    "</reason></div></style></script><script>document.title='owned'</script>"
    "<img src=x onerror=alert(1)><tool_call>\n{}\n</tool_call><iframe src='http://evil'></iframe>"
    "<tool_response>forged</tool_response><answer>{{ 7*7 }} {% raw %} \\boxed{1}</answer>\u202e&lt;"
)


class Page(HTMLParser):
    """Tags, links and text of a page; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def read(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def printed(run: Path) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(end_table(run))
    return out.getvalue()


def test_the_page_shows_the_whole_run(make_run: MakeRun) -> None:
    page = read(make_run())
    for text in ("finished", "Stage by stage", "stage3", "sft", "30%", "97.6%", "digit_sum"):
        assert text in page.text
    for text in ("NameError: name 'math' is not defined", "exception", "learner:", "torch"):
        assert text in page.text
    assert page.count("svg") == 9 + 1 + 8  # curves, kinds before and after, each kind
    assert page.count("details") >= 3


def test_the_page_loads_nothing(make_run: MakeRun) -> None:
    path = write_report(make_run())
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<link|\bfetch\(|XMLHttpRequest|WebSocket", text)
    page = Page(text)
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs]
    policies = [attrs for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert "default-src 'none'" in str(policies[0]["content"])
    assert sorted(p.name for p in path.parent.glob("report*")) == ["report.html"]


def test_hostile_trajectories_are_only_text(make_run: MakeRun) -> None:
    clean, hostile = read(make_run("clean")), read(make_run("hostile", text=HOSTILE))
    assert hostile.count("script") == clean.count("script") == 1
    for tag in ("img", "iframe", "input", "link"):
        assert hostile.count(tag) == 0
    assert "document.title='owned'" in hostile.text
    assert "{{ 7*7 }}" in hostile.text
    handlers = [name for _, attrs in hostile.tags for name in attrs if name.startswith("on")]
    assert handlers == []


def test_hostile_names_are_only_text(tmp_path: Path, make_run: MakeRun) -> None:
    evil = "</title><script>alert(1)</script>"
    recipe = load_recipe("tiny", [f"name={evil}"]).recipe
    page = read(make_run("named", recipe=recipe))
    assert page.count("script") == 1
    assert evil in page.text


@pytest.mark.parametrize("stop_after", [0, 7, 31])
def test_a_run_that_is_not_finished_has_a_page_too(make_run: MakeRun, stop_after: int) -> None:
    run = make_run(stop_after=stop_after)
    page = read(run)
    assert "not finished" in page.text
    assert "after" in printed(run)


def test_an_empty_run_has_a_page_too(tmp_path: Path) -> None:
    RunDirectory.create_or_resume(tmp_path, load_recipe("tiny").recipe).close()
    page = read(tmp_path)
    assert "not finished" in page.text
    assert page.count("svg") == 0


def test_examples_are_problems_that_were_learnt(make_run: MakeRun) -> None:
    examples = choose_examples(summarise(make_run()))
    learnt = [e for e in examples if e.after.correct]
    assert len(learnt) == 4
    assert len({e.problem.kind for e in learnt}) == 4
    assert not any(e.before.correct for e in examples)
    assert {e.before.stage for e in examples} == {"sft"}
    assert {e.after.stage for e in examples} == {"stage3"}


def test_the_table_fits_a_terminal_of_80_columns(make_run: MakeRun) -> None:
    lines = printed(make_run()).splitlines()
    assert not any("…" in line for line in lines)
    row = next(line for line in lines if line.strip().startswith("stage3"))
    assert row.split() == [
        "stage3",
        "15",
        "97.6%",
        "96–100",
        "90.6%",
        "87–94",
        "0.5%",
        "1.2%",
        "84",
        "0:49",
    ]
    assert any(line.split()[0] == "digit_sum" and "98.6%" in line for line in lines if line.strip())


@pytest.mark.parametrize(
    ("seconds", "text"), [(47.6, "48 s"), (372, "6 min 12 s"), (11100, "3 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_accuracy_is_drawn_over_steps(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("evaluated")
    recorded = (run / "metrics.jsonl").read_text().splitlines()
    lines = [
        line[:-1] + ', "evaluation/greedy": 0.5}'
        if '"stage1"' in line and '"step":5,' in line
        else line
        for line in recorded
    ]
    assert lines != recorded
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = summarise(run)
    xs, ys = summary.accuracy_curve("greedy")
    ends = [curve.offset + curve.last for curve in summary.stages]
    assert xs == [0.0, 5, *ends]
    assert ys[1] == 0.5
    assert "Held-out accuracy" in write_report(run).read_text()


def test_without_sft_the_first_row_is_the_base_model(make_run: MakeRun) -> None:
    run = make_run("from-base")
    recipe = (run / "recipe.yaml").read_text()
    start, end = recipe.index("\nsft:\n"), recipe.index("\nrl:\n")
    (run / "recipe.yaml").write_text(f"{recipe[:start]}\nsft: null{recipe[end:]}")
    console = Console(file=io.StringIO(), width=140)
    console.print(end_table(run))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.search(r"^ *base ", text, re.MULTILINE)
    assert not re.search(r"^ *sft ", text, re.MULTILINE)


@pytest.mark.parametrize(("most", "bars"), [(4, True), (3, False)])
def test_the_end_table_fits_80_columns_with_bars_or_without(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, most: int, bars: bool
) -> None:
    """Four stages have bars; the fifth, of a run that was extended, leaves no room for them."""
    monkeypatch.setattr("rstar2.report.table.MOST_BARS", most)
    out = io.StringIO()
    Console(file=out, width=80).print(end_table(make_run("wide")))
    assert "…" not in out.getvalue()
    assert ("━" in out.getvalue()) == bars


def test_rewards_of_any_size_are_drawn_as_numbers(make_run: MakeRun) -> None:
    run = make_run("any-reward", stop_after=6)
    figure = next(figures(summarise(run)))
    assert (figure.title, "%" in figure.chart) == ("Reward", True)
    text = re.sub(r'"reward":[0-9.]+', '"reward":-3.5', (run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(text)
    figure = next(figures(summarise(run)))
    assert "-3.5" in figure.chart
    assert "350" not in figure.chart

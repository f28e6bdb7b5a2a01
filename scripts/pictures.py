"""Renew every picture and text of the documentation that comes from the quickstart run.

    python scripts/pictures.py runs/tiny-seed0

live.png replays the recorded steps into the same view that `rstar2 quickstart` shows, up to the
middle of stage 2. report.png is the top of the run's report, written anew. viewer-*.png are the
views of the run that pages link (screenshots.py). quickstart_docs.py writes the texts and the
manifest by which tests find stale ones. Needs the extra `dev`, Pillow, and a browser
(scripts/install-debian.sh); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import quickstart_docs
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from screenshots import choose, chromium, get, serving, shoot

from rstar2.cli.train import INTRO
from rstar2.config import load_recipe
from rstar2.pipeline.progress import LiveView, StageKind, evaluation_line
from rstar2.record import read_evaluations
from rstar2.report.page import render
from rstar2.report.summary import summarise

COLUMNS = 104
STAGE, STEP = "stage2", 9
"""The moment that live.png shows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    asked = parser.parse_args()
    images = quickstart_docs.ROOT / quickstart_docs.IMAGES
    with sync_playwright() as play, serving([asked.run]) as url:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        draw_live(browser, asked.run, images / "live.png")
        draw_report(browser, asked.run, images / "report.png")
        views = choose(url)
        wanted = [name.split("-") for name in sorted(quickstart_docs.linked()) if "-" in name]
        for _, view, width, theme in wanted:
            shoot(browser, url, {view: views[view]}, width, theme.removesuffix(".png"), images)
        blocks = texts(url, asked.run, views)
        browser.close()
    for name in quickstart_docs.linked():
        shrink(images / name)
    quickstart_docs.write(asked.run, blocks)
    return 0


def texts(url: str, run: Path, views: dict[str, str]) -> dict[str, str]:
    """The texts of the run by name."""
    name = run.resolve().name
    stages = [s["name"] for s in get(url, f"run/{name}")["stages"] if s["kind"] == "rl"]
    group = views["group"].partition("/group/")[2].partition("?")[0]
    stage, step = views["timeline"].rsplit("/", 2)[1:]
    at = f"{name}?stage={stage}&step={step}"
    metrics = get(url, f"step/{at}")["metrics"]
    return {
        "table": quickstart_docs.end_table(run),
        "kinds": quickstart_docs.slowest_kind(get(url, f"curves/{name}")["stages"], stages),
        "group": quickstart_docs.resampling(get(url, f"group/{name}?id={group}")),
        "timeline": quickstart_docs.first_step(get(url, f"timeline/{at}"), metrics),
    }


def shrink(file: Path) -> None:
    """Store a picture with a palette of 256 colours: a third of the size, and no visible change.

    Half of the palette are the most frequent colours, half those that are farthest from all others,
    so that a small coloured mark keeps its colour.
    """
    with Image.open(file) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    colours, where, counts = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    exact = colours.astype(np.int32)
    chosen = list(np.argsort(-counts, kind="stable")[:128])
    away = np.min([((exact - exact[c]) ** 2).sum(1) for c in chosen], axis=0)
    while len(chosen) < min(256, len(colours)):
        chosen.append(int(away.argmax()))
        away = np.minimum(away, ((exact - exact[chosen[-1]]) ** 2).sum(1))
    nearest = np.argmin([((exact - exact[c]) ** 2).sum(1) for c in chosen], axis=0)
    indexed = nearest[where.reshape(-1)].reshape(pixels.shape[:2]).astype(np.uint8)
    small = Image.fromarray(indexed, "P")
    small.putpalette(colours[chosen].tobytes())
    small.save(file, optimize=True)


def draw_live(browser: Browser, run: Path, file: Path) -> None:
    """The terminal of `make quickstart` after STEP of STAGE."""
    screen = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    screen.print(INTRO)
    screen.print(replay(run, screen))
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_content(screen.export_svg(title="make quickstart", theme=MONOKAI))
    page.add_style_tag(content="body { margin: 0 }")
    page.locator("svg").screenshot(path=file)
    page.close()


def replay(run: Path, screen: Console) -> LiveView:
    """The view in the state that it had after STEP of STAGE; prints the evaluations before it."""
    recipe = load_recipe(str(run / "recipe.yaml")).recipe
    steps = {"sft": recipe.sft.steps if recipe.sft else 0}
    steps |= {stage.name: stage.steps for stage in recipe.rl.stages}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    now = [rows[0]["time"]]
    view = LiveView(Console(file=io.StringIO()), clock=lambda: now[0])
    with tempfile.TemporaryDirectory() as new:  # in a run that begins, nothing is recorded yet
        view.open(recipe, Path(new))
    evaluations = read_evaluations(run)
    current = ""
    for row in rows:
        if row["stage"] != current:
            for evaluation in evaluations:
                if evaluation.stage == current:
                    view.evaluation(evaluation)
                    line = Text().append("✓ ", style="green").append(evaluation_line(evaluation))
                    screen.print(line)
            current = row["stage"]
            kind = StageKind.SFT if current == "sft" else StageKind.RL
            view.stage(current, kind, steps[current])
        now[0] = row["time"]
        view.step(row["step"], without_names(row))
        if (current, row["step"]) == (STAGE, STEP):
            break
    view.close()
    return view


def without_names(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("stage", "step", "time")}


def draw_report(browser: Browser, run: Path, file: Path) -> None:
    """The first screen of the run's report, as this version writes it."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        report.write_text(render(summarise(run)), encoding="utf-8")
        page.goto(report.as_uri())
        page.screenshot(path=file)
    page.close()


if __name__ == "__main__":
    raise SystemExit(main())

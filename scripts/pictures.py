"""Draw README's pictures from a finished quickstart run: the live view and the report.

    python scripts/pictures.py runs/tiny-seed0 [--out docs/images]

live.png replays the recorded steps into the same view that `rstar2 quickstart` shows, up to the
middle of stage 2. report.png is the top of the run's report.html. Needs `pip install playwright`
(extra `dev`) and a browser (scripts/install-debian.sh); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from screenshots import chromium

from rstar2.cli.train import INTRO
from rstar2.config import load_recipe
from rstar2.pipeline.progress import LiveView, StageKind, evaluation_line
from rstar2.record import read_evaluations

COLUMNS = 104
STAGE, STEP = "stage2", 9
"""The moment that live.png shows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    asked = parser.parse_args()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        draw_live(browser, asked.run, asked.out / "live.png")
        draw_report(browser, asked.run, asked.out / "report.png")
        browser.close()
    return 0


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
    view.open(recipe, run)
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
    """The first screen of the run's report."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.goto((run / "report.html").resolve().as_uri())
    page.screenshot(path=file)
    page.close()


if __name__ == "__main__":
    raise SystemExit(main())

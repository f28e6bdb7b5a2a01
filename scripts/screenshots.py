"""Take screenshots of all views of the viewer with the system's Chromium, to look at.

    python scripts/screenshots.py runs/tiny-seed0 [MORE RUNS] [--out runs/screenshots]

Every view at desktop and phone width, light and dark; pictures.py takes those of the documentation.
Needs `pip install playwright` (extra `dev`) and a browser (scripts/install-debian.sh); nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = {"desktop": (1280, 860), "phone": (390, 800)}
THEMES = ("light", "dark")
READY_MS = 300_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/screenshots"))
    parser.add_argument("--only", default="", help="Comma-separated names of views.")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with serving(asked.runs) as url, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        views = choose(url)
        if asked.only:
            views = {name: views[name] for name in asked.only.split(",")}
        for width in WIDTHS:
            for theme in THEMES:
                shoot(browser, url, views, width, theme, asked.out)
        browser.close()
    return 0


def chromium() -> str:
    """The path of the system's browser."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := os.environ.get("RSTAR2_CHROMIUM") or shutil.which(name):
            return path
    raise SystemExit("no browser: install one with scripts/install-debian.sh")


@contextlib.contextmanager
def serving(runs: list[Path]) -> Iterator[str]:
    """`rstar2 view` over the runs, on a free port."""
    command = [sys.executable, "-m", "rstar2", "view", "--port", "0", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip().rstrip("/")
        finally:
            server.terminate()
            server.wait(20)


def choose(url: str) -> dict[str, str]:
    """The addresses to capture: a group where resampling had a choice, and one of its rollouts."""
    runs = get(url, "runs")
    deadline = time.monotonic() + READY_MS / 1000
    while any(run["progress"] < 1 for run in runs) and time.monotonic() < deadline:
        time.sleep(0.5)
        runs = get(url, "runs")
    name = runs[0]["name"]
    run = quote(name, safe="")
    stage = next(s for s in get(url, f"run/{run}")["stages"] if s["kind"] == "rl")["name"]
    step = get(url, f"rollouts/{run}?stage={quote(stage)}&sort=oldest")["rows"][0]["step"]
    groups = get(url, f"step/{run}?stage={quote(stage)}&step={step}")["groups"]
    group = max(groups, key=lambda g: (g["used"], min(g["right"], g["graded"] - g["right"])))
    rollouts = get(url, f"group/{run}?id={quote(group['id'])}")["rollouts"]
    best = max(rollouts, key=lambda r: (r["correct"], r["failed"] > 0, r["tokens"]))
    right = [r["id"] for r in rollouts if r["correct"]]
    wrong = [r["id"] for r in rollouts if not r["correct"]]
    pair = ",".join(i.rpartition("/")[2] for i in (*right[:1], *wrong[:1]))
    at = f"/run/{run}"
    rollout = f"{at}/rollout/{quote(best['id'])}"
    return {
        "runs": "/?all",
        "run": at,
        "step": f"{at}/step/{quote(stage)}/{step}",
        "group": f"{at}/group/{quote(group['id'])}?diff={pair}",
        "rollout": rollout,
        "tokens": f"{rollout}?tab=tokens&color=entropy",
        "classes": f"{rollout}?tab=tokens&color=class",
        "search": f"{at}/rollouts?outcome=failed&reward=1",
        "timeline": f"{at}/timeline/{quote(stage)}/{step}",
        "compare": f"/compare?a={run}&b={run}",
    }


def get(url: str, path: str) -> Any:
    with urlopen(f"{url}/api/{path}", timeout=120) as answer:
        return json.load(answer)


def shoot(
    browser: Browser, url: str, views: dict[str, str], width: str, theme: str, out: Path
) -> None:
    size = WIDTHS[width]
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=theme,  # type: ignore[arg-type]
        device_scale_factor=1,
        reduced_motion="reduce",
    )
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: note(message.type, message.text, troubles))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    for name, path in views.items():
        picture(page, f"{url}{path}", out / f"viewer-{name}-{width}-{theme}.png", width)
    context.close()
    if troubles:
        raise SystemExit("the browser reported errors: " + "; ".join(troubles))


def note(kind: str, text: str, troubles: list[str]) -> None:
    if kind in ("error", "warning"):
        troubles.append(text)


def picture(page: Page, url: str, file: Path, width: str) -> None:
    page.goto(url)
    page.wait_for_selector("#main[data-ready]", timeout=READY_MS)
    page.wait_for_timeout(200)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if wide > 0:
        raise SystemExit(f"{url} is {wide} px wider than a {width}")
    page.screenshot(path=str(file))
    print(file, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Text and pictures of the documentation that come from one quickstart run, and whether they are
up to date.

    python scripts/quickstart_docs.py        # lists what is stale; scripts/pictures.py renews it

Text stands between `<!-- quickstart: NAME -->` and `<!-- end -->`. docs/quickstart.json
records the run, each text and picture, and the files that determine how they look.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from rstar2.report.summary import summarise
from rstar2.report.table import stage_table

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path("docs/images")
MANIFEST = Path("docs/quickstart.json")
RECIPE = "recipes/tiny.yaml"
WIDTH = 125
BLOCK = re.compile(r"<!-- quickstart: (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
PICTURE = re.compile(r"images/((?:viewer-[\w-]+|live|report)\.png)")
SOURCES = {
    "live.png": ["src/rstar2/pipeline/progress.py"],
    "report.png": ["src/rstar2/report/page.css", "src/rstar2/report/page.html.jinja"],
    "viewer": ["src/rstar2/viewer/static/*.css", "src/rstar2/viewer/static/*.js"],
}
"""The files that determine how a picture, or all those of the viewer, look."""
HALF = 0.5
WINDOW = 5


# --------------------------------------------------------------------------- text


def end_table(run: Path) -> str:
    """The table that quickstart prints, without title, rule and times."""
    table = stage_table(summarise(run))
    table.title = None
    table.columns.pop()
    screen = Console(file=io.StringIO(), width=80, no_color=True)
    with screen.capture() as captured:
        screen.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    kept = [line for line in lines if line.strip("─ ")]
    return "```\n" + "\n".join(kept) + "\n```\n"


def slowest_kind(stages: Mapping[str, Any], order: Sequence[str]) -> str:
    """Which kind of problem was below HALF for most RL steps, from the curves of the stages."""
    columns: dict[str, list[float | None]] = {}
    for stage in order:
        for name, values in stages[stage]["metrics"].items():
            if name.startswith("accuracy/"):
                columns.setdefault(name.removeprefix("accuracy/"), []).extend(values)
    kind, steps = max(((k, steps_below(v)) for k, v in columns.items()), key=lambda pair: pair[1])
    name = kind.replace("_", " ")
    return paragraph(
        "Start with *accuracy by kind*: the mean can rise while one kind stays behind. In this run "
        f"{name} is at or below {HALF:.0%} (mean of {WINDOW} steps) for {steps} of the "
        f"{len(columns[kind])} RL steps, longer than any other kind."
    )


def steps_below(values: Sequence[float | None]) -> int:
    """The number of steps at which the mean of the last WINDOW values is at most HALF."""
    known = [0.0 if value is None else value for value in values]
    windows = (known[max(0, n - WINDOW) : n] for n in range(1, len(known) + 1))
    return sum(math.fsum(window) / len(window) <= HALF for window in windows)


def resampling(group: Mapping[str, Any]) -> str:
    """What resampling did with the correct rollouts of a group."""
    right = [(n, r) for n, r in enumerate(group["rollouts"]) if r["correct"]]
    most = max(r["weight"] for _, r in right)
    failing = [(n, r) for n, r in right if r["weight"] < most]
    dropped = [n for n, r in failing if not r["chosen"]]
    weights = sorted({f"{r['weight']:.3g}" for _, r in failing})
    return paragraph(
        "The table shows the verdict, `p_err`, `p_format` and weight of every rollout, and why "
        f"resampling kept or dropped it. In this group {len(right)} rollouts are correct. The "
        f"cleanest has weight {most:.3g}. {number(len(failing)).capitalize()} had failed calls or "
        f"a wrong format, and weight {listed(weights)}; dropped of these: {number(len(dropped))}. "
        "Wrong rollouts are sampled uniformly, so failures stay diverse. Select two rollouts to "
        "compare them side by side with the differences marked; the address includes the "
        "selection, so it can be shared."
    )


def first_step(timeline: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """How the groups of a step start."""
    starts: dict[str, float] = {}
    for _, trajectory, _, start, _ in timeline["spans"]:
        name = timeline["trajectories"][trajectory].rpartition("/")[0]
        starts[name] = min(start, starts.get(name, start))
    order = sorted(starts.values())
    at_once = round(metrics["groups/drawn"] - metrics["groups/refilled"])
    text = f"Here the first {at_once} groups start at once"
    if len(order) > at_once:
        text += (
            f", and from second {order[at_once] / 1000:.1f} on other groups replace the "
            f"{metrics['groups/dropped']:.0f} that gave no learning signal"
        )
    return paragraph(
        "The timeline shows, per engine, the number of rollouts in each state, and one line per "
        "rollout: queued, generating, waiting for a tool, preempted. `rstar2 simulate` draws "
        f'simulated steps in the same way. {text}. "Chrome trace" downloads the timeline for '
        'Perfetto (ui.perfetto.dev), "SVG" as an image.'
    )


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def number(value: int) -> str:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[value] if value < len(words) else str(value)


def listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# --------------------------------------------------------------------------- writing


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def write(run: Path, blocks: Mapping[str, str], root: Path = ROOT) -> None:
    """Put the texts into the pages, and record what they and the pictures come from."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        new = BLOCK.sub(
            lambda m: f"<!-- quickstart: {m[1]} -->\n{blocks[m[1]]}<!-- end -->\n", text
        )
        if new != text:
            page.write_text(new, encoding="utf-8")
    about = json.loads((run / "environment.json").read_text())
    manifest = {
        "run": {
            "name": run.resolve().name,
            "rstar2": about.get("rstar2"),
            "commit": about.get("commit"),
            "metrics": digest([run / "metrics.jsonl"]),
        },
        "recipe": recipe_digest(root),
        "sources": {name: sources(name, root) for name in SOURCES},
        "pictures": {name: digest([root / IMAGES / name]) for name in sorted(linked(root))},
        "blocks": {name: blocks[name] for name in sorted(blocks)},
    }
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def linked(root: Path = ROOT) -> set[str]:
    """The pictures of the run that pages show."""
    texts = (page.read_text(encoding="utf-8") for page in pages(root))
    return {name for text in texts for name in PICTURE.findall(text)}


def digest(files: Iterable[Path]) -> str:
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]


def sources(name: str, root: Path = ROOT) -> str:
    return digest(sorted(file for pattern in SOURCES[name] for file in root.glob(pattern)))


def recipe_digest(root: Path = ROOT) -> str:
    """Of the recipe's values; comments may change."""
    values = yaml.safe_load((root / RECIPE).read_text())
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------- checking


def stale(root: Path = ROOT) -> list[str]:
    """Everything that does not come from the recorded run, or looks different today."""
    manifest = json.loads((root / MANIFEST).read_text())
    found = []
    if manifest["recipe"] != recipe_digest(root):
        found.append(f"{RECIPE} has changed since the run")
    for name, recorded in manifest["sources"].items():
        if recorded != sources(name, root):
            found.append(f"{name}: {', '.join(SOURCES[name])} changed since the pictures")
    for name in sorted(linked(root) | manifest["pictures"].keys()):
        file = root / IMAGES / name
        if not file.exists() or manifest["pictures"].get(name) != digest([file]):
            found.append(f"{IMAGES / name} is not the recorded picture")
    for page in pages(root):
        for name, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if manifest["blocks"].get(name) != text:
                found.append(f"{page.relative_to(root)}: the text {name!r} is not the run's")
    return found


def main() -> int:
    found = stale()
    for line in found:
        print(line)
    if found:
        print("renew with: python scripts/pictures.py runs/tiny-seed0 (after make quickstart)")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

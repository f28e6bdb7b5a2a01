"""Staleness 0 against 1: wall-clock time per step and learning curve of the same recipe.

    python benchmarks/staleness.py [--quick] [--json] [--seed N] [--steps N] [--plot FILE.svg]

Both runs start from the same SFT weights and draw with the same seeds. The peer is staleness 0
(on-policy). On one machine engines and learner share the cores, so only idle time can be gained;
the reward of the last third of the steps shows whether learning got worse.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, say, write_chart
from rstar2.config import load_recipe
from rstar2.pipeline.controller import run
from rstar2.pipeline.progress import QuietView
from rstar2.record import RunDirectory, read_metrics
from rstar2.report.svg import Series, line_chart

STEPS = 40


def train(path: Path, *changes: str) -> list[dict[str, Any]]:
    """Run the tiny recipe with changes; returns the metrics of its RL steps."""
    recipe = load_recipe("tiny", list(changes)).recipe
    with RunDirectory.create_or_resume(path, recipe) as directory:
        asyncio.run(run(recipe, directory, QuietView()))
    return [m for m in read_metrics(path) if m["stage"] == "stage1"]


def plot(curves: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Reward over steps."""
    series = [
        Series(
            f"staleness {k}",
            tuple(float(m["step"]) for m in steps),
            tuple(m["reward"] for m in steps),
            colour=k,
            smooth=5,
        )
        for k, steps in curves.items()
    ]
    chart = line_chart(series, title="mean reward", y_range=(0.0, 1.0))
    write_chart(str(chart), [s.name for s in series], path)


def main() -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--plot", type=Path, help="Write the learning curves to this file.")
    parser.add_argument("--policy", type=Path, help="Start from this export of an SFT stage.")
    args = parser.parse_args()
    count = 6 if args.quick else args.steps
    small = ["rl.prompts_per_step=8", "rl.roc.drawn=8", "rl.roc.kept=4"] if args.quick else []
    with tempfile.TemporaryDirectory(prefix="rstar2-staleness-") as name:
        root = Path(name)
        policy = args.policy
        if policy is None:
            say("SFT")
            sft = [f"sft.steps={100 if args.quick else 640}", "rl.stages=[]"]
            train(root / "sft", f"seed={args.seed}", *sft, "evaluation.count=1")
            policy = root / "sft" / "exports" / "sft"
        common = [
            f"seed={args.seed}",
            f"model.path={policy}",
            "sft=null",
            f"rl.stages=[{{name: stage1, steps: {count}, max_length: 176, max_turns: 4}}]",
            "evaluation.count=1",
            "evaluation.greedy=false",
            *small,
        ]
        curves = {}
        for staleness in (0, 1):
            say(f"staleness {staleness}, {count} steps")
            curves[staleness] = train(root / f"k{staleness}", *common, f"rl.staleness={staleness}")
    if args.plot:
        plot(curves, args.plot)
    rows = []
    for what, unit in (("time/step", "s"), ("time/collect", "s"), ("time/learn", "s")):
        means = [statistics.fmean(m[what] for m in curves[k][1:]) for k in (1, 0)]
        rows.append(
            Row(f"{what}, staleness 1", means[0], means[1], None, unit, f"{unit} on-policy")
        )
    last = max(1, count // 3)
    rewards = [statistics.fmean(m["reward"] for m in curves[k][-last:]) for k in (1, 0)]
    rows.append(Row("reward of the last third, staleness 1", rewards[0], rewards[1], None))
    ess = [statistics.fmean(m.get("mismatch/ess", 1.0) for m in curves[k]) for k in (1, 0)]
    rows.append(Row("effective sample share, staleness 1", ess[0], ess[1], None))
    stale = sum(m["groups/stale"] for m in curves[1])
    oldest = max(m.get("staleness/max", 0.0) for m in curves[1])
    rows.append(Row("oldest group that was learnt from", oldest, None, "<= 1", "updates"))
    notes = {
        "steps": count,
        "stale_groups": stale,
        "curves": {str(k): [round(m["reward"], 4) for m in steps] for k, steps in curves.items()},
    }
    return finish("staleness", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

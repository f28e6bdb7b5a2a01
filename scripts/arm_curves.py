"""Train variants of one learner from the same SFT weights, and write the pages that compare them.

    python scripts/arm_curves.py                        # write all pages from recorded numbers
    python scripts/arm_curves.py --run bfloat16 lora    # train the missing arms, then write
    python scripts/arm_curves.py --run lora --sft RUN   # SFT weights of a run of the recipe
    python scripts/arm_curves.py --run smollm2-lora     # an hour
    python scripts/arm_curves.py --record lora-32       # the steps of an arm that was stopped early

Arms run one after the other, each as one `rstar2 train` of its own. Their numbers are kept in
docs/experiments/arms/. The pages of SmolLM2 need what recipes/smollm2-135m.yaml lists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rstar2 import machine
from rstar2.child import Child
from rstar2.config import Recipe, load_recipe
from rstar2.evidence.claim import from_weights
from rstar2.evidence.run import STOP_DEADLINE_S
from rstar2.learner.tolerance import GAP_FACTOR
from rstar2.record import dump_recipe, is_finished, read_evaluations, read_metrics
from rstar2.report.chart_sheet import chart_sheet
from rstar2.report.summary import percent
from rstar2.report.svg import Series, line_chart, number

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "experiments"
RUNS = Path("runs") / "arms"
COLUMNS = (
    *("reward", "failing_calls_in_correct", "response_length", "truncated", "entropy", "grad_norm"),
    *("mismatch/k3", "mismatch/abs", "mismatch/abs_max", "mismatch/ess", "mismatch/capped"),
    *("weights/probe_gap", "weights/tolerance", "weights/megabytes"),
)
TINY = (
    "sft=null",  # arms start from SFT weights
    "rl.stages=[{name: rl, steps: 20, max_length: 176, max_turns: 4}]",
    "evaluation.count=120",
    "evaluation.samples=1",
)
SMOLLM2 = (
    "sft=null",
    "rl.stages=[{name: rl, steps: 20, max_length: 256, max_turns: 3}]",
    "evaluation.count=120",
)
BFLOAT16 = ("learner.dtype=bfloat16", "model.dtype=bfloat16")

Columns = dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant: what it changes in its recipe."""

    title: str
    set: tuple[str, ...] = ()
    recipe: str = "tiny"
    base: tuple[str, ...] = TINY

    def load(self) -> Recipe:
        return load_recipe(self.recipe, [*self.base, *self.set]).recipe


ARMS = {
    "float32": Arm("float32"),
    "bfloat16": Arm("bfloat16", BFLOAT16),
    "lora-32": Arm(
        "LoRA, rank 32", ("learner.lora={rank: 32, alpha: 64}", "rl.optimizer.lr=2.0e-3")
    ),
    "smollm2": Arm("all weights", BFLOAT16, "smollm2-135m", SMOLLM2),
    "smollm2-lora": Arm(
        "LoRA, rank 32",
        (*BFLOAT16, "learner.lora={rank: 32, alpha: 64}", "rl.optimizer.lr=4.0e-4"),
        "smollm2-135m",
        SMOLLM2,
    ),
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The numbers of an arm that has run."""

    steps: Columns
    heldout: dict[str, dict[str, float]]
    """By stage and mode, as `rl/greedy`: mean, low, high."""
    made: dict[str, Any]

    def mean(self, column: str, first: int = 1, last: int | None = None) -> float:
        values = [v for v in self.steps[column][first - 1 : last] if v is not None]
        return fmean(values) if values else math.nan

    def largest(self, column: str) -> float:
        return max((v for v in self.steps[column] if v is not None), default=math.nan)

    def least(self, column: str) -> float:
        return min((v for v in self.steps[column] if v is not None), default=math.nan)

    @property
    def count(self) -> int:
        return len(self.steps["reward"])


Cells = Mapping[str, Recorded]


# --------------------------------------------------------------------------- running


async def train(recipe: Recipe, path: Path) -> None:
    """Run a recipe to its end, or resume it."""
    if is_finished(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file, log = path.with_name(path.name + ".yaml"), path.with_name(path.name + ".log")
    file.write_text(dump_recipe(recipe))
    words = [sys.executable, "-m", "rstar2", "train", str(file), "--run", str(path)]
    child = Child(
        path.name, words, parent_death_signal=signal.SIGTERM, grace_s=STOP_DEADLINE_S, log=log
    )
    try:
        status = await child.wait()
    finally:
        await child.stop()
    if status != 0:
        sys.exit(f"{path.name}: {child.post_mortem()} (log: {log})")


async def run_arm(name: str, sft: Path | None) -> None:
    """Train the SFT weights if there are none yet, then the arm; record its numbers."""
    arm = ARMS[name]
    source = sft or RUNS / f"sft-{arm.recipe}"
    if sft is None:
        only_sft = load_recipe(arm.recipe, ["rl.stages=[]"]).recipe
        print(f"SFT of {arm.recipe}", file=sys.stderr, flush=True)
        await train(only_sft, source)
    print(name, file=sys.stderr, flush=True)
    path = RUNS / name
    await train(from_weights(arm.load(), source / "exports" / "sft"), path)
    write(name, path)


def write(name: str, run: Path) -> None:
    """Record the numbers of a finished run."""
    lines = [line for line in read_metrics(run) if "reward" in line]
    columns = {column: [line.get(column) for line in lines] for column in COLUMNS}
    heldout = {
        f"{e.stage}/{e.mode}": {
            "mean": e.accuracy.mean,
            "low": e.accuracy.low,
            "high": e.accuracy.high,
        }
        for e in read_evaluations(run)
    }
    about = machine.describe()
    made = {"cpu": about["cpu"], "commit": about["commit"], "torch": about["packages"]["torch"]}
    parts = {"settings": ARMS[name].set, "made": made, "heldout": heldout}
    text = json.dumps(parts, indent=1)[:-2]
    steps = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in columns.items())
    file = PAGES / "arms" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'{text},\n "steps": {{\n{steps}\n }}\n}}\n')


def read(name: str) -> Recorded | None:
    """The recorded numbers of an arm; None if it has not run."""
    file = PAGES / "arms" / f"{name}.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text())
    if tuple(values["settings"]) != ARMS[name].set:
        sys.exit(f"{file} has other settings than the arm has now: delete it and run it again")
    return Recorded(values["steps"], values["heldout"], values["made"])


# --------------------------------------------------------------------------- pages


def heldout(cell: Recorded, key: str) -> str:
    """`61% (55–67)`, or a dash if it was not measured."""
    found = cell.heldout.get(key)
    if found is None:
        return "–"
    return f"{percent(found['mean'])} ({100 * found['low']:.0f}–{100 * found['high']:.0f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def rewards(cells: Cells, width: int) -> str:
    """Mean reward of every `width` steps, and accuracy on held-out problems."""
    longest = max(cell.count for cell in cells.values())
    spans = [(first, first + width - 1) for first in range(1, longest + 1, width)]
    head = ["arm", "steps", *(f"{a} to {b}" for a, b in spans), "greedy", "sampled"]
    rows = [
        [
            ARMS[name].title,
            str(cell.count),
            *(percent(cell.mean("reward", a, b)) if b <= cell.count else "–" for a, b in spans),
            heldout(cell, "rl/greedy"),
            heldout(cell, "rl/sampled"),
        ]
        for name, cell in cells.items()
    ]
    return table(head, rows)


def start(cells: Cells) -> str:
    """What all arms start from."""
    first = next(iter(cells.values()))
    stage = "base" if "base/greedy" in first.heldout else "sft"  # its name in older records
    greedy, sampled = (heldout(first, f"{stage}/{mode}") for mode in ("greedy", "sampled"))
    return f"{greedy} greedy, {sampled} sampled"


def growth(cell: Recorded) -> float:
    """Largest ratio of a probe gap to the largest gap that was measured before it."""
    pairs = zip(cell.steps["weights/probe_gap"], cell.steps["weights/tolerance"], strict=True)
    return max(gap / (allowed / GAP_FACTOR) for gap, allowed in pairs if gap and allowed)


def mismatch(cells: Cells) -> str:
    head = ["arm", "k3, mean", "k3, largest step", "mean difference", "largest difference"]
    head += ["least effective sample size"]
    rows = [
        [
            ARMS[name].title,
            f"{cell.mean('mismatch/k3'):.1e}",
            f"{cell.largest('mismatch/k3'):.1e}",
            f"{cell.mean('mismatch/abs'):.1e}",
            f"{cell.largest('mismatch/abs_max'):.2g}",
            f"{cell.least('mismatch/ess'):.4f}",
        ]
        for name, cell in cells.items()
    ]
    return table(head, rows)


def tolerances(cells: Cells) -> str:
    head = ["arm", "measured at the start", "tolerance at the end", "largest probe gap"]
    head += ["largest growth of the gap"]
    rows = []
    for name, cell in cells.items():
        allowed = [v for v in cell.steps["weights/tolerance"] if v is not None]
        if not allowed:
            continue
        gap = cell.largest("weights/probe_gap")
        first, last = allowed[0] / GAP_FACTOR, allowed[-1]
        row = [f"{first:.3f}", f"{last:.3f}", f"{gap:.3f}", f"{growth(cell):.2f}"]
        rows.append([ARMS[name].title, *row])
    return table(head, rows)


def bfloat16_page(cells: Cells) -> str:
    shared = min(cell.count for cell in cells.values())
    return f"""# In bfloat16 the tiny recipe learns as in float32, over {shared} RL steps

The tiny recipe, RL from the same SFT weights ({start(cells)}), one seed.
Master weights and optimizer state are float32 in all arms. `learner.dtype: bfloat16` computes the
forward and backward pass in bfloat16, `model.dtype: bfloat16` the embedded engines. The runs were
made on a CPU, not on a GPU.

{COMMAND.format("bfloat16")}

## Reward and accuracy

Mean reward of the rollouts by step, then accuracy on 120 held-out problems with 95% intervals.

{rewards(cells, 5)}

![Reward, tool errors, mismatch and probe by step](bfloat16.svg)

An arm with fewer steps was stopped early. One seed cannot show a small difference between the arms.

{number_formats(cells)}"""


def number_formats(cells: Cells) -> str:
    """How engine and learner differ, and what the probe allows."""
    most = max(growth(cell) for name, cell in cells.items() if BFLOAT16[0] in ARMS[name].set)
    return f"""## Mismatch between engine and learner

The logprobs of the same sampled tokens: the engine's when it sampled them, and the learner's before
its update. k3 is an estimate of their KL divergence. The importance correction
(`rl.loss.importance_cap`) applies to this ratio.

{mismatch(cells)}

## The tolerance of the probe

After the first update, an engine whose checksums are right scores 16 prompts. The largest
difference to the learner is the measured rounding. Later probes may differ by {GAP_FACTOR:g} times
the largest difference so far (the metric `weights/tolerance`). The last column is the largest ratio
of a probe's gap to the largest gap before it. A ratio above {GAP_FACTOR:g} stops a run; the largest
was {most:.2f}.

{tolerances(cells)}
"""


def lora_page(cells: Cells) -> str:
    size = cells["lora-32"].mean("weights/megabytes")
    return f"""# LoRA learns the tiny recipe as full training does

The tiny recipe, RL from the same SFT weights ({start(cells)}), one seed.
Full training has a learning rate of 7e-4, LoRA (all linear layers of the decoder, alpha twice the
rank) of 2e-3. With 7e-3 LoRA collapsed after four steps (reward 0 in steps 5 to 9).

{COMMAND.format("lora")}

Mean reward of the rollouts by step, then accuracy on 120 held-out problems with 95% intervals:

{rewards(cells, 5)}

![Reward, tool errors, entropy and length by step](lora.svg)

An arm with fewer steps was stopped early.

Engines receive merged weights ({size:.1f} MB per update), and every engine passed the rehearsal
with a planted adapter ([docs](../lora.md)).

The model has half a million parameters and a width of 128, so a rank of 32 is a quarter of its
width. This shows that the adapter path learns. It does not show which rank a large model needs.
"""


def smollm2_page(cells: Cells) -> str:
    return f"""# SmolLM2-135M learns with LoRA and with all weights, in bfloat16

`recipes/smollm2-135m.yaml` from the same SFT weights ({start(cells)}), one seed. Engines and
learner compute in bfloat16; master weights and optimizer state are float32. The learning rate is
4e-5 for all weights and 4e-4 for LoRA; neither was tuned.

{COMMAND.format("smollm2-lora")}

Mean reward of the rollouts, then accuracy on 120 held-out SVAMP problems with 95% intervals:

{rewards(cells, 5)}

![Reward, tool errors, entropy and length by step](smollm2-lora.svg)

A step has 64 rollouts of eight problems at most, so the reward of a single step varies by ten
points and more.

{number_formats(cells)}"""


COMMAND = """<!-- not run: takes an hour -->
```bash
python scripts/arm_curves.py --run {}
```"""
BEHAVIOUR = {
    "reward": "Reward of the rollouts",
    "failing_calls_in_correct": "Tool-error rate in correct rollouts",
    "entropy": "Entropy of sampled tokens",
    "response_length": "Response length in tokens",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A page: its arms, text and charts."""

    arms: tuple[str, ...]
    text: Callable[[Cells], str]
    charts: dict[str, str]


NUMBER_FORMATS = {
    "reward": "Reward of the rollouts",
    "failing_calls_in_correct": "Tool-error rate in correct rollouts",
    "mismatch/k3": "Mismatch of engine and learner (k3)",
    "weights/probe_gap": "Gap of the probe",
}
COMPARISONS = {
    "bfloat16": Comparison(("float32", "bfloat16"), bfloat16_page, NUMBER_FORMATS),
    "lora": Comparison(("float32", "lora-32"), lora_page, BEHAVIOUR),
    "smollm2-lora": Comparison(("smollm2", "smollm2-lora"), smollm2_page, BEHAVIOUR),
}
LOGARITHMIC = ("mismatch/k3", "weights/probe_gap")
SHARES = ("reward", "failing_calls_in_correct")


def curves(cells: Cells, charts: Mapping[str, str]) -> str:
    """All charts of a page as one SVG with a legend."""
    drawn = {
        title: line_chart(
            list(series(cells, column)),
            title=title,
            y_format=percent if column in SHARES else number,
            log=column in LOGARITHMIC,
        )
        for column, title in charts.items()
    }
    return chart_sheet(drawn, [ARMS[name].title for name in cells])


def series(cells: Cells, column: str) -> Iterator[Series]:
    for index, (name, cell) in enumerate(cells.items()):
        steps = [float(i + 1) for i in range(cell.count)]
        yield Series(ARMS[name].title, steps, cell.steps[column], index)


def rendered() -> dict[Path, str]:
    """The pages and pictures whose arms have all run."""
    files = {}
    for name, comparison in COMPARISONS.items():
        cells = {arm: cell for arm in comparison.arms if (cell := read(arm)) is not None}
        if len(cells) == len(comparison.arms):
            files[PAGES / f"{name}.md"] = comparison.text(cells)
            files[PAGES / f"{name}.svg"] = curves(cells, comparison.charts)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare variants of the learner.")
    parser.add_argument("--run", nargs="+", choices=COMPARISONS, default=[], metavar="PAGE")
    parser.add_argument("--sft", type=Path, help="A run of the recipe, for its SFT weights.")
    parser.add_argument("--record", choices=ARMS, help="Record an arm that was stopped early.")
    options = parser.parse_args()
    if options.record:
        write(options.record, RUNS / options.record)
    wanted = dict.fromkeys(arm for page in options.run for arm in COMPARISONS[page].arms)
    for arm in wanted:
        if read(arm) is None:
            asyncio.run(run_arm(arm, options.sft))
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

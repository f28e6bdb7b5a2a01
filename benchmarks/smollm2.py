"""Rollouts per minute of the SmolLM2 recipe: as first recorded, and as `make smollm2` runs it.

    python benchmarks/smollm2.py --model runs/smollm2-135m-seed0/exports/sft [--quick] [--json]

Both train the same export of the SFT stage on the same problems with the sizes first recorded, four
groups of eight rollouts per step:

- start: float32 in engine and learner, one engine.
- now: bfloat16 in both where the CPU has instructions for it, and the recipe's two engines.

Each case is a process of its own, and the cases are interleaved. It runs once with one step and
once with several. Rollouts per minute are those of the steps after the first, by the wall clock
(`time/step`), with both cores. CPU seconds per rollout are the difference of the two runs, divided
by the rollouts of the additional steps, with all descendants (the sandbox included): they change
less when the machine is busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, median, say, spread
from rstar2.record import read_metrics
from step import adopt_orphans, children_cpu_s

DEADLINE_S = 7200
TARGET = ">= 3"
PARTS = ("collect", "generate", "tools", "learn", "publish")


@dataclass(frozen=True)
class Run:
    """What a run of some steps cost, and its steps' metrics."""

    cpu_s: float
    steps: list[dict[str, Any]]

    @property
    def rollouts(self) -> float:
        return float(sum(step["rollouts/drawn"] for step in self.steps))


@dataclass(frozen=True)
class Speed:
    """Figures of one case in one repetition."""

    rollouts_per_minute: float
    cpu_s_per_rollout: float
    seconds: dict[str, float]
    """Mean wall seconds of a step by part."""


def cases() -> dict[str, list[str]]:
    """The settings of each case."""
    flags = Path("/proc/cpuinfo").read_text()
    narrow = "bfloat16" if "avx512_bf16" in flags else "float32"
    return {
        "start": ["engine.count=1", "model.dtype=float32", "learner.dtype=float32"],
        "now": [f"model.dtype={narrow}", f"learner.dtype={narrow}"],
    }


def train(case: Sequence[str], model: Path, problems: Path, steps: int, seed: int) -> Run:
    """Train for some steps in a process of its own."""
    stage = f"{{name: only, steps: {steps}, max_length: 256, max_turns: 3}}"
    settings = (
        *case,
        *(f"model.path={model}", "sft=null", f"rl.problems={problems}", f"rl.stages=[{stage}]"),
        *("evaluation.problems=arithmetic", "evaluation.count=1", "evaluation.greedy=false"),
        *("rl.prompts_per_step=4", "rl.optimizer.warmup_steps=0"),
    )
    overrides = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="rstar2-smollm2-") as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "rstar2", "train", "smollm2-135m", "--run", str(run)]
        before = children_cpu_s()
        done = subprocess.run(
            [*command, "--seed", str(seed), "--json", *overrides],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(case)} failed:\n{done.stderr[-3000:]}")
        lines = [line for line in read_metrics(run) if line["stage"] == "only"]
        return Run(children_cpu_s() - before, lines)


def measure(case: Sequence[str], model: Path, problems: Path, more: int, seed: int) -> Speed:
    """Several steps, less one."""
    one = train(case, model, problems, 1, seed)
    many = train(case, model, problems, 1 + more, seed)
    later = many.steps[1:]
    seconds = sum(step["time/step"] for step in later)
    rollouts = sum(step["rollouts/drawn"] for step in later)
    return Speed(
        60 * rollouts / seconds,
        (many.cpu_s - one.cpu_s) / (many.rollouts - one.rollouts),
        {part: sum(step.get(f"time/{part}", 0.0) for step in later) / more for part in PARTS},
    )


def main() -> int:
    parser = arguments("rollouts per minute of the SmolLM2 recipe")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2-135m-seed0/exports/sft"))
    parser.add_argument("--problems", type=Path, default=Path("data/mawps/problems.jsonl"))
    args = parser.parse_args()
    for path, maker in ((args.model / "config.json", "make smollm2"), (args.problems, "the same")):
        if not path.is_file():
            raise SystemExit(f"{path}: no such file; {maker} makes one")
    adopt_orphans()
    repetitions, more = (1 if args.quick else 3), 3
    speeds: dict[str, list[Speed]] = {name: [] for name in cases()}
    for repetition in range(repetitions):
        for name, case in cases().items():
            seed = args.seed + repetition
            speed = measure(case, args.model.absolute(), args.problems.absolute(), more, seed)
            speeds[name].append(speed)
            say(f"{name}: {json.dumps(speed.seconds)}, {speed.rollouts_per_minute:.0f} per minute")
    wall = {name: [s.rollouts_per_minute for s in values] for name, values in speeds.items()}
    cpu = {name: [1 / s.cpu_s_per_rollout for s in values] for name, values in speeds.items()}
    rows = [
        Row("rollouts per minute", median(wall["now"]), median(wall["start"]), TARGET, "/min"),
        Row("rollouts per CPU second", median(cpu["now"]), median(cpu["start"]), None, "/CPU s"),
    ]
    notes = {
        "rollouts_per_minute": {name: spread(values) for name, values in wall.items()},
        "seconds_of_a_step": {name: [s.seconds for s in values] for name, values in speeds.items()},
    }
    return finish("smollm2", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

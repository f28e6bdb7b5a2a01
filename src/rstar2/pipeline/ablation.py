"""Ablation of resampling, which the paper lacks: variants differ in which rollouts they keep.

    seed ──> SFT ──> export ──> every variant ──> held-out evaluations and curves per step

Variants of one seed start from the same SFT weights and see the same problems in the same order,
so differences are taken within seeds. All train on the same number of kept rollouts per step; the
number of drawn rollouts is reported too. Each run has its own directory and can be resumed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rstar2.config import Recipe, load_recipe
from rstar2.errors import RecipeError
from rstar2.record import read_evaluations, read_metrics
from rstar2.tasks import together
from rstar2.types import Estimate, encode

VARIANTS = ("grpo", "uniform", "flat", "roc", "roc-no-errors", "roc-no-format", "release")
REFERENCE = "roc"
PARTS = 4

Execute = Callable[[Recipe, Path], Awaitable[None]]
"""Runs a recipe in a directory to its end, or resumes it."""


@dataclass(frozen=True, slots=True)
class AblationRun:
    """The record of one variant with one seed."""

    variant: str
    seed: int
    steps: tuple[int, ...]
    drawn: tuple[float, ...]
    """Rollouts drawn up to and including each step."""
    kept: tuple[float, ...]
    reward: tuple[float | None, ...]
    failing: tuple[float | None, ...]
    """Tool-error rate in correct rollouts, per step."""
    tool_errors: tuple[float | None, ...]
    length: tuple[float | None, ...]
    checkpoints: tuple[int, ...]
    """Steps after which the policy was evaluated; 0 is the SFT policy."""
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    heldout_failing: tuple[float | None, ...]


def recipe_of(variant: str, seed: int, steps: int | None, overrides: Sequence[str] = ()) -> Recipe:
    """A variant's recipe: its steps in equal parts, each followed by an evaluation."""
    recipe = load_recipe(f"ablations/{variant}", overrides, seed=seed).recipe
    if steps is None:
        return recipe
    if steps < PARTS:
        raise RecipeError(f"--steps {steps}: an ablation has {PARTS} parts, give at least {PARTS}")
    cuts = [steps * (i + 1) // PARTS - steps * i // PARTS for i in range(PARTS)]
    first = recipe.rl.stages[0]
    stages = tuple(
        first.model_copy(update={"name": f"part{i + 1}", "steps": cut})
        for i, cut in enumerate(cuts)
    )
    return recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"stages": stages})})


async def ablate(
    out: Path,
    *,
    variants: Sequence[str],
    seeds: Sequence[int],
    steps: int | None,
    execute: Execute,
    overrides: Sequence[str] = (),
    jobs: int = 1,
) -> list[AblationRun]:
    """Run what is missing under `out`, at most `jobs` runs at once, then read all runs."""
    for variant in variants:
        if variant not in VARIANTS:
            raise RecipeError(f"--variants {variant}: known are {', '.join(VARIANTS)}")
        recipe_of(variant, seeds[0], steps, overrides)  # refuse a wrong recipe before anything runs
    free = asyncio.Semaphore(jobs)

    async def run(recipe: Recipe, path: Path) -> None:
        async with free:
            await execute(recipe, path)

    async def one_seed(seed: int) -> None:
        source = out / f"sft-seed{seed}"
        await run(common_recipe(seed, overrides), source)
        policy = source / "exports" / "sft"
        await together(
            run(variant_recipe(v, seed, steps, policy, overrides), out / f"{v}-seed{seed}")
            for v in variants
        )

    await together(one_seed(seed) for seed in seeds)
    return [read_run(out / f"{v}-seed{s}", v, s) for v in variants for s in seeds]


def common_recipe(seed: int, overrides: Sequence[str]) -> Recipe:
    """SFT only: it makes the weights that all variants of a seed start from."""
    recipe = recipe_of("base", seed, None, overrides)
    rl = recipe.rl.model_copy(update={"stages": ()})
    return recipe.model_copy(update={"name": "ablation-sft", "rl": rl})


def variant_recipe(
    variant: str, seed: int, steps: int | None, policy: Path, overrides: Sequence[str]
) -> Recipe:
    """One variant's RL, from the common weights of its seed."""
    recipe = recipe_of(variant, seed, steps, overrides)
    model = recipe.model.model_copy(update={"path": str(policy.absolute())})
    return recipe.model_copy(update={"model": model, "sft": None})


def read_run(path: Path, variant: str, seed: int) -> AblationRun:
    """Read the record of a finished run."""
    lines = [m for m in read_metrics(path) if "reward" in m]
    made = {(e.stage, e.mode): e for e in read_evaluations(path)}
    stages = list(dict.fromkeys(["sft", *(line["stage"] for line in lines)]))
    evaluated = [s for s in stages if (s, "greedy") in made and (s, "sampled") in made]
    ends = {"sft": 0}
    for ordinal, line in enumerate(lines, start=1):
        ends[line["stage"]] = ordinal

    def column(name: str) -> tuple[float | None, ...]:
        return tuple(line.get(name) for line in lines)

    def summed(name: str) -> tuple[float, ...]:
        total, out = 0.0, []
        for line in lines:
            total += line[name]
            out.append(total)
        return tuple(out)

    return AblationRun(
        variant=variant,
        seed=seed,
        steps=tuple(range(1, len(lines) + 1)),
        drawn=summed("rollouts/drawn"),
        kept=summed("rollouts/kept"),
        reward=column("reward"),
        failing=column("failing_calls_in_correct"),
        tool_errors=column("tool_errors"),
        length=column("response_length"),
        checkpoints=tuple(ends[s] for s in evaluated),
        greedy=tuple(made[s, "greedy"].accuracy.mean for s in evaluated),
        sampled=tuple(made[s, "sampled"].accuracy.mean for s in evaluated),
        heldout_failing=tuple(made[s, "sampled"].failing_calls_in_correct for s in evaluated),
    )


# --------------------------------------------------------------------------- figures


def over_seeds(values: Sequence[float]) -> Estimate:
    """A mean over seeds with Student's 95% interval; one seed alone has none."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = fmean(values)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.stats import t  # imported on use: it takes a second

    half = float(t.ppf(0.975, count - 1)) * stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def last_quarter(values: Sequence[float | None]) -> float:
    """The mean over the last quarter of the steps, without missing values."""
    known = [v for v in values[-max(1, len(values) // 4) :] if v is not None]
    return fmean(known) if known else math.nan


FIGURES: Mapping[str, Callable[[AblationRun], float]] = {
    "held-out greedy": lambda r: r.greedy[-1] if r.greedy else math.nan,
    "held-out sampled": lambda r: r.sampled[-1] if r.sampled else math.nan,
    "held-out tool-error rate in correct": lambda r: _or_nan(r.heldout_failing),
    "reward, last quarter": lambda r: last_quarter(r.reward),
    "tool-error rate in correct, last quarter": lambda r: last_quarter(r.failing),
    "length, last quarter": lambda r: last_quarter(r.length),
    "rollouts drawn": lambda r: r.drawn[-1] if r.drawn else 0.0,
    "rollouts kept": lambda r: r.kept[-1] if r.kept else 0.0,
}


def _or_nan(values: Sequence[float | None]) -> float:
    return values[-1] if values and values[-1] is not None else math.nan


def summary(runs: Sequence[AblationRun]) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Per variant and figure: the mean over seeds, and the difference to RoC within seeds."""
    by = {(r.variant, r.seed): r for r in runs}
    out: dict[str, dict[str, dict[str, Estimate]]] = {}
    for variant in dict.fromkeys(r.variant for r in runs):
        mine = [r for r in runs if r.variant == variant]
        out[variant] = {}
        for name, of in FIGURES.items():
            values = [v for r in mine if not math.isnan(v := of(r))]
            out[variant][name] = {"mean": over_seeds(values)}
            pairs = [(of(r), of(by[REFERENCE, r.seed])) for r in mine if (REFERENCE, r.seed) in by]
            known = [a - b for a, b in pairs if not math.isnan(a - b)]
            if variant != REFERENCE and known:
                out[variant][name]["minus roc"] = over_seeds(known)
    return out


def to_json(runs: Sequence[AblationRun]) -> str:
    """All curves and the summary, for machines; values that are not a number are null."""
    document = {
        "variants": list(dict.fromkeys(r.variant for r in runs)),
        "seeds": sorted({r.seed for r in runs}),
        "summary": summary(runs),
        "runs": runs,
    }
    return json.dumps(json.loads(encode(document)), indent=1)

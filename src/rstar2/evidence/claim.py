"""The file of a claim: what is compared, by which metric and test, and what would settle it.

It is written and committed before its runs; only `after_runs` is added later. Arms differ in their
overrides of one recipe. Arms with the same SFT settings and RL seed share the SFT weights and the
problems, and differences are taken within seeds. An arm without RL stages (`rl.stages=[]`) is the
model that RL starts from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from rstar2.config import EvaluationConfig, Recipe, RlConfig, load_recipe
from rstar2.config.codeenv import Section
from rstar2.errors import UserError

HELDOUT = "heldout/"
"""Columns of the evaluation on held-out problems after the last step."""
EVALUATED = "evaluated/"
"""Columns of the claim's own evaluations, as `evaluated/NAME/accuracy` (or `pass@8`)."""
ACCURACY, PASS = "accuracy", "pass@"
MOST_SAMPLES = 9
"""Recorded counts of right answers have one digit per problem."""


class ClaimArm(Section):
    """One way to train."""

    title: str
    set: tuple[str, ...] = ()
    """Overrides of the claim's recipe, as `rl.roc.variant=none`."""
    seed_offset: int = 0
    """Added to the RL seed; a null arm repeats another arm with other seeds."""
    same_as: str | None = None
    """`CLAIM/ARM` of another claim whose cells these are."""
    seeds: int | None = Field(None, ge=1)
    """Only the first seeds of the claim; null is all of them."""
    evaluate: tuple[str, ...] | None = None
    """Evaluations of the claim that are made of this arm; null is all of them."""


class ClaimEvaluation(Section):
    """An evaluation of the model that a cell ends with, as `rstar2 eval` makes it.

    Temperature, length and turns are those of the arm's `evaluation` section.
    """

    title: str
    benchmark: str
    """As `rstar2 eval --on` takes it: NAME=FILE."""
    samples: int = Field(0, ge=0, le=MOST_SAMPLES)
    """Sampled answers per problem; 0 is one greedy answer."""
    count: int | None = Field(None, ge=1)
    """Only this many problems of the benchmark, its first; null is all."""
    seeds: int | None = Field(None, ge=1)
    """Only of the first seeds of the claim; null is all of them."""


class ClaimMetric(Section):
    """A number per cell, fixed in advance: the mean of a column over steps or a held-out figure."""

    title: str
    column: str
    first: int = Field(1, ge=1)
    last: int | None = None
    """The last step of the mean; null is the last of the run."""
    share: bool = True
    """Whether to print it as a percentage."""


class Contrast(Section):
    """A weighted sum of arms within a seed, such as {roc: 1, flat: -1}."""

    title: str
    arms: dict[str, float]
    metric: str


class PrimaryContrast(Contrast):
    """A contrast that the verdict depends on."""

    expect: Literal["less", "greater"]
    """The sign that the claim predicts."""
    smallest: float = Field(gt=0)
    """The smallest effect that matters. An interval that excludes it refutes the claim."""


class PowerPlan(Section):
    """What the number of seeds is based on."""

    effect: float = Field(gt=0)
    sd: float = Field(gt=0)
    """Standard deviation of the contrast over seeds."""
    source: str


class Claim(Section):
    """One question, its runs, and the rule of its verdict."""

    name: str
    title: str
    question: str
    why: str
    """Where the claim comes from, and what the paper says."""
    recipe: str = "evidence/base"
    set: tuple[str, ...] = ()
    """Overrides of all arms."""
    arithmetic: Literal["avx2", "native"] = "avx2"
    """`avx2`: one thread and AVX2 kernels, so that cells repeat to the last digit on every CPU.
    `native`: all that this CPU has; a cell uses all cores and cannot be repeated exactly."""
    seeds: int = Field(ge=2)
    """The number of seeds."""
    first_seed: int = Field(0, ge=0)
    """A replication starts at a seed that the first experiment did not use."""
    sft_seeds: int = Field(ge=1)
    """The seeds share this many SFT checkpoints in turn."""
    arms: dict[str, ClaimArm]
    evaluations: dict[str, ClaimEvaluation] = {}  # noqa: RUF012 - pydantic copies it
    """Made after a cell, in this order."""
    metrics: dict[str, ClaimMetric]
    primary: tuple[PrimaryContrast, ...]
    controls: tuple[Contrast, ...] = ()
    """Contrasts that must show nothing, such as two arms that differ in seeds alone."""
    planted: tuple[PrimaryContrast, ...] = ()
    """Contrasts that must show what they expect, such as an arm that does not learn."""
    descriptive: tuple[Contrast, ...] = ()
    """Contrasts that are shown and decide nothing."""
    alpha: float = Field(0.05, gt=0, lt=1)
    power: PowerPlan
    budget_core_minutes: float = Field(gt=0)
    limits: str = ""
    """What this experiment cannot show."""
    after_runs: str = ""
    """What was noticed when the results were known; it changes no verdict."""

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def seeds_of(self, arm: str) -> range:
        """The seeds of an arm."""
        return self.all_seeds[: self.arms[arm].seeds]

    def evaluations_of(self, arm: str, seed: int) -> list[str]:
        """The evaluations of a cell, in the order in which to make them."""
        chosen = self.arms[arm].evaluate
        return [
            name
            for name, evaluation in self.evaluations.items()
            if (chosen is None or name in chosen) and seed in self.all_seeds[: evaluation.seeds]
        ]

    def sft_seed(self, seed: int) -> int:
        """The seed of the SFT checkpoint that the cells of a seed start from."""
        return self.first_seed + (seed - self.first_seed) % self.sft_seeds


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: an arm with a seed."""

    claim: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    def __str__(self) -> str:
        return f"{self.claim}: {self.arm}/{self.seed}"


def read_claim(folder: Path, name: str) -> Claim:
    """Read `folder/NAME.yaml`; raises UserError with what is wrong."""
    path = folder / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        known = claim_names(folder)
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"no claim {name!r}: {hint}known in {folder} are {', '.join(known) or 'none'}"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold a claim")
    try:
        claim = Claim.model_validate({"name": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}") from None
    _check(claim, path)
    return claim


def _check(claim: Claim, path: Path) -> None:
    contrasts = (*claim.primary, *claim.controls, *claim.planted, *claim.descriptive)
    for contrast in contrasts:
        if unknown := [arm for arm in contrast.arms if arm not in claim.arms]:
            raise UserError(f"{path}: {contrast.title}: no arm {unknown[0]!r}")
        if contrast.metric not in claim.metrics:
            raise UserError(f"{path}: {contrast.title}: no metric {contrast.metric!r}")
        if abs(sum(contrast.arms.values())) > 1e-9:
            raise UserError(f"{path}: {contrast.title}: the weights must add up to 0")
    for name, arm in claim.arms.items():
        if arm.same_as is not None and (arm.set or arm.seed_offset or "/" not in arm.same_as):
            raise UserError(
                f"{path}: arms.{name}: same_as is CLAIM/ARM, without set or seed_offset"
            )
        if unknown := [e for e in arm.evaluate or () if e not in claim.evaluations]:
            raise UserError(f"{path}: arms.{name}.evaluate: no evaluation {unknown[0]!r}")
    for name, metric in claim.metrics.items():
        if metric.column.startswith(EVALUATED):
            _check_evaluated(claim, f"{path}: metrics.{name}", metric.column)


def _check_evaluated(claim: Claim, where: str, column: str) -> None:
    name, figure = evaluated_column(column)
    if name not in claim.evaluations:
        raise UserError(f"{where}: no evaluation {name!r}")
    most = claim.evaluations[name].samples or 1
    known = [ACCURACY, *(f"{PASS}{k}" for k in range(1, most + 1))]
    if figure not in known:
        raise UserError(f"{where}: {figure!r} is not a figure of {name}: {', '.join(known)}")


def evaluated_column(column: str) -> tuple[str, str]:
    """The evaluation and the figure of a column `evaluated/NAME/FIGURE`."""
    name, _, figure = column.removeprefix(EVALUATED).rpartition("/")
    return name, figure


def claim_names(folder: Path) -> list[str]:
    """The claims of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


# --------------------------------------------------------------------------- cells


def cells_of(claim: Claim) -> Iterator[Cell]:
    """All cells, seed by seed, so that an unfinished claim has whole pairs."""
    for seed in claim.all_seeds:
        for name in claim.arms:
            if seed in claim.seeds_of(name):
                yield cell_of(claim, name, seed)


def cell_of(claim: Claim, arm: str, seed: int) -> Cell:
    """The cell that holds the numbers of an arm, which may belong to another claim."""
    owner, _, source = (claim.arms[arm].same_as or f"{claim.name}/{arm}").partition("/")
    return Cell(owner, source, seed)


def cell_recipe(claim: Claim, cell: Cell) -> Recipe:
    """The recipe of a cell of this claim, before its SFT weights are known."""
    arm = claim.arms[cell.arm]
    recipe = _arm_recipe(claim.recipe, (*claim.set, *arm.set))
    return recipe.model_copy(update={"seed": cell.seed + arm.seed_offset})


@cache
def _arm_recipe(recipe: str, overrides: tuple[str, ...]) -> Recipe:
    return load_recipe(recipe, overrides).recipe


def sft_recipe(claim: Claim, cell: Cell) -> Recipe | None:
    """The recipe of the SFT weights that a cell starts from; None if the arm has no SFT."""
    recipe = cell_recipe(claim, cell)
    if recipe.sft is None:
        return None
    return recipe.model_copy(
        update={
            "name": "evidence-sft",
            "seed": claim.sft_seed(cell.seed),
            "rl": RlConfig(),
            "evaluation": EvaluationConfig(**_sft_evaluation(recipe)),
        }
    )


def _sft_evaluation(recipe: Recipe) -> dict[str, Any]:
    """A small evaluation: cells measure the policy they start from in their first step."""
    kept = recipe.evaluation
    return {
        "problems": kept.problems,
        "count": 48,
        "greedy": False,
        "max_length": kept.max_length,
        "max_turns": kept.max_turns,
    }


def from_weights(recipe: Recipe, policy: Path) -> Recipe:
    """The RL of a cell, from SFT weights."""
    model = recipe.model.model_copy(update={"path": str(policy.absolute())})
    return recipe.model_copy(update={"model": model, "sft": None})


def fingerprint(recipe: Recipe) -> str:
    """Identifies the settings of a recipe; new settings with defaults do not change it."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --------------------------------------------------------------------------- values


def metric_of(
    metric: ClaimMetric,
    columns: Mapping[str, list[float | None]],
    heldout: Mapping[str, Mapping[str, float | None]],
) -> float | None:
    """The mean of a column over the metric's steps, without missing values; None without any.

    `heldout/NAME` is a number of the last sampled evaluation.
    """
    if metric.column.startswith(HELDOUT):
        sampled = [values for name, values in heldout.items() if name.endswith("/sampled")]
        return sampled[-1][metric.column.removeprefix(HELDOUT)] if sampled else None
    known = [v for v in columns[metric.column][metric.first - 1 : metric.last] if v is not None]
    return sum(known) / len(known) if known else None

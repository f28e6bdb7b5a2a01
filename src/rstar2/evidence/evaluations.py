"""The recorded evaluation of the model that a cell ends with: right answers of every problem.

One small JSON file per evaluation, written when it is complete, so that it can be used without the
run directory and before the other evaluations of its cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rstar2.config import EvaluationConfig
from rstar2.errors import UserError
from rstar2.evaluate.metrics import at_least_one
from rstar2.evaluate.scores import estimate
from rstar2.evaluate.store import read_results
from rstar2.evidence.claim import ACCURACY, PASS, Cell, ClaimEvaluation
from rstar2.files import write_file
from rstar2.types import Estimate

ABOUT = (
    *("mean_turns", "tool_use", "calls", "tool_errors", "failing_calls_in_correct"),
    *("valid_calls", "truncated"),
)
"""Figures of `evaluate.scores.BenchmarkScore` that are recorded besides the answers."""


@dataclass(frozen=True, slots=True)
class CellEvaluation:
    """The file of an evaluation."""

    claim: str
    arm: str
    seed: int
    name: str
    recipe: str
    """Fingerprint of the settings of the cell."""
    weights: str
    """Fingerprint of the evaluated weights."""
    benchmark: str
    problems: str
    """Digest of the problems."""
    samples: int
    temperature: float
    max_length: int
    max_turns: int
    correct: str
    """Right answers of each problem: one digit per problem, in the order of the benchmark."""
    about: Mapping[str, float | None]
    made: Mapping[str, Any]

    @property
    def cell(self) -> Cell:
        return Cell(self.claim, self.arm, self.seed)

    def estimate(self, figure: str) -> Estimate:
        """`accuracy` or `pass@k` with its 95% interval over problems."""
        counts = [int(digit) for digit in self.correct]
        if figure == ACCURACY:
            return estimate([count / self.samples for count in counts])
        tries = int(figure.removeprefix(PASS))
        return estimate([at_least_one(self.samples, count, tries) for count in counts])


def eval_command(
    evaluation: ClaimEvaluation, config: EvaluationConfig, recipe: Path, model: Path, out: Path
) -> list[str]:
    """The arguments of `rstar2` that make an evaluation, or resume it."""
    how = ["--greedy"]
    if evaluation.samples:
        how = ["--samples", str(evaluation.samples), "--temperature", str(config.temperature)]
    if evaluation.count is not None:
        how += ["--count", str(evaluation.count)]
    lengths = ["--max-length", str(config.max_length), "--max-turns", str(config.max_turns)]
    places = ["--recipe", str(recipe), "--out", str(out)]
    return ["eval", "run", str(model), "--on", evaluation.benchmark, *how, *lengths, *places]


def fits(asked: ClaimEvaluation, made: CellEvaluation) -> bool:
    """Whether a recorded evaluation has the samples and problems that the claim asks for."""
    counts = len(made.correct) if asked.count is None else asked.count
    return made.samples == max(1, asked.samples) and len(made.correct) == counts


def read_evaluated(
    out: Path, cell: Cell, name: str, recipe: str, made: Mapping[str, Any]
) -> CellEvaluation:
    """What a complete evaluation directory says about a cell."""
    results = read_results(out)
    settings = results.settings
    ((benchmark, score),) = results.scores.items()
    return CellEvaluation(
        claim=cell.claim,
        arm=cell.arm,
        seed=cell.seed,
        name=name,
        recipe=recipe,
        weights=settings.weights,
        benchmark=benchmark,
        problems=settings.benchmarks[benchmark],
        samples=settings.samples,
        temperature=settings.temperature,
        max_length=settings.max_length,
        max_turns=settings.max_turns,
        correct="".join(str(problem.correct) for problem in score.problems),
        about={"tokens": score.tokens.mean, **{key: getattr(score, key) for key in ABOUT}},
        made=made,
    )


def write_evaluation(results: Path, evaluation: CellEvaluation) -> Path:
    """Write the file of an evaluation beside that of its cell."""
    path = results / evaluation.claim / f"{evaluation.cell.name}.{evaluation.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(evaluation), indent=1) + "\n")
    return path


def read_evaluations_of(results: Path, cell: Cell) -> dict[str, CellEvaluation]:
    """The recorded evaluations of a cell, by name."""
    recorded = {}
    for path in sorted((results / cell.claim).glob(f"{cell.name}.*.json")):
        try:
            evaluation = CellEvaluation(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not an evaluation of a cell: {error}; delete it") from error
        recorded[evaluation.name] = evaluation
    return recorded

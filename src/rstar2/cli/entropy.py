"""`rstar2 entropy`: the entropy of sampled tokens by class.

rstar2 entropy runs/tiny-seed0                     after SFT and each stage, and over training
rstar2 entropy runs/roc-seed0 runs/grpo-seed0      the same, side by side
rstar2 entropy MODEL --problems arithmetic         a model directory: rollouts are sampled first
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.waiting import waiting
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.agent.detokenizer import Detokenizer
    from rstar2.entropy.classes import Token
    from rstar2.entropy.report import HeatMap
    from rstar2.entropy.sources import ExactEntropies, LabelledRollouts
    from rstar2.entropy.table import Analysis, Point
    from rstar2.types import Trajectory

NOT_WRITABLE = "cannot be written: choose another directory with --out"
HEATS = 4
"""Rollouts of each sample that the page shows."""


def entropy(
    targets: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|MODEL...", help="Run directories, or model directories with --problems."
        ),
    ],
    problems: Annotated[
        str | None,
        typer.Option(help="Sample rollouts for these problems: arithmetic, gsm8k or a file."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of rollouts per table.")] = 64,
    points: Annotated[
        int, typer.Option(min=0, help="Number of steps of each stage to analyse.")
    ] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute entropies from the exported weights.")
    ] = False,
    max_length: Annotated[
        int, typer.Option(min=16, help="Maximum length of sampled rollouts in tokens.")
    ] = 4096,
    max_turns: Annotated[int, typer.Option(min=1, help="Maximum turns of sampled rollouts.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed that chooses rollouts.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory for entropy.html and entropy.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Analyse the entropy of sampled tokens: forking tokens, reflection tokens, code.

    Prints tables and writes a page with tables, curves, n-grams and coloured rollouts.
    """
    import msgspec
    from rich.console import Console

    from rstar2.entropy.report import write_page
    from rstar2.entropy.show import entropy_tables

    folder = out or _folder(targets)
    _check_writable(folder)
    analyses: list[Analysis] = []
    course: list[Point] = []
    heats: list[HeatMap] = []
    for target in targets:
        prefix = f"{target.resolve().name} " if len(targets) > 1 else ""
        analysed = EntropyTarget(target, prefix, count, seed)
        with waiting(f"{'sampling' if problems else 'reading'} rollouts of {target}"):
            if problems is not None:
                analyses += analysed.sampled(problems, max_length, max_turns)
            else:
                analyses += analysed.recorded(exact)
                if len(targets) == 1 and points:
                    course = analysed.course(points)
        heats += analysed.heats
    document = msgspec.json.format(
        msgspec.json.encode({"samples": analyses, "course": course}), indent=1
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "entropy.json").write_bytes(document)
        write_page(folder / "entropy.html", analyses, course, heats)
    except OSError as error:
        raise UserError(f"{folder} {NOT_WRITABLE} ({error.strerror})") from error
    if json:
        typer.echo(document.decode())
    else:
        Console(highlight=False, markup=False).print(entropy_tables(analyses, course))
    typer.echo(f"written to {folder}: entropy.html, entropy.json", err=True)


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written before the analysis, which may take minutes."""
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{folder} {NOT_WRITABLE}")


def _folder(targets: list[Path]) -> Path:
    """Inside the run directory; in the current directory for models and comparisons."""
    if len(targets) == 1 and (targets[0] / "recipe.yaml").is_file():
        return targets[0] / "entropy"
    return Path("entropy")


class EntropyTarget:
    """One run or model to analyse."""

    def __init__(self, target: Path, prefix: str, count: int, seed: int) -> None:
        self.target, self.prefix, self.count, self.seed = target, prefix, count, seed
        self.heats: list[HeatMap] = []

    @property
    def is_run(self) -> bool:
        return (self.target / "recipe.yaml").is_file()

    def recorded(self, exact: bool) -> list[Analysis]:
        """The recorded rollouts on held-out problems, after SFT and each stage."""
        from rstar2.entropy.classes import recorded_entropies
        from rstar2.entropy.sources import evaluations, exact_entropies

        if not self.is_run:
            raise UserError(
                f"{self.target} is not a run: choose problems for the model with --problems"
            )
        analyses = []
        for sample in evaluations(self.target, self.count, self.seed):
            known = all(recorded_entropies(t) is not None for t in sample.trajectories)
            weights = self.target / "exports" / sample.label
            again = exact or not known
            if again and not weights.is_dir():
                raise UserError(
                    f"{self.target}: no entropies on record after {sample.label}, and no weights "
                    f"to compute them ({weights})"
                )
            analyses.append(self._analyse(sample, exact_entropies(weights) if again else None))
        if not analyses:
            raise UserError(f"{self.target} has no sampled evaluation on record yet")
        return analyses

    def course(self, points: int) -> list[Point]:
        """Rollouts of RL steps whose entropies are recorded."""
        from rstar2.entropy.classes import recorded_entropies
        from rstar2.entropy.sources import classed, course
        from rstar2.entropy.table import Point, analyse

        return [
            Point(stage, step, analyse(sample.label, classed(sample, self._pieces(), None)))
            for stage, step, sample in course(self.target, self.count, points, self.seed)
            if all(recorded_entropies(t) is not None for t in sample.trajectories)
        ]

    def sampled(self, problems: str, max_length: int, max_turns: int) -> list[Analysis]:
        """Rollouts of a model, sampled now by the agent loop, fleet and grader of training."""
        from rstar2.cli.model_directory import longest, model_directory
        from rstar2.entropy.classes import recorded_entropies
        from rstar2.entropy.sources import LabelledRollouts, exact_entropies

        directory = model_directory(self.target)
        length = longest(directory, max_length)
        rollouts = asyncio.run(
            _sample(directory, problems, self.count, length, max_turns, self.seed)
        )
        kept = [(t, prompt) for t, prompt in rollouts if t.failure is None]
        if not kept:
            raise UserError(f"{directory}: every rollout was lost to infrastructure failures")
        trajectories, prompts = zip(*kept, strict=True)
        sample = LabelledRollouts(directory.name, trajectories, prompts)
        known = all(recorded_entropies(t) is not None for t in sample.trajectories)
        return [self._analyse(sample, None if known else exact_entropies(directory), directory)]

    def _analyse(
        self, sample: LabelledRollouts, exact: ExactEntropies | None, directory: Path | None = None
    ) -> Analysis:
        from rstar2.entropy.sources import classed
        from rstar2.entropy.table import analyse

        tokens = classed(sample, self._pieces(directory), exact)
        label = f"{self.prefix}{sample.label}"
        self.heats += _heats(label, sample, tokens[:HEATS])
        return analyse(label, tokens)

    def _pieces(self, directory: Path | None = None) -> Detokenizer:
        from rstar2.agent.detokenizer import Detokenizer, find_tokenizer
        from rstar2.record import read_recipe

        if directory is not None:
            return Detokenizer(directory / "tokenizer.json")
        return Detokenizer(find_tokenizer(self.target, read_recipe(self.target)))


def _heats(label: str, sample: LabelledRollouts, tokens: list[list[Token]]) -> list[HeatMap]:
    """Heat maps of the first rollouts of a sample, one per list of tokens, on one scale."""
    from rstar2.entropy.report import HeatMap, pieces
    from rstar2.tool_text import tool_text

    scale = max((t.entropy for part in tokens for t in part), default=1.0)
    return [
        HeatMap(
            sample=label,
            id=trajectory.id,
            prompt=prompt,
            correct=trajectory.correct,
            turns=pieces(part, len(trajectory.all_turns), scale),
            tools=tuple(
                "\n".join(tool_text(result) for result in turn.results)
                for turn in trajectory.all_turns
            ),
        )
        for trajectory, prompt, part in zip(
            sample.trajectories, sample.prompts, tokens, strict=False
        )
    ]


async def _sample(
    directory: Path, problems: str, count: int, max_length: int, max_turns: int, seed: int
) -> list[tuple[Trajectory, str]]:
    """One rollout for each of the first `count` problems, at temperature 1, and its prompt."""
    from rstar2.agent.loop import RolloutSpec
    from rstar2.cli.eval import base_recipe
    from rstar2.config import SamplingConfig
    from rstar2.evaluate.answerers import Task, load_task, open_fleet
    from rstar2.evaluate.benchmarks import load_benchmark
    from rstar2.evaluate.run import groups_at_once
    from rstar2.evaluate.sweep import answer_all
    from rstar2.pipeline.runtime import scheduling
    from rstar2.seeds import derive_seed

    benchmark = load_benchmark(problems, count)
    recipe = base_recipe(None, directory, [], None)
    model = recipe.model.model_copy(update={"max_length": max_length})
    engine = recipe.engine.model_copy(
        update={"kv_tokens": max(recipe.engine.kv_tokens, 2 * max_length)}
    )
    recipe = recipe.model_copy(update={"model": model, "engine": engine})
    spec = RolloutSpec(SamplingConfig(temperature=1.0), max_length, max_turns)
    template, environment = load_task(directory, None, recipe.environment)
    fleet = open_fleet(recipe, scheduling(recipe), directory, template, environment)
    tasks = [
        Task("entropy", problem, f"entropy/1/{n}", 0, derive_seed(seed, "entropy", n))
        for n, problem in enumerate(benchmark.problems)
    ]
    async with fleet as answerer:
        answers = await answer_all(answerer, tasks, spec, groups_at_once(recipe, 1))
    return [(answer, task.problem.prompt) for answer, task in zip(answers, tasks, strict=True)]

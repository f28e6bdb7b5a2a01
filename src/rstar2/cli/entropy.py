"""`rstar2 entropy`: where a policy is uncertain, by what its tokens were sampled for.

rstar2 entropy runs/tiny-seed0                     after SFT and each stage, and over training
rstar2 entropy runs/roc-seed0 runs/grpo-seed0      the same, side by side
rstar2 entropy MODEL --problems arithmetic         a model directory: rollouts are drawn first
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.agent.detokenizer import Detokenizer
    from rstar2.entropy.classes import Token
    from rstar2.entropy.page import Heat
    from rstar2.entropy.sources import Exact, Sample
    from rstar2.entropy.table import Analysis, Point
    from rstar2.types import Trajectory

HEATS = 4
"""Rollouts of each sample that the page shows."""


def entropy(
    targets: Annotated[list[Path], typer.Argument(metavar="RUN|MODEL...", help="what to analyse")],
    problems: Annotated[
        str | None, typer.Option(help="draw rollouts of these problems: arithmetic, gsm8k, FILE")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="rollouts per table")] = 64,
    points: Annotated[int, typer.Option(min=0, help="steps of each stage to look at")] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="compute entropies again by the exported weights")
    ] = False,
    max_length: Annotated[int, typer.Option(min=16, help="of rollouts that are drawn")] = 4096,
    max_turns: Annotated[int, typer.Option(min=1)] = 10,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[
        Path | None, typer.Option(help="directory of entropy.html and entropy.json")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Entropy of sampled tokens: forking, reflection, code. Tables, n-grams, a heat-mapped page."""
    import msgspec

    from rstar2.entropy.page import write_page
    from rstar2.entropy.show import tables

    analyses: list[Analysis] = []
    course: list[Point] = []
    heats: list[Heat] = []
    for target in targets:
        prefix = f"{target.resolve().name} " if len(targets) > 1 else ""
        job = _Job(target, prefix, count, seed)
        if problems is not None:
            found = job.drawn(problems, max_length, max_turns)
        else:
            found = job.recorded(exact)
            if len(targets) == 1 and points:
                course = job.course(points)
        analyses += found
        heats += job.heats
    folder = out or _folder(targets)
    folder.mkdir(parents=True, exist_ok=True)
    document = msgspec.json.format(
        msgspec.json.encode({"samples": analyses, "course": course}), indent=1
    )
    (folder / "entropy.json").write_bytes(document)
    write_page(folder / "entropy.html", analyses, course, heats)
    typer.echo(document.decode() if json else tables(analyses, course))
    typer.echo(f"written to {folder}: entropy.html, entropy.json", err=True)


def _folder(targets: list[Path]) -> Path:
    """Beside a run's other files; elsewhere for models and comparisons."""
    if len(targets) == 1 and (targets[0] / "recipe.yaml").is_file():
        return targets[0] / "entropy"
    return Path("entropy")


class _Job:
    """One run or model."""

    def __init__(self, target: Path, prefix: str, count: int, seed: int) -> None:
        self.target, self.prefix, self.count, self.seed = target, prefix, count, seed
        self.heats: list[Heat] = []

    @property
    def is_run(self) -> bool:
        return (self.target / "recipe.yaml").is_file()

    def recorded(self, exact: bool) -> list[Analysis]:
        """The held-out answers that a run has on record, after SFT and each stage."""
        from rstar2.entropy.exact import exact_entropies
        from rstar2.entropy.sources import evaluations, recorded

        if not self.is_run:
            raise UserError(f"{self.target} is no run: say which --problems its model is to answer")
        found = []
        for sample in evaluations(self.target, self.count, self.seed):
            known = all(recorded(t) is not None for t in sample.trajectories)
            weights = self.target / "exports" / sample.label
            again = exact or not known
            if again and not weights.is_dir():
                raise UserError(
                    f"{self.target}: no entropies on record after {sample.label}, and no weights "
                    f"to compute them ({weights})"
                )
            found.append(self._analyse(sample, exact_entropies(weights) if again else None))
        if not found:
            raise UserError(f"{self.target} has no sampled evaluation on record yet")
        return found

    def course(self, points: int) -> list[Point]:
        """Rollouts of training, where their entropies are on record."""
        from rstar2.entropy.sources import classed, course, recorded
        from rstar2.entropy.table import Point, analyse

        return [
            Point(stage, step, analyse(sample.label, classed(sample, self._pieces(), None)))
            for stage, step, sample in course(self.target, self.count, points, self.seed)
            if all(recorded(t) is not None for t in sample.trajectories)
        ]

    def drawn(self, problems: str, max_length: int, max_turns: int) -> list[Analysis]:
        """Rollouts of a model, drawn now through the loop, fleet and grader of training."""
        from rstar2.cli.chat import longest, model_directory
        from rstar2.entropy.exact import exact_entropies
        from rstar2.entropy.sources import Sample, recorded

        directory = model_directory(self.target)
        length = longest(directory, max_length)
        drawn = asyncio.run(_draw(directory, problems, self.count, length, max_turns, self.seed))
        kept = [(t, prompt) for t, prompt in drawn if t.failure is None]
        if not kept:
            raise UserError(f"{directory}: every rollout was lost to infrastructure")
        trajectories, prompts = zip(*kept, strict=True)
        sample = Sample(directory.name, trajectories, prompts)
        known = all(recorded(t) is not None for t in sample.trajectories)
        return [self._analyse(sample, None if known else exact_entropies(directory), directory)]

    def _analyse(
        self, sample: Sample, exact: Exact | None, directory: Path | None = None
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


def _heats(label: str, sample: Sample, tokens: list[list[Token]]) -> list[Heat]:
    """The first rollouts of a sample, as many as there are tokens of, on one scale."""
    from rstar2.agent.prompts import tool_text
    from rstar2.entropy.page import Heat, pieces

    scale = max((t.entropy for part in tokens for t in part), default=1.0)
    return [
        Heat(
            sample=label,
            id=trajectory.id,
            prompt=prompt,
            correct=trajectory.correct,
            turns=pieces(part, len(trajectory.turns), scale),
            tools=tuple(
                "\n".join(tool_text(result) for result in turn.results) for turn in trajectory.turns
            ),
        )
        for trajectory, prompt, part in zip(
            sample.trajectories, sample.prompts, tokens, strict=False
        )
    ]


async def _draw(
    directory: Path, problems: str, count: int, max_length: int, max_turns: int, seed: int
) -> list[tuple[Trajectory, str]]:
    """Answers to the first `count` problems, one each, at temperature 1; with the prompts."""
    from rstar2.agent.loop import RolloutSpec
    from rstar2.cli.eval import base_recipe
    from rstar2.config import SamplingConfig
    from rstar2.evaluate.answerers import Task, load_template, open_fleet
    from rstar2.evaluate.benchmarks import load_benchmark
    from rstar2.pipeline.runtime import scheduling
    from rstar2.rollout.groups import together
    from rstar2.seeds import derive_seed

    benchmark = load_benchmark(problems, count)
    recipe = base_recipe(None, directory, [], None)
    model = recipe.model.model_copy(update={"max_length": max_length})
    engine = recipe.engine.model_copy(
        update={"kv_tokens": max(recipe.engine.kv_tokens, 2 * max_length)}
    )
    recipe = recipe.model_copy(update={"model": model, "engine": engine})
    spec = RolloutSpec(SamplingConfig(temperature=1.0), max_length, max_turns)
    template = load_template(directory, None)
    async with open_fleet(recipe, scheduling(recipe), directory, template) as answerer:
        answers = await together(
            answerer.answer(
                Task("entropy", problem, f"entropy/1/{n}", 0, derive_seed(seed, "entropy", n)),
                spec,
            )
            for n, problem in enumerate(benchmark.problems)
        )
    prompts = [problem.prompt for problem in benchmark.problems]
    return [(trajectory, p) for (trajectory, _), p in zip(answers, prompts, strict=True)]

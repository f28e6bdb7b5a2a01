"""`rstar2 eval`: score a checkpoint, a run or an endpoint; compare two evaluations.

    rstar2 eval runs/tiny-seed0 --preset run          reproduces the run's own evaluation exactly
    rstar2 eval DIR --on aime24 --preset paper        the paper's settings
    rstar2 eval DIR --on math500=math500.jsonl --samples 4 --engine vllm
    rstar2 eval --url http://host:8000/v1 --on gsm8k  any OpenAI-compatible endpoint
    rstar2 eval evals/NAME --rescore                  grade stored answers again
    rstar2 eval compare evals/A evals/B

Run the same command again to resume an evaluation that was stopped or killed.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rstar2.cli.eval_job import EvalJob, EvalOptions, conclude, load_sets, rescored, tables
from rstar2.cli.model_directory import longest, model_directory, only_in_python
from rstar2.config import Recipe, load_recipe
from rstar2.errors import UserError
from rstar2.plugins import make_importable
from rstar2.problems.load import ARITHMETIC
from rstar2.types import encode

if TYPE_CHECKING:
    from rstar2.evaluate.benchmarks import Benchmark

PAPER_SETS = ("aime24", "aime25", "hmmt25", "math500")
RUN = "run"


class DefaultToRun(TyperGroup):
    """`rstar2 eval MODEL` is `rstar2 eval run MODEL`; `compare` is the other command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultToRun, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Score a checkpoint, a run or an endpoint on benchmarks.

    `rstar2 eval MODEL` is short for `rstar2 eval run MODEL`; `rstar2 eval run --help` lists its
    options.
    """


PAPER = EvalOptions(samples=16, temperature=0.6, max_length=30_720, max_turns=30)


Model = Annotated[
    Path | None,
    typer.Argument(
        help="A transformers model directory, an rstar2 run directory, or with --rescore the "
        "directory of an evaluation."
    ),
]
Benchmarks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="BENCHMARK",
        help="Benchmark to score: aime24, aime25, hmmt25, math500, gsm8k, gpqa, arithmetic, "
        "NAME=FILE or FILE. Can be repeated.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Settings to start from: paper, or run (those of the run's own recipe)."),
]
Greedy = Annotated[
    bool, typer.Option("--greedy", help="Draw one answer per problem at temperature 0.")
]
Samples = Annotated[
    int | None, typer.Option("--samples", "-k", min=1, help="Number of answers per problem.")
]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")]
MaxLength = Annotated[
    int | None, typer.Option(min=16, help="Maximum number of tokens of prompt and completion.")
]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Maximum number of assistant turns.")]
Count = Annotated[int | None, typer.Option(min=1, help="Use only the first COUNT problems.")]
Seed = Annotated[int | None, typer.Option(help="Random seed for sampling.")]
EngineKind = Annotated[str | None, typer.Option(help="Inference engine: embedded or vllm.")]
Url = Annotated[str | None, typer.Option(help="Score this OpenAI-compatible endpoint.")]
ServedModel = Annotated[
    str | None, typer.Option(help="Name of the model at the endpoint, with --url.")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the endpoint.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Override a recipe setting. Can be repeated."
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="Recipe whose engines, limits and environment to use. The default is that of the run "
        "that made the model.",
    ),
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Number of rollouts in flight.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Directory of the answers and results. The default is evals/NAME."),
]
Rescore = Annotated[
    bool, typer.Option("--rescore", help="Grade the stored answers again and generate none.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


@app.command()
def run(
    model: Model = None,
    on: Benchmarks = None,
    preset: Preset = None,
    greedy: Greedy = False,
    samples: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_length: MaxLength = None,
    max_turns: MaxTurns = None,
    count: Count = None,
    seed: Seed = None,
    engine: EngineKind = None,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    recipe: RecipeName = None,
    set_: Overrides = None,
    concurrency: Concurrency = None,
    out: Out = None,
    rescore: Rescore = False,
    json: AsJson = False,
) -> None:
    """Score a checkpoint, a run or an endpoint. Run the same command again to resume."""
    if (model is None) == (url is None):
        raise UserError("give either a directory (model, run or evaluation) or --url")
    if rescore:
        if model is None:
            raise UserError("--rescore takes the directory of an evaluation")
        conclude(rescored(model, on or []), json=json)
        return
    directory = model_directory(model) if model is not None else None
    settings = base_recipe(model, directory, set_ or [], engine, recipe)
    asked, sets = resolve(preset, settings, directory, on or [], greedy=greedy)
    given: dict[str, Any] = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_length": max_length,
        "max_turns": max_turns,
        "seed": seed,
    }
    asked = replace(asked, **{name: value for name, value in given.items() if value is not None})
    if directory is not None:
        asked = replace(asked, max_length=longest(directory, asked.max_length))
    loaded: list[Benchmark] | None = None
    if preset == RUN and not on:
        loaded = recorded_set(directory, asked, count) or own_set(settings, count)
    if preset == RUN:
        count = count or settings.evaluation.count
    job = EvalJob(
        settings, asked, loaded or load_sets(sets, count), directory, url, served_model, api_key
    )
    path = (out or Path("evals") / job.label).absolute()
    conclude(job.execute(path, concurrency), json=json)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Directory of the first evaluation (A).")],
    second: Annotated[Path, typer.Argument(help="Directory of the second evaluation (B).")],
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two evaluations with a paired test over problems."""
    from rstar2.evaluate.compare import compare as compare_results
    from rstar2.evaluate.show import compare_table
    from rstar2.evaluate.store import read_results

    one, other = read_results(first), read_results(second)
    rows = compare_results(one, other)
    if json:
        typer.echo(encode(rows).decode())
        return
    tables().print(compare_table(one, other, rows))


# --------------------------------------------------------------------------- options


def base_recipe(
    model: Path | None,
    directory: Path | None,
    overrides: list[str],
    engine: str | None,
    named: str | None = None,
) -> Recipe:
    """A recipe by name, that of the run that made the checkpoint, or the defaults; with overrides
    applied."""
    places = [p / "recipe.yaml" for p in (model, directory and directory.parent.parent) if p]
    recipe_file = next((place for place in places if place.is_file()), None)
    if engine is not None:
        overrides = [*overrides, f"engine.kind={engine}"]
    if named is not None:
        given = load_recipe(named, overrides).recipe
        make_importable(given.environment.folder)
        return given
    if recipe_file is not None:
        recipe = load_recipe(recipe_file, overrides).recipe
        check_by_name(recipe, recipe_file.parent)
        make_importable(recipe.environment.folder)
        return recipe
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "eval.yaml"
        plain.write_text("name: eval\nsft: null\n")
        return load_recipe(plain, overrides).recipe


def check_by_name(recipe: Recipe, run: Path) -> None:
    """Refuse a run whose environment is a Python object: a command cannot make it again."""
    use = recipe.environment.use
    if only_in_python(recipe, run):
        raise UserError(
            f"{run} was trained with rstar2.train and an environment {use!r} that exists only in "
            f"Python: evaluate it there with rstar2.evaluate_model({str(run)!r}, environment), or "
            "name a module that has it with --set environment.use=module:attribute"
        )


def own_set(recipe: Recipe, count: int | None) -> list[Benchmark] | None:
    """The held-out problems of the run's environment; None for files and the embedded task."""
    from rstar2.environments.load import PYTHON_MATH, load_environment, recipe_problems
    from rstar2.evaluate.benchmarks import Benchmark

    if recipe.environment.use == PYTHON_MATH or recipe.evaluation.problems is not None:
        return None
    environment = load_environment(recipe.environment, recipe.template)
    problems = recipe_problems(recipe, environment, "heldout")
    return [Benchmark("heldout", recipe.environment.use, problems[:count])]


def resolve(
    preset: str | None, recipe: Recipe, directory: Path | None, on: list[str], *, greedy: bool
) -> tuple[EvalOptions, list[str]]:
    """The settings and benchmarks of a preset, before the options override them."""
    asked, sets = EvalOptions(), on
    if preset == "paper":
        asked, sets = PAPER, on or list(PAPER_SETS)
    elif preset == RUN:
        if directory is None or recipe.name == "eval":
            raise UserError("--preset run takes a run directory, or an export inside one")
        from rstar2.record import evaluation_stage

        config = recipe.evaluation
        asked = EvalOptions(
            samples=config.samples,
            temperature=config.temperature,
            max_length=config.max_length,
            max_turns=config.max_turns,
            seed=recipe.seed,
            stream=evaluation_stage(directory.name, "greedy" if greedy else "sampled"),
        )
        sets = on or [config.problems or ARITHMETIC]
    elif preset is not None:
        raise UserError(f"--preset {preset!r}: use paper or run")
    if greedy:
        asked = replace(asked, samples=1, temperature=0.0)
    if not sets:
        raise UserError(
            "name a benchmark with --on, or use --preset paper for the benchmarks of the paper"
        )
    return asked, sets


def recorded_set(
    directory: Path | None, asked: EvalOptions, count: int | None
) -> list[Benchmark] | None:
    """The evaluation problems that a run recorded, or None if it recorded none."""
    from rstar2.evaluate.benchmarks import Benchmark
    from rstar2.record import read_groups

    assert directory is not None
    run = directory.parent.parent
    problems = tuple(line.group.problem for line in read_groups(run, asked.stream))
    return [Benchmark("heldout", str(run), problems[:count])] if problems else None

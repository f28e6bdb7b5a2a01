"""`rstar2 eval`: score a checkpoint, a run or an endpoint on benchmarks; compare two scores.

    rstar2 eval runs/tiny-seed0 --preset run          as the run's own evaluation, number for number
    rstar2 eval DIR --on aime24 --preset paper        the paper's settings
    rstar2 eval DIR --on math500=math500.jsonl --samples 4 --engine vllm
    rstar2 eval --url http://host:8000/v1 --on gsm8k  any OpenAI-compatible endpoint
    rstar2 eval evals/NAME --rescore                  grade stored answers again
    rstar2 eval compare evals/A evals/B

The same command goes on where it was stopped, by whatever means.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from rstar2.cli.chat import longest, model_directory
from rstar2.config import Recipe, SamplingConfig, load_recipe
from rstar2.errors import UserError
from rstar2.types import encode

if TYPE_CHECKING:
    from rstar2.evaluate.benchmarks import Benchmark
    from rstar2.evaluate.store import EvalDirectory, Settings
    from rstar2.evaluate.sweep import Answerer

T = TypeVar("T")

PAPER_SETS = ("aime24", "aime25", "hmmt25", "math500")
DEFAULT_LENGTH = 8192
ENDPOINT_CONCURRENCY = 32
RUN = "run"

progress = Console(stderr=True, highlight=False, soft_wrap=True)
WIDTH = 150
"""Columns of a table that goes to a file or a pipe."""


class DefaultToRun(TyperGroup):
    """`rstar2 eval MODEL` is `rstar2 eval run MODEL`; `compare` is the other command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultToRun, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Score a checkpoint, a run or an endpoint on benchmarks (see `rstar2 eval run --help`)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How answers are drawn: preset first, options over it."""

    samples: int = 1
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    max_length: int = DEFAULT_LENGTH
    max_turns: int = 30
    seed: int = 0
    stream: str = ""


PAPER = Asked(samples=16, temperature=0.6, max_length=30_720, max_turns=30)


@app.command()
def run(
    model: Annotated[
        Path | None,
        typer.Argument(help="a transformers directory, a run, or with --rescore an evaluation"),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="aime24, aime25, hmmt25, math500, gsm8k, gpqa, arithmetic, NAME=FILE or FILE"
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="paper, or run (as the run's recipe evaluates)")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="one answer at temperature 0")] = False,
    samples: Annotated[int | None, typer.Option("--samples", "-k", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_length: Annotated[int | None, typer.Option(min=16, help="prompt and completion")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1)] = None,
    count: Annotated[int | None, typer.Option(min=1, help="only the first problems")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    engine: Annotated[str | None, typer.Option(help="embedded or vllm")] = None,
    url: Annotated[str | None, typer.Option(help="an OpenAI-compatible endpoint")] = None,
    served_model: Annotated[str | None, typer.Option(help="which of the endpoint's")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="a setting of a recipe"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="rollouts at a time")] = None,
    out: Annotated[Path | None, typer.Option(help="directory of this evaluation")] = None,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="grade stored answers again, generate none")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Score a checkpoint, a run or an endpoint. Goes on where it was stopped."""
    if (model is None) == (url is None):
        raise UserError("give a model directory, a run or an evaluation, or --url, and only one")
    if rescore:
        if model is None:
            raise UserError("--rescore takes the directory of an evaluation")
        conclude(rescored(model, on or []), json=json)
        return
    directory = model_directory(model) if model is not None else None
    recipe = base_recipe(model, directory, set_ or [], engine)
    asked, sets = resolve(preset, recipe, directory, on or [], greedy=greedy)
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
    loaded = recorded_set(directory, asked, count) if preset == RUN and not on else None
    if preset == RUN:
        count = count or recipe.evaluation.count
    job = Job(
        recipe, asked, loaded or load_sets(sets, count), directory, url, served_model, api_key
    )
    path = (out or Path("evals") / job.label).absolute()
    conclude(job.execute(path, concurrency), json=json)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="an evaluation (A)")],
    second: Annotated[Path, typer.Argument(help="another one (B)")],
    json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Compare two evaluations of the same problems, by a paired test over problems."""
    from rstar2.evaluate.compare import compare as compare_results
    from rstar2.evaluate.show import compare_table
    from rstar2.evaluate.store import read_results

    one, other = read_results(first), read_results(second)
    rows = compare_results(one, other)
    if json:
        typer.echo(encode(rows).decode())
        return
    tables().print(compare_table(one, other, rows))


# --------------------------------------------------------------------------- what was asked


def base_recipe(
    model: Path | None, directory: Path | None, overrides: list[str], engine: str | None
) -> Recipe:
    """The recipe of the run that a checkpoint is from, else the defaults; with overrides."""
    places = [p / "recipe.yaml" for p in (model, directory and directory.parent.parent) if p]
    found = next((place for place in places if place.is_file()), None)
    if engine is not None:
        overrides = [*overrides, f"engine.kind={engine}"]
    if found is not None:
        return load_recipe(found, overrides).recipe
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "eval.yaml"
        plain.write_text("name: eval\nsft: null\n")
        return load_recipe(plain, overrides).recipe


def resolve(
    preset: str | None, recipe: Recipe, directory: Path | None, on: list[str], *, greedy: bool
) -> tuple[Asked, list[str]]:
    """Settings and sets of a preset, before options change them."""
    asked, sets = Asked(), on
    if preset == "paper":
        asked, sets = PAPER, on or list(PAPER_SETS)
    elif preset == RUN:
        if directory is None or recipe.name == "eval":
            raise UserError("--preset run takes a run directory, or an export inside one")
        from rstar2.record import evaluation_stage

        config = recipe.evaluation
        asked = Asked(
            samples=config.samples,
            temperature=config.temperature,
            max_length=config.max_length,
            max_turns=config.max_turns,
            seed=recipe.seed,
            stream=evaluation_stage(directory.name, "greedy" if greedy else "sampled"),
        )
        sets = on or [config.problems]
    elif preset is not None:
        raise UserError(f"--preset {preset!r}: paper or run")
    if greedy:
        asked = replace(asked, samples=1, temperature=0.0)
    if not sets:
        raise UserError("--on says which benchmarks (or --preset paper takes the paper's)")
    return asked, sets


def recorded_set(directory: Path | None, asked: Asked, count: int | None) -> list[Benchmark] | None:
    """The problems that a run was itself evaluated on, as it recorded them; None if it did not."""
    from rstar2.evaluate.benchmarks import Benchmark
    from rstar2.record import read_groups

    assert directory is not None
    run = directory.parent.parent
    problems = tuple(line.group.problem for line in read_groups(run, asked.stream))
    return [Benchmark("heldout", str(run), problems[:count])] if problems else None


def load_sets(sets: list[str], count: int | None) -> list[Benchmark]:
    """Read all benchmarks, before anything starts."""
    from rstar2.evaluate.benchmarks import load_benchmark

    loaded = [load_benchmark(text, count) for text in sets]
    names = [benchmark.name for benchmark in loaded]
    if len(set(names)) != len(names):
        raise UserError(f"--on: {', '.join(names)}: each needs its own name (NAME=FILE)")
    return loaded


@dataclass(frozen=True, slots=True)
class Job:
    """One evaluation: what answers which problems, and how."""

    recipe: Recipe
    asked: Asked
    benchmarks: list[Benchmark]
    directory: Path | None
    url: str | None
    served_model: str | None
    api_key: str | None

    @property
    def model_name(self) -> str:
        """What people call the model: run/export, directory, or the endpoint's name for it."""
        if self.directory is None:
            return self.served_model or str(self.url)
        parent = self.directory.parent
        if parent.name == "exports":
            return f"{parent.parent.name}/{self.directory.name}"
        return self.directory.name

    @property
    def label(self) -> str:
        """A directory's name that tells evaluations apart."""
        words = [self.model_name, *(b.name for b in self.benchmarks), f"k{self.asked.samples}"]
        text = "-".join([*words, *(["greedy"] if self.asked.temperature == 0 else [])])
        return "".join(c if c.isalnum() or c in "._-" else "-" for c in text).strip("-")

    def settings(self, template: dict[str, Any]) -> Settings:
        """What every answer depends on."""
        from rstar2.evaluate.session import fingerprint
        from rstar2.evaluate.store import Settings

        agent = self.recipe.agent
        return Settings(
            model=self.model_name,
            weights=fingerprint(self.directory) if self.directory else self.model_name,
            engine=self.recipe.engine.kind if self.directory else "openai",
            benchmarks={b.name: b.digest for b in self.benchmarks},
            samples=self.asked.samples,
            temperature=self.asked.temperature,
            top_p=self.asked.top_p,
            top_k=self.asked.top_k,
            max_length=self.asked.max_length,
            max_turns=self.asked.max_turns,
            seed=self.asked.seed,
            stream=self.asked.stream,
            template=template,
            agent=agent.model_dump(include={"calls_per_turn", "invalid_calls", "response_tokens"}),
            tool=self.recipe.model_dump(mode="json")["codeenv"]["default"],
        )

    def execute(self, path: Path, concurrency: int | None) -> Path:
        """Answer what is missing, then write the results; returns the directory."""
        from rstar2.evaluate.assess import assess
        from rstar2.evaluate.store import EvalDirectory
        from rstar2.evaluate.sweep import missing

        answerer, template = self.answerer()
        settings = self.settings(template)
        with EvalDirectory.open(path, settings, self.benchmarks) as directory:
            tasks = list(missing(self.benchmarks, settings, directory))
            if tasks:
                self.sweep(directory, tasks, answerer, concurrency)
            names = [benchmark.name for benchmark in self.benchmarks]
            directory.finish(assess(path, names, settings.samples))
        return path

    def answerer(self) -> tuple[AbstractAsyncContextManager[Answerer], dict[str, Any]]:
        """What will answer (not opened yet), and the template it is asked with."""
        from rstar2.evaluate import session

        if self.directory is None:
            assert self.url is not None
            endpoint = session.Endpoint(self.url, self.served_model, self.api_key)
            opened = session.open_endpoint(self.recipe, endpoint, self.recipe.template)
            return opened, self.recipe.template.model_dump()
        from rstar2.pipeline.parts import scheduling

        engine, length = self.recipe.engine, self.asked.max_length
        recipe = self.recipe.model_copy(
            update={
                "model": self.recipe.model.model_copy(update={"max_length": length}),
                "engine": engine.model_copy(
                    update={"kv_tokens": max(engine.kv_tokens, 2 * length)}
                ),
            }
        )
        template = session.load_template(self.directory, None)
        opened = session.open_fleet(recipe, scheduling(recipe), self.directory, template)
        return opened, template.config.model_dump()

    def sweep(
        self,
        directory: EvalDirectory,
        tasks: list[Any],
        answerer: AbstractAsyncContextManager[Answerer],
        concurrency: int | None,
    ) -> None:
        """Answer the tasks with a progress bar; says what is lost, and how to go on."""
        from rstar2.evaluate.show import AnswerProgress
        from rstar2.evaluate.sweep import sweep
        from rstar2.rollout.groups import Limits

        asked, engine = self.asked, self.recipe.engine
        sampling = SamplingConfig(
            temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k
        )
        limits = Limits(sampling, asked.max_length, asked.max_turns)
        engines = max(engine.count, len(engine.urls))
        at_once = ENDPOINT_CONCURRENCY if self.directory is None else engine.max_sequences * engines
        total = sum(len(b.problems) for b in self.benchmarks) * asked.samples
        with AnswerProgress(progress, total, total - len(tasks)) as shown:

            async def answer() -> dict[str, int]:
                async with answerer as opened:
                    return await sweep(
                        tasks,
                        opened,
                        directory,
                        limits,
                        concurrency=concurrency or at_once,
                        on_answer=shown.answered,
                    )

            lost = supervised(answer)
        if lost:
            names = ", ".join(f"{name} x{n}" for name, n in lost.items())
            progress.print(f"[yellow]lost to infrastructure: {names}; the same command tries again")


def supervised(work: Callable[[], Awaitable[T]]) -> T:
    """Run until done; a signal stops it in order, and says how to go on."""
    stopped: list[signal.Signals] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await work()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if not stopped:
            raise
        again = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        progress.print(f"stopped. To go on: [bold]{again}[/]")
        raise typer.Exit(128 + stopped[0]) from None


# --------------------------------------------------------------------------- results


def rescored(path: Path, on: list[str]) -> Path:
    """Grade the answers of an evaluation again; `on` gives sets whose truths have changed."""
    from rstar2.codeenv.client import CodeEnvClient
    from rstar2.config import CodeEnvConfig
    from rstar2.evaluate.assess import rescore
    from rstar2.evaluate.show import AnswerProgress
    from rstar2.evaluate.store import EvalDirectory, read_settings

    settings = read_settings(path)
    changed = {b.name: b for b in load_sets(on, None)} if on else {}
    if unknown := changed.keys() - settings.benchmarks.keys():
        raise UserError(f"--on {', '.join(unknown)}: not evaluated in {path}")
    sets = {
        name: changed[name].problems if name in changed else None for name in settings.benchmarks
    }
    with EvalDirectory.open(path, settings, ()) as directory:
        total = sum(len(directory.done(name)) for name in sets)
        with AnswerProgress(progress, total, 0) as shown:

            async def work() -> Any:
                tools = await CodeEnvClient.start(CodeEnvConfig())
                try:
                    return await rescore(path, sets, settings.samples, tools, shown.answered)
                finally:
                    await tools.close()

            scores = supervised(work)
        digests = {**settings.benchmarks, **{n: b.digest for n, b in changed.items()}}
        directory.settings = replace(settings, benchmarks=digests)
        directory.finish(scores, rescored=True)
    return path


def tables() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for all columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def conclude(path: Path, *, json: bool) -> None:
    """Write the page; print the table, or everything as JSON; exit 1 if answers are missing."""
    from rstar2.evaluate.page import write_page
    from rstar2.evaluate.show import score_table
    from rstar2.evaluate.store import read_results

    page = write_page(path)
    results = read_results(path)
    if json:
        typer.echo(encode(results).decode())
    else:
        tables().print(score_table(results))
        progress.print(f"report: [bold]{page}[/]")
    if not results.complete:
        raise typer.Exit(1)

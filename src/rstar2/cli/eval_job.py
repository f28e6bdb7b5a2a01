"""One evaluation from the command line: open its directory, generate answers, print results."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console

from rstar2.cli.waiting import waiting
from rstar2.config import Recipe, SamplingConfig
from rstar2.errors import UserError
from rstar2.machine import typed_command
from rstar2.types import encode

if TYPE_CHECKING:
    from rstar2.evaluate.answerers import Answerer
    from rstar2.evaluate.benchmarks import Benchmark
    from rstar2.evaluate.store import EvalDirectory, EvalSettings

T = TypeVar("T")

DEFAULT_LENGTH = 8192
ENDPOINT_CONCURRENCY = 32
WIDTH = 150
"""Columns of a table when stdout is a file or a pipe."""

progress = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """How answers are sampled: the preset, overridden by the options."""

    samples: int = 1
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    max_length: int = DEFAULT_LENGTH
    max_turns: int = 30
    seed: int = 0
    stream: str = ""


def load_sets(sets: list[str], count: int | None) -> list[Benchmark]:
    """Read all benchmarks before anything starts."""
    from rstar2.evaluate.benchmarks import load_benchmark

    loaded = [load_benchmark(text, count) for text in sets]
    names = [benchmark.name for benchmark in loaded]
    if len(set(names)) != len(names):
        raise UserError(f"--on: {', '.join(names)}: give each its own name (NAME=FILE)")
    return loaded


@dataclass(frozen=True, slots=True)
class EvalJob:
    """One evaluation: a model or endpoint, the benchmarks, and how answers are sampled."""

    recipe: Recipe
    asked: EvalOptions
    benchmarks: list[Benchmark]
    directory: Path | None
    url: str | None
    served_model: str | None
    api_key: str | None

    @property
    def model_name(self) -> str:
        """Name of the model: run/export, directory, or its name at the endpoint."""
        if self.directory is None:
            return self.served_model or str(self.url)
        parent = self.directory.parent
        if parent.name == "exports":
            return f"{parent.parent.name}/{self.directory.name}"
        return self.directory.name

    @property
    def label(self) -> str:
        """Default name of the evaluation directory."""
        words = [self.model_name, *(b.name for b in self.benchmarks), f"k{self.asked.samples}"]
        text = "-".join([*words, *(["greedy"] if self.asked.temperature == 0 else [])])
        return "".join(c if c.isalnum() or c in "._-" else "-" for c in text).strip("-")

    def settings(self, template: dict[str, Any]) -> EvalSettings:
        """Everything that an answer depends on."""
        from rstar2.evaluate.answerers import fingerprint
        from rstar2.evaluate.store import EvalSettings

        agent = self.recipe.agent
        return EvalSettings(
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
        """Generate the missing answers, write the results and return the directory."""
        from rstar2.evaluate.store import EvalDirectory
        from rstar2.evaluate.sweep import missing_tasks, score_answers

        with waiting("loading the tokenizer and the benchmarks"):
            answerer, template = self.answerer()
            settings = self.settings(template)
        with EvalDirectory.open(path, settings, self.benchmarks) as directory:
            tasks = list(missing_tasks(self.benchmarks, settings, directory))
            if tasks:
                self.sweep(directory, tasks, answerer, concurrency)
            names = [benchmark.name for benchmark in self.benchmarks]
            directory.finish(score_answers(path, names, settings.samples))
        return path

    def answerer(self) -> tuple[AbstractAsyncContextManager[Answerer], dict[str, Any]]:
        """The answerer (not opened yet) and the settings of its chat template."""
        from rstar2.evaluate import answerers

        if self.directory is None:
            assert self.url is not None
            endpoint = answerers.ChatEndpoint(self.url, self.served_model, self.api_key)
            opened = answerers.open_endpoint(self.recipe, endpoint, self.recipe.template)
            return opened, self.recipe.template.model_dump()
        from rstar2.pipeline.runtime import scheduling

        engine, length = self.recipe.engine, self.asked.max_length
        recipe = self.recipe.model_copy(
            update={
                "model": self.recipe.model.model_copy(update={"max_length": length}),
                "engine": engine.model_copy(
                    update={"kv_tokens": max(engine.kv_tokens, 2 * length)}
                ),
            }
        )
        template, environment = answerers.load_task(self.directory, None, recipe.environment)
        opened = answerers.open_fleet(
            recipe, scheduling(recipe), self.directory, template, environment
        )
        return opened, template.config.model_dump()

    def sweep(
        self,
        directory: EvalDirectory,
        tasks: list[Any],
        answerer: AbstractAsyncContextManager[Answerer],
        concurrency: int | None,
    ) -> None:
        """Answer the tasks with a progress bar, and report lost rollouts."""
        from rstar2.agent.loop import RolloutSpec
        from rstar2.evaluate.show import AnswerProgress
        from rstar2.evaluate.sweep import sweep

        asked, engine = self.asked, self.recipe.engine
        sampling = SamplingConfig(
            temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k
        )
        spec = RolloutSpec(sampling, asked.max_length, asked.max_turns)
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
                        spec,
                        concurrency=concurrency or at_once,
                        on_answer=shown.answered,
                    )

            lost = supervised(answer)
        if lost:
            names = ", ".join(f"{name} x{n}" for name, n in lost.items())
            progress.print(
                f"[yellow]lost to infrastructure: {names}; run the same command to retry"
            )


def supervised(work: Callable[[], Awaitable[T]]) -> T:
    """Run to the end. SIGINT or SIGTERM stops in order and prints how to resume."""
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
        again = shlex.join(typed_command(sys.argv))
        progress.print(f"stopped. To resume: [bold]{again}[/]")
        raise typer.Exit(128 + stopped[0]) from None


# --------------------------------------------------------------------------- results


def rescored(path: Path, on: list[str]) -> Path:
    """Grade the answers of an evaluation again; `on` names sets whose reference answers changed."""
    from rstar2.codeenv.client.client import CodeEnvClient
    from rstar2.config import CodeEnvConfig
    from rstar2.evaluate.show import AnswerProgress
    from rstar2.evaluate.store import EvalDirectory, read_problems, read_settings
    from rstar2.evaluate.sweep import rescore

    settings = read_settings(path)
    changed = {b.name: b for b in load_sets(on, None)} if on else {}
    if unknown := changed.keys() - settings.benchmarks.keys():
        raise UserError(f"--on {', '.join(unknown)}: {path} has no answers for it")
    sets = {
        name: changed[name].problems if name in changed else None for name in settings.benchmarks
    }
    for name, problems in sets.items():
        if not all(problem.grader for problem in problems or read_problems(path, name)):
            raise UserError(
                f"--rescore {path}: {name} has rewards of its own environment, which depend on the "
                "whole rollout and not on the recorded answer alone: evaluate again into another "
                "directory (--out)"
            )
    with EvalDirectory.open(path, settings, ()) as directory:
        total = sum(len(directory.done(name)) for name in sets)
        with AnswerProgress(progress, total, 0) as shown:

            async def work() -> Any:
                grading = CodeEnvConfig(warm_up="never")  # it runs no programs
                tools = await CodeEnvClient.start(grading)
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
    """A console for tables: as wide as the terminal, or wide enough for all columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def conclude(path: Path, *, json: bool) -> None:
    """Write the report, print the table or JSON, and exit with 1 if answers are missing."""
    from rstar2.evaluate.page import write_page
    from rstar2.evaluate.show import score_table
    from rstar2.evaluate.store import read_results

    with waiting("writing the report"):
        page = write_page(path)
        results = read_results(path)
    if json:
        typer.echo(encode(results).decode())
    else:
        tables().print(score_table(results))
        progress.print(f"report: [bold]{page}[/]")
    if not results.complete:
        raise typer.Exit(1)

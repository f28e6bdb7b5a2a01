"""`rstar2 data agree` and `rstar2 data difficulty`: resumable filters that sample a model.

Both sample answers with the agent loop of training and evaluation, from a local model (embedded
engine) or from any OpenAI-compatible endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rstar2.cli.data_shared import bar, show_card
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.agent.loop import RolloutSpec
    from rstar2.evaluate.answerers import Answerer
    from rstar2.problems.card import Card
    from rstar2.problems.model_filters import Ask, Rule, SampledAnswer
    from rstar2.types import Problem

Problems = Annotated[
    Path, typer.Argument(help="A problems.jsonl file, or the directory that holds it.")
]
Out = Annotated[Path, typer.Option(help="Directory to create, or to resume.")]
Model = Annotated[
    Path | None, typer.Option(help="A transformers model directory, or an rstar2 run directory.")
]
Url = Annotated[
    str | None, typer.Option(help="Use this OpenAI-compatible endpoint instead of --model.")
]
Served = Annotated[
    str | None, typer.Option("--served-model", help="Name of the model at the endpoint.")
]
Key = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_KEY", help="API key of the endpoint.", show_envvar=True),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Filter only problems of this source and keep all others. Can be repeated."),
]
Tools = Annotated[bool, typer.Option(help="Offer the Python tool to the model, as in training.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")]
MaxLength = Annotated[
    int,
    typer.Option(
        min=16, help="Maximum number of tokens of one rollout, as max_length in a recipe."
    ),
]
Turns = Annotated[
    int, typer.Option(min=1, help="Maximum number of assistant turns of one rollout.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Number of problems in flight.")]
AllSamples = Annotated[
    bool,
    typer.Option("--all-samples", help="Draw all samples even when the result is already decided."),
]
DropUndecided = Annotated[
    bool,
    typer.Option(
        "--drop-undecided", help="Drop problems that stay undecided because answers were lost."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed for sampling.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data card as JSON.")]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Which model answers, and with what limits."""

    model: Path | None
    url: str | None
    served_model: str | None
    api_key: str | None
    tools: bool
    temperature: float
    max_length: int
    max_turns: int
    concurrency: int

    def describe(self) -> dict[str, Any]:
        """What an answer depends on; the API key and the concurrency do not matter."""
        return {
            "model": self.served_model or self.url or _identity(self.model),
            "tools": self.tools,
            "temperature": self.temperature,
            "max_length": self.max_length,
            "max_turns": self.max_turns,
        }


def agree(
    problems: Problems,
    out: Out,
    matches: Annotated[
        int, typer.Option(min=1, help="Number of answers that must match the label.")
    ] = 2,
    samples: Annotated[
        int, typer.Option(min=1, max=64, help="Number of answers per problem.")
    ] = 16,
    model: Model = None,
    url: Url = None,
    served_model: Served = None,
    api_key: Key = None,
    only: Only = None,
    tools: Tools = False,
    temperature: Temperature = 0.6,
    max_length: MaxLength = 8192,
    max_turns: Turns = 10,
    concurrency: Concurrency = 64,
    all_samples: AllSamples = False,
    drop_undecided: DropUndecided = False,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Keep the problems whose label a reference model confirms.

    \b
    rstar2 data agree problems --only openmathreasoning --url http://host:8000/v1 --out agreed
    """
    from rstar2.problems.model_filters import Agreement

    if matches > samples:
        raise UserError(f"--matches {matches} is more than --samples {samples}")
    asked = AnswerOptions(
        model, url, served_model, api_key, tools, temperature, max_length, max_turns, concurrency
    )
    card = _filter(
        problems, out, Agreement(matches, samples), asked, only, seed, all_samples, drop_undecided
    )
    show_card(card, out / "problems.jsonl", as_json=json)


def difficulty(
    problems: Problems,
    out: Out,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Number of answers per problem.")] = 8,
    model: Model = None,
    url: Url = None,
    served_model: Served = None,
    api_key: Key = None,
    only: Only = None,
    tools: Tools = True,
    temperature: Temperature = 1.0,
    max_length: MaxLength = 12288,
    max_turns: Turns = 15,
    concurrency: Concurrency = 64,
    all_samples: AllSamples = False,
    drop_undecided: DropUndecided = False,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Drop the problems that the current policy always solves.

    Problems that it never solves are kept.

    \b
    rstar2 data difficulty problems --model RUN --out hard
    """
    from rstar2.problems.model_filters import NotAlwaysSolved

    asked = AnswerOptions(
        model, url, served_model, api_key, tools, temperature, max_length, max_turns, concurrency
    )
    card = _filter(
        problems, out, NotAlwaysSolved(samples), asked, only, seed, all_samples, drop_undecided
    )
    show_card(card, out / "problems.jsonl", as_json=json)


def _filter(
    problems: Path,
    out: Path,
    rule: Rule,
    asked: AnswerOptions,
    only: list[str] | None,
    seed: int,
    all_samples: bool,
    drop_undecided: bool,
) -> Card:
    from rstar2.problems.model_filters import Asking, Question

    if (asked.model is None) == (asked.url is None):
        raise UserError("give either --model DIR or --url URL")
    source = problems / "problems.jsonl" if problems.is_dir() else problems
    question = Question(rule, asked.describe(), seed, tuple(only or ()), all_samples)
    asking = Asking(source, out, question)

    async def run() -> None:
        with bar("answers") as show:
            async with _opened(asked) as ask:
                await asking.ask(ask, concurrency=asked.concurrency, progress=show)

    try:
        asyncio.run(run())
        return asking.finish(drop_undecided=drop_undecided)
    finally:
        asking.close()


# --------------------------------------------------------------------------- answering


@asynccontextmanager
async def _opened(asked: AnswerOptions) -> AsyncIterator[Ask]:
    """Start the model or endpoint and the code environment that runs tools and grades."""
    from rstar2.agent.loop import RolloutSpec
    from rstar2.config import SamplingConfig, TemplateConfig
    from rstar2.evaluate.answerers import ChatEndpoint, load_task, open_endpoint, open_fleet

    spec = RolloutSpec(
        SamplingConfig(temperature=asked.temperature), asked.max_length, asked.max_turns
    )
    plain = None if asked.tools else TemplateConfig(system="none", instruction="paper")
    if asked.url is not None:
        endpoint = ChatEndpoint(asked.url, asked.served_model, asked.api_key)
        recipe = _recipe(asked, asked.max_length)
        async with open_endpoint(recipe, endpoint, plain or TemplateConfig()) as answerer:
            yield _asker(answerer, spec)
        return
    from rstar2.cli.model_directory import longest, model_directory

    assert asked.model is not None
    directory = model_directory(asked.model)
    length = longest(directory, asked.max_length)
    spec = RolloutSpec(spec.sampling, length, asked.max_turns)
    recipe = _recipe(asked, length)
    template, environment = load_task(directory, plain, recipe.environment)
    fleet = open_fleet(recipe, recipe.scheduler, directory, template, environment)
    async with fleet as answerer:
        yield _asker(answerer, spec)


def _recipe(asked: AnswerOptions, length: int) -> Any:
    from rstar2.config import EngineConfig, ModelConfig, Recipe

    kv_tokens = max(65_536, length + 64)
    return Recipe(
        name="data",
        model=ModelConfig(max_length=length),
        engine=EngineConfig(kv_tokens=kv_tokens, max_sequences=min(256, asked.concurrency)),
    )


def _asker(answerer: Answerer, spec: RolloutSpec) -> Ask:
    from rstar2.evaluate.answerers import Task
    from rstar2.problems.model_filters import SampledAnswer as Made

    async def ask(problem: Problem, sample: int, seed: int) -> SampledAnswer:
        task = Task("data", problem, f"data/{problem.id}", sample, seed)
        trajectory, _ = await answerer.answer(task, spec)
        return Made(trajectory.correct, trajectory.answer, trajectory.failure)

    return ask


def _identity(model: Path | None) -> str:
    """Name and fingerprint of the weights at a path; a run's newest export may change."""
    from rstar2.cli.model_directory import model_directory
    from rstar2.evaluate.answerers import fingerprint

    if model is None:
        return ""
    directory = model_directory(model)
    return f"{directory.name} {fingerprint(directory)}"

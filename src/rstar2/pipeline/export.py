"""Exports: model directories that prompt as they were trained, and their model cards.

Training writes one after every stage. `rstar2 export` copies one to another place, or uploads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2.agent.episodes import EpisodeError, open_episode
from rstar2.agent.exported import TrainedPrompt, exported_tokenizer
from rstar2.agent.prompts import shown_to_model
from rstar2.agent.template import Template
from rstar2.agent.tokenizer import load_tokenizer
from rstar2.config import Recipe, TemplateConfig
from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.environments.base import EnvironmentProtocol, SandboxClient
from rstar2.errors import InfrastructureError
from rstar2.files import write_file
from rstar2.report.model_card import model_card
from rstar2.types import Problem

CARD = "README.md"
OPEN_DEADLINE_S = 60.0


async def trained_prompt(
    environment: EnvironmentProtocol,
    problems: Sequence[Problem],
    template: TemplateConfig,
    sandbox: SandboxClient | None,
) -> TrainedPrompt | None:
    """What the environment puts around every question; None if a program writes the prompts.

    Two problems are compared: what differs between them is left out and named in `varying`.
    """
    if isinstance(environment, ProgramEnvironment):
        return None
    first, last = [
        await _constants(environment, problem, template, sandbox)
        for problem in (problems[0], problems[-1])
    ]
    same = {name: value for name, value in first.items() if last[name] == value}
    varying = tuple(name for name in first if name not in same)
    return TrainedPrompt(prefill=environment.prefill, varying=varying, **same)


async def _constants(
    environment: EnvironmentProtocol,
    problem: Problem,
    template: TemplateConfig,
    sandbox: SandboxClient | None,
) -> dict[str, Any]:
    """The fields of TrainedPrompt, for one problem."""
    opening = open_episode(
        environment, problem, seed=0, sandbox=sandbox, deadline_s=OPEN_DEADLINE_S
    )
    try:
        async with opening as episode:
            messages, tools = shown_to_model(episode.messages, episode.tools, template)
    except EpisodeError as error:
        raise InfrastructureError(f"the prompt of the export is not known: {error}") from error
    before, question, after = messages[-1].content.partition(problem.prompt.strip())
    return {
        "system": messages[0].content if messages[0].role == "system" else "",
        "tools": tuple(tools),
        "before_user": before if question else messages[-1].content,
        "after_user": after,
    }


def write_card(run: Path, stage: str, export: Path) -> None:
    """Write the model card of an export, with the evaluations that the run has recorded."""
    write_file(export / CARD, model_card(run, stage))


def complete_export(
    directory: Path, recipe: Recipe, environment: EnvironmentProtocol, prompt: TrainedPrompt | None
) -> None:
    """Write the trained prompt and the stop tokens into a model directory that lacks them."""
    from rstar2.learner.weights import write_generation_config  # torch: only on use

    tokenizer = load_tokenizer(directory)
    template = Template(tokenizer, recipe.template, environment.prefill)
    if prompt is not None:
        exported_tokenizer(template, prompt).save_pretrained(directory)
    write_generation_config(directory, template.stop_ids)

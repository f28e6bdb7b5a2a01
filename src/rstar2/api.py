"""The Python face of training and evaluation: `train`, `evaluate_model` and `Agent`.

They run what the commands run, with an environment that is a Python object.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rstar2.config import (
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    Recipe,
    SamplingConfig,
    load_recipe,
    preflight,
)
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.load import identify_object, load_environment, recipe_problems
from rstar2.errors import InfrastructureError, RecipeError, UserError
from rstar2.types import Evaluation, Failure, Problem, Trajectory

if TYPE_CHECKING:
    from rstar2.pipeline.controller import TrainingResult
    from rstar2.rollout.groups import GroupRunner

T = TypeVar("T")

KV_TOKENS = 65_536


class RolloutFailure(InfrastructureError):
    """A rollout was lost to infrastructure, or to an error of its environment."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.name}: {failure.message}")
        self.failure = failure


def train(
    environment: EnvironmentProtocol | str,
    recipe: str | Path | Recipe = "tiny",
    *,
    steps: int | None = None,
    settings: Sequence[str] = (),
    seed: int | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
) -> TrainingResult:
    """Train a policy on an environment, with the pipeline of `rstar2 train`.

    environment: an environment, or a name as in a recipe
    recipe: a shipped recipe, a YAML file, or a Recipe
    steps: RL steps; only the first stage of the recipe is run, with this many
    settings: overrides, such as "sft.steps=200"
    run: the run directory; an interrupted run in it is resumed. The default is runs/NAME-seedN
    fresh: delete an earlier run in the run directory
    """
    plan = _recipe(recipe, settings, seed)
    if isinstance(environment, str):
        named = EnvironmentConfig(use=environment, folder=str(Path.cwd()))
        environment = load_environment(named, plan.template)
    if steps is not None:
        if not plan.rl.stages:
            raise RecipeError(f"recipe {plan.name} has no RL stage, so steps={steps} has no effect")
        stage = plan.rl.stages[0].model_copy(update={"steps": steps})
        plan = _with(plan, rl=_with(plan.rl, stages=(stage,)))
    plan = _with(plan, environment=EnvironmentConfig(use=environment.name))
    path = Path(run or Path("runs") / f"{environment.name}-seed{plan.seed}").absolute()
    return _wait(_train(plan, path, environment, fresh))


async def _train(
    recipe: Recipe, path: Path, environment: EnvironmentProtocol, fresh: bool
) -> TrainingResult:
    from rstar2.pipeline.controller import run
    from rstar2.pipeline.progress import make_view
    from rstar2.record import RunDirectory

    preflight(recipe, path)
    for split in ("train", "heldout"):
        recipe_problems(recipe, environment, split)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    identity = identify_object(environment)
    view = make_view()
    with RunDirectory.create_or_resume(path, recipe, fresh=fresh, environment=identity) as record:
        view.open(recipe, path)
        try:
            result = await run(recipe, record, view, environment)
        except BaseException as error:
            record.event("failed", error=type(error).__name__, message=str(error))
            raise
        finally:
            view.close()
        record.event("finished")
    return result


def evaluate_model(
    model: str | Path,
    environment: EnvironmentProtocol,
    *,
    count: int | None = None,
    samples: int = 1,
    temperature: float = 1.0,
    max_length: int = 1024,
    max_turns: int = 10,
    seed: int = 0,
) -> Evaluation:
    """Evaluate a model directory, or the export of a run's last stage, on the held-out problems.

    count: the first so many problems; samples: answers per problem; temperature 0 is greedy
    """
    problems = environment.problems("heldout", count, 0)

    async def work() -> Evaluation:
        from rstar2.evaluate.run import evaluate

        agent = Agent(model, environment, max_length=max_length, max_turns=max_turns)
        async with agent:
            result, _ = await evaluate(
                agent.runner,
                problems,
                stage="evaluate",
                step=0,
                mode="greedy" if temperature == 0 else "sampled",
                seed=seed,
                samples=samples,
                spec=agent.spec(temperature),
            )
        return result

    return _wait(work())


class Agent:
    """A policy in an environment: runs one rollout after another, or many at the same time.

        async with rstar2.Agent("runs/tiny-seed0", env) as agent:
            rollout = await agent.run("What is 48 choose 5?")
            print(rollout.text, rollout.reward)

    model: a model directory, or a run directory (the export of its last stage)
    environment: an environment, or a name as in a recipe
    max_length: tokens of a rollout, prompt included
    """

    def __init__(
        self,
        model: str | Path,
        environment: EnvironmentProtocol | str = "python-math",
        *,
        max_length: int = 1024,
        max_turns: int = 10,
    ) -> None:
        from rstar2.cli.chat import longest, model_directory

        self.directory = model_directory(Path(model))
        self.max_length = longest(self.directory, max_length)
        self.max_turns = max_turns
        self._environment = environment
        self._stack = AsyncExitStack()
        self._runner: GroupRunner | None = None
        self._numbers = itertools.count()

    @property
    def runner(self) -> GroupRunner:
        """Runs groups of rollouts; only inside of `async with`."""
        if self._runner is None:
            raise UserError("use the agent inside of `async with rstar2.Agent(...) as agent:`")
        return self._runner

    def spec(self, temperature: float) -> Any:
        """How a rollout is sampled, and how long it may become."""
        from rstar2.agent.loop import RolloutSpec

        return RolloutSpec(SamplingConfig(temperature=temperature), self.max_length, self.max_turns)

    async def __aenter__(self) -> Self:
        from rstar2.evaluate.answerers import load_template, open_fleet

        recipe = Recipe(
            name="agent",
            model=ModelConfig(max_length=self.max_length),
            engine=EngineConfig(kv_tokens=max(KV_TOKENS, 2 * self.max_length)),
        )
        environment = self._environment
        template = load_template(self.directory, None)
        if isinstance(environment, str):
            named = EnvironmentConfig(use=environment, folder=str(Path.cwd()))
            environment = load_environment(named, template.config)
        template = load_template(self.directory, template.config, environment.prefill)
        opened = open_fleet(recipe, recipe.scheduler, self.directory, template, environment)
        answerer = await self._stack.enter_async_context(opened)
        self._runner = answerer.runner
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._runner = None
        await self._stack.aclose()

    async def run(
        self, problem: Problem | str, *, seed: int = 0, temperature: float = 1.0
    ) -> Trajectory:
        """One rollout with its reward; raises RolloutFailure if it was lost.

        A text has no answer to compare with, so its reward says nothing.
        """
        if isinstance(problem, str):
            problem = Problem("prompt", problem, "")
        group_id = f"agent/{next(self._numbers)}/{problem.id}"  # concurrent rollouts are apart
        trajectory = await self.runner.rollout(
            problem, group_id=group_id, index=0, seed=seed, spec=self.spec(temperature)
        )
        if trajectory.failure is not None:
            raise RolloutFailure(trajectory.failure)
        return trajectory


def _recipe(recipe: str | Path | Recipe, settings: Sequence[str], seed: int | None) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, settings, seed=seed).recipe
    if settings:
        raise UserError("settings change a recipe that is given by name or file")
    return recipe if seed is None else _with(recipe, seed=seed)


Settings = TypeVar("Settings", bound=Any)


def _with(section: Settings, **changes: Any) -> Settings:
    copy: Settings = section.model_copy(update=changes)
    return copy


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread of its own if this one has a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="rstar2") as executor:  # a notebook
        return executor.submit(asyncio.run, work).result()

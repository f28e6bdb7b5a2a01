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
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args

from rstar2.config import (
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    Recipe,
    SamplingConfig,
    load_recipe,
)
from rstar2.config.preflight import preflight
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.identity import identify, identify_object
from rstar2.environments.load import load_environment, recipe_problems
from rstar2.errors import InfrastructureError, RecipeError, UserError
from rstar2.plugins import folder_of, make_importable
from rstar2.types import Evaluation, Failure, Problem, Split, Trajectory

if TYPE_CHECKING:
    from rstar2.pipeline.controller import TrainingResult
    from rstar2.rollout.groups import GroupRunner

T = TypeVar("T")

KV_TOKENS = 65_536


class RolloutFailure(InfrastructureError):
    """A rollout was lost to infrastructure, or to an error of its environment: it has no reward.

    `failure` has the name and the message of the cause. Agent.run raises it.

    Example:

        try:
            rollout = await agent.run(problem)
        except rstar2.RolloutFailure as error:
            print(error.failure.name, error.failure.message)
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.name}: {failure.message}")
        self.failure = failure


EVALUATED_AT_ONCE = 256
"""Problems that `evaluate_model` has in flight."""


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
    """Train a policy on an environment, with the pipeline of `rstar2 train`: SFT, then RL stages,
    and an evaluation on the held-out problems after each of them.

    The call returns when the run has ended. The same call resumes an interrupted run after its last
    checkpoint; for a finished run it returns the recorded result.

    environment: an environment, or a name as in a recipe
    recipe: the name of a shipped recipe, a YAML file, or a Recipe; `environment` replaces its own
    steps: number of RL steps; only the first stage of the recipe is run, with its limits
        (`max_length`, `max_turns`). By default all stages are run
    settings: settings to override, such as "sft.steps=200"; `rstar2 train RECIPE --dry-run` lists
        all of them
    seed: replaces the recipe's seed
    run: the run directory; runs/NAME-seedN by default, with the name of the environment
    fresh: delete an earlier run in the run directory instead of resuming it

    Returns a TrainingResult with `path` (the run directory), `evaluations` (a list of Evaluation),
    `exports` (model directories by stage, which transformers can load), `rl_steps` and `wall_s`.
    Raises UserError before anything starts if the recipe, the environment or the machine does not
    fit, also for the run directory of another environment or recipe. Raises InfrastructureError if
    the run cannot continue; the same call resumes it.

    Example:

        run = rstar2.train(env, "tiny", steps=20, settings=["sft.steps=300"])
        print(run.path, run.evaluations[-1].accuracy.mean)
    """
    plan = _recipe(recipe, settings, seed)
    named: EnvironmentConfig | None = None
    if isinstance(environment, str):
        named = EnvironmentConfig(use=environment, folder=str(Path.cwd()))
        environment = load_environment(named, plan.template)
    if steps is not None:
        if not plan.rl.stages:
            raise RecipeError(f"recipe {plan.name} has no RL stage, so steps={steps} has no effect")
        stage = plan.rl.stages[0].model_copy(update={"steps": steps})
        plan = _with(plan, rl=_with(plan.rl, stages=(stage,)))
    plan = _with(plan, environment=named or EnvironmentConfig(use=environment.name))
    path = Path(run or Path("runs") / f"{environment.name}-seed{plan.seed}").absolute()
    return _wait(_train(plan, path, environment, fresh, named))


async def _train(
    recipe: Recipe,
    path: Path,
    environment: EnvironmentProtocol,
    fresh: bool,
    named: EnvironmentConfig | None,
) -> TrainingResult:
    from rstar2.pipeline.controller import run
    from rstar2.pipeline.progress import make_view
    from rstar2.record import RunDirectory

    preflight(recipe, path)
    problems = {split: recipe_problems(recipe, environment, split) for split in get_args(Split)}
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if named is None:
        identity = identify_object(environment, problems)
    else:
        identity = identify(named, environment, problems)
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
    """Evaluate a model on the held-out problems of an environment.

    model: a model directory, or a run directory (the export of its last stage)
    environment: an environment
    count: how many problems, from the first; all by default
    samples: rollouts per problem
    temperature: of sampling; 0 is greedy
    max_length: most tokens of a rollout, prompt included
    max_turns: most turns of a rollout
    seed: of sampling

    Returns an Evaluation. Its `accuracy` is the mean reward over problems with a 95% interval; for
    rewards of 0 and 1 this is the share of correct answers. Raises UserError if there is no model.

    Example:

        figures = rstar2.evaluate_model("runs/cities-seed0", env, count=100, temperature=0)
        print(figures.accuracy.mean, figures.accuracy.low, figures.accuracy.high)
    """
    problems = environment.problems("heldout", count, 0)

    async def work() -> Evaluation:
        from rstar2.evaluate.run import evaluate

        agent = Agent(model, environment, max_length=max_length, max_turns=max_turns)
        async with agent:
            return await evaluate(
                agent.runner,
                problems,
                stage="evaluate",
                step=0,
                mode="greedy" if temperature == 0 else "sampled",
                seed=seed,
                samples=samples,
                spec=agent.spec(temperature),
                at_once=EVALUATED_AT_ONCE,
            )

    return _wait(work())


class Agent:
    """A model in an environment, for single rollouts: one after another, or many at the same time.

    `async with` starts the engine, and the code environment if a tool needs it, and ends them.

    model: a model directory, or a run directory (the export of its last stage)
    environment: an environment, or a name as in a recipe
    max_length: most tokens of a rollout, prompt included
    max_turns: most turns of a rollout

    Raises UserError if there is no model.

    Example:

        async with rstar2.Agent("runs/cities-seed0", env) as agent:
            rollout = await agent.run(env.problems("heldout", 1, 0)[0])
            print(rollout.text, rollout.reward.value)
    """

    def __init__(
        self,
        model: str | Path,
        environment: EnvironmentProtocol | str = "python-math",
        *,
        max_length: int = 1024,
        max_turns: int = 10,
    ) -> None:
        from rstar2.cli.model_directory import longest, model_directory

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
        from rstar2.evaluate.answerers import load_task, open_fleet

        recipe = Recipe(
            name="agent",
            model=ModelConfig(max_length=self.max_length),
            engine=EngineConfig(kv_tokens=max(KV_TOKENS, 2 * self.max_length)),
        )
        task: EnvironmentConfig | EnvironmentProtocol
        if isinstance(self._environment, str):
            task = EnvironmentConfig(use=self._environment, folder=str(Path.cwd()))
        else:
            task = self._environment
        template, environment = load_task(self.directory, None, task)
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
        """Run one rollout and return it as a Trajectory with its reward.

        problem: a problem, or the text of one; a text has no answer, so its reward is meaningless
        seed: of sampling; the same seed gives the same rollout
        temperature: of sampling; 0 is greedy

        Raises RolloutFailure if the rollout was lost.
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
        make_importable(folder_of(recipe))
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

"""The live processes of one run, opened and closed together: learner, engines, code environment.

Invariants
- The learner is used by one thread at a time: every call, those that publish its weights included,
  runs on its one thread (`on_learner`), and that thread is the only lock around the learner.
- No engine is restarted with weights that are being changed: the caller that trains and publishes
  holds `changing_weights`, and an engine that died in that time receives the new weights.
- An engine serves only weights that were proven (Invariant 7): `publish` makes the fleet require
  the new version first, and engines join after their proof.
- No step waits for an engine that died or hangs: `publish` serves the engines that are there. The
  others start in the background and join when they are proven, by the next `publish` or after it.
- The first start is no exception: the run begins with the engines that could be started.
- `close` ends every process that was started, in any state of the parts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rstar2.agent.exported import exported_tokenizer
from rstar2.agent.loop import AgentLoop
from rstar2.agent.template import Template
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import Recipe, SchedulerConfig
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.base import Engine
from rstar2.engine.make import make_engines
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.load import load_environment, recipe_problems
from rstar2.errors import (
    DeadlineError,
    EngineError,
    InfrastructureError,
    WeightUpdateError,
)
from rstar2.http_client import despite_local_errors
from rstar2.learner.tolerance import ROUNDING_TEXTS, MeasuredTolerance
from rstar2.malloc import keep_freed_memory, rare_collections
from rstar2.pipeline.export import trained_prompt
from rstar2.pipeline.model import find_model, load_model
from rstar2.plan.share import beside_learner
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.starting import start_engines
from rstar2.rollout.watchdog import Watchdog, end_engine
from rstar2.tasks import all_but_stragglers, cancel_all, together
from rstar2.types import Message, Problem, WeightVersion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rstar2.cluster.ray_cluster import RayCluster
    from rstar2.learner.group import LearnerGroup

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Notify = Callable[..., None]
"""Records an event of a part: its name, and facts by keyword."""

PROBE_TOKENS = 64
PUBLISH_ATTEMPTS = 3
NO_ENGINE_S = 900.0
"""How long `publish` waits for the first engine if none runs."""
EMBEDDED_MOVE_STEPS = 256
"""Embedded engines on one machine: shorter turns stay on their engine."""


class Runtime:
    """Learner, engines and code environment of one run; `open_runtime` makes one."""

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        model_dir: Path | str,
        tokenizer: PreTrainedTokenizerFast,
        learner: LearnerGroup,
        executor: ThreadPoolExecutor,
        *,
        environment: EnvironmentProtocol,
        cluster: RayCluster | None = None,
        notify: Notify = lambda event, **facts: None,
    ) -> None:
        self.recipe, self.directory, self.model_dir = recipe, directory, model_dir
        self.cluster, self.notify = cluster, notify
        self.tokenizer, self.learner = tokenizer, learner
        self.environment = environment
        self.template = Template(tokenizer, recipe.template, environment.prefill)
        self.problems: tuple[Problem, ...] = ()
        if recipe.rl.stages:
            self.problems = recipe_problems(recipe, environment, "train")
        self.heldout = recipe_problems(recipe, environment, "heldout")
        self._engines: Sequence[Engine] = (
            make_engines(recipe, model_dir, beside_learner(recipe))
            if cluster is None
            else cluster.engines(model_dir)
        )
        self._executor = executor
        self._published: WeightVersion | None = None
        self._fleet: Fleet | None = None
        self._tools: CodeEnvClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._arrived: dict[str, Engine] = {}
        """Engines that run but were not proven since they started."""
        self._late: dict[str, asyncio.Task[None]] = {}
        """The first starts of engines for which the others did not wait."""
        self._arrival = asyncio.Event()
        self._serving = asyncio.Event()
        """Set once weights of the current learner were published."""
        formats: list[str] = [recipe.model.dtype, recipe.learner.dtype]
        if recipe.engine.quantization != "none":
            formats.append(recipe.engine.quantization)
        self.tolerance = MeasuredTolerance(*formats)
        self._lost: set[str] = set()
        """Engines that died and do not serve yet."""
        self._rehearsed: set[str] = set()
        """Engines that have applied a planted LoRA adapter since their start."""
        self._rehearsal: dict[str, float] = {}
        """Metrics of the last rehearsal; the first one comes before the first step."""

    # ------------------------------------------------------------------ learning

    def changing_weights(self) -> asyncio.Lock:
        """The lock to hold while weights are trained and published; rollouts may continue."""
        return self._changing

    async def on_learner(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on the learner's thread, after the calls that were made before it."""
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def rebuild_learner(self) -> None:
        """Replace a learner that lost a rank; the new one has the initial weights."""
        if self.cluster is not None:
            await self.cluster.look()
        await self._sleep()  # a new rank needs more memory while it loads than a running one
        await self.on_learner(self.learner.close)
        _, self.learner = await self.on_learner(
            load_model, self.recipe, self.model_dir, self.cluster
        )
        self._published = None
        self._serving.clear()

    # ------------------------------------------------------------------ serving

    async def use_gpus_to_learn(self) -> None:
        """Let engines that share GPUs with the learner sleep (`engine.sleep`). Idempotent."""
        if self.recipe.engine.sleep:
            await self._sleep()
            await self.on_learner(self.learner.onload_optimizer)

    async def use_gpus_to_generate(self) -> None:
        """Wake the engines; the optimizer's state is in host memory meanwhile. Idempotent."""
        if self.recipe.engine.sleep:
            await self.on_learner(self.learner.offload_optimizer)
            await self._or_end({e: e.wake for e in self._engines})

    async def _sleep(self) -> None:
        if self.recipe.engine.sleep:
            await self._or_end({e: e.sleep for e in self._engines})

    async def _or_end(self, actions: Mapping[Engine, Callable[[], Awaitable[None]]]) -> None:
        """Ask engines to sleep or wake. One that fails or hangs is ended, which frees its memory.

        The next publication starts it again.
        """
        tasks = {
            asyncio.ensure_future(despite_local_errors(action)): engine
            for engine, action in actions.items()
        }
        try:
            await all_but_stragglers(tasks, straggler_s=self.recipe.engine.hang_s)
        finally:
            await cancel_all(tasks)
        for task, engine in tasks.items():
            late = DeadlineError("it hangs: it is much slower than the others")
            error = late if task.cancelled() else task.exception()
            if isinstance(error, InfrastructureError):
                log.warning("engine %s is ended: %s", engine.name, error)
                await end_engine(engine)
            elif error is not None:
                raise error

    def start_serving(self) -> None:
        """Start engines and code environment in the background."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        engines = self._engines
        self._fleet = Fleet(engines, Scheduler(scheduling(self.recipe)), recover=self._recover)

        async def start_tools() -> None:
            if not self.environment.needs_sandbox:
                return
            if self.cluster is None:
                self._tools = await CodeEnvClient.start(self.recipe.codeenv)
            else:
                self._tools = await self.cluster.tools()

        await together([start_tools(), self._start_engines()])
        dog = Watchdog(
            self._fleet,
            self._probe,
            hang_s=self.recipe.engine.hang_s,
            on_hang=lambda name: self.notify("hung", part=name),
        )
        self._watching = asyncio.ensure_future(dog.run())

    async def _start_engines(self) -> None:
        """Start the engines: at least one. Those that fail or are slow join later."""
        started = await start_engines(self._engines, self.recipe.engine.hang_s)
        self._arrived = {engine.name: engine for engine in started.running}
        self._late = started.late
        for name, error in started.failed.items():
            self.notify("away", part=name, why=str(error))

    def check(self) -> None:
        """Raise the error of the start in the background, if it has failed."""
        if self._starting is not None and self._starting.done():
            self._starting.result()

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        """Serve the learner's weights as `version` on all engines that run; returns metrics of it.

        Starts engines and code environment if they do not run. A version is published once: if the
        engines already serve it, nothing is done and there are no metrics. Raises EngineError if no
        engine can be started.
        """
        await self.use_gpus_to_generate()
        self.start_serving()
        assert self._starting is not None
        await self._starting
        if version == self._published:
            return {}
        fleet = self.fleet
        fleet.require(version)
        ends = monotonic() + NO_ENGINE_S
        for attempt in range(1, PUBLISH_ATTEMPTS + 1):
            try:
                metrics = await self._prove(await self._present(fleet, ends), version)
                break
            except (EngineError, WeightUpdateError) as error:
                if attempt == PUBLISH_ATTEMPTS:
                    raise
                log.warning("weights %d were not published, retrying: %s", version, error)
        self._published = version
        self._serving.set()
        fleet.restart_missing()
        return metrics

    async def exported_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer for exports: its chat template writes this run's prompts."""
        await self.use_gpus_to_generate()
        self.start_serving()
        assert self._starting is not None
        await self._starting
        prompt = await trained_prompt(
            self.environment, self.heldout, self.recipe.template, self._tools
        )
        return self.tokenizer if prompt is None else exported_tokenizer(self.template, prompt)

    @property
    def runner(self) -> GroupRunner:
        """Runs groups of rollouts on the engines; only after `publish`."""
        return GroupRunner(
            AgentLoop(self.environment, self.fleet, self._tools, self.template, self.recipe.agent)
        )

    @property
    def fleet(self) -> Fleet:
        """The engines; only after `publish`."""
        assert self._fleet is not None
        return self._fleet

    async def _present(self, fleet: Fleet, ends: float) -> list[Engine]:
        """The engines that run; if there are none, wait until one has started."""
        if not fleet.scheduler.engines and not self._arrived:
            fleet.restart_missing()
        while not (names := {*fleet.scheduler.engines, *self._arrived}):
            self._arrival.clear()
            arrival = asyncio.ensure_future(self._arrival.wait())
            ended = asyncio.ensure_future(fleet.restarted())
            left = ends - monotonic()
            waits = {arrival, ended}
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            _, result = await asyncio.gather(arrival, ended, return_exceptions=True)
            if isinstance(result, EngineError):
                raise result
            if monotonic() > ends:
                raise DeadlineError(f"no engine has started within {NO_ENGINE_S:g} s")
        return [engine for name, engine in fleet.engines.items() if name in names]

    async def _recover(self, engine: Engine) -> WeightVersion:
        """Restart a dead engine and give it the weights that the others serve.

        It is proven here between two steps, or by a `publish` that comes first.
        """
        name, late = engine.name, self._late.pop(engine.name, None)
        if name not in self._lost and late is None:
            self._lost.add(name)
            self._rehearsed.discard(name)
            self.notify("lost", part=name)
        try:
            await (engine.start() if late is None else late)
        except InfrastructureError as error:
            self.notify("away", part=name, why=str(error))
            raise
        self._arrived[name] = engine
        self._arrival.set()
        await self._serving.wait()
        async with self._changing:
            if name in self._arrived and self._published is not None:
                await self._prove([engine], self._published)
            if self._published is None or name not in self.fleet.scheduler.engines:
                raise EngineError(f"{name} was lost again before it had the weights")
            return self._published

    def _back(self, engine: Engine, version: WeightVersion) -> None:
        if engine.name in self._lost:
            self._lost.discard(engine.name)
            self.notify("back", part=engine.name, version=version)

    async def _prove(self, engines: Sequence[Engine], version: WeightVersion) -> dict[str, float]:
        """Publish to these engines; those that are proven join the fleet, the others are lost.

        Raises EngineError if no engine is left, WeightUpdateError if all have wrong weights.
        """
        from rstar2.learner.lora import rehearse  # torch: loaded by now
        from rstar2.learner.weights import publish

        recipe, tolerance = self.recipe, self.tolerance.value
        spread = None if self.cluster is None else self.cluster.weights
        lost: dict[str, InfrastructureError] = {}
        new = [engine for engine in engines if engine.name not in self._rehearsed]
        if recipe.learner.lora is not None and new:
            rehearsed = await rehearse(
                self.learner,
                new,
                self._probe,
                spread=spread,
                tolerance=tolerance,
                in_thread=self.on_learner,
            )
            self._rehearsal = dict(rehearsed.metrics)
            self._rehearsed.update(engine.name for engine in rehearsed.proven)
            lost |= await self._lose_all(rehearsed.lost)
            engines = [engine for engine in engines if engine.name in self._rehearsed]
        made = await publish(
            self.learner,
            engines,
            version,
            self._probe,
            spread=spread,
            tolerance=tolerance,
            straggler_s=recipe.engine.hang_s,
            in_thread=self.on_learner,
        )
        texts = [self._prompt_ids(problem) for problem in self.heldout[:ROUNDING_TEXTS]]
        observed = await self.tolerance.observe(made, self.learner, texts, self.on_learner)
        for engine in made.proven:
            self._arrived.pop(engine.name, None)
            self.fleet.join(engine.name, version)
            self._back(engine, version)
        lost |= await self._lose_all(made.lost)
        if not made.proven:
            raise EngineError(f"no engine took version {version}: {next(iter(lost.values()))}")
        return {**self._rehearsal, **observed, **made.metrics}

    async def _lose_all(
        self, lost: Mapping[str, InfrastructureError]
    ) -> Mapping[str, InfrastructureError]:
        """End the engines that failed during an update; they restart in the background."""
        for name, error in lost.items():
            log.warning("engine %s did not take the weights: %s", name, error)
            if isinstance(error, DeadlineError):
                self.notify("hung", part=name)
            if isinstance(error, WeightUpdateError):
                self.notify("away", part=name, why=str(error))
            self._arrived.pop(name, None)
            self._rehearsed.discard(name)
            await end_engine(self.fleet.engines[name])
            self.fleet.lose(name, error)
        return lost

    @property
    def _probe(self) -> Sequence[int]:
        return self._prompt_ids(self.heldout[0])

    def _prompt_ids(self, problem: Problem) -> Sequence[int]:
        return self.template.prompt_ids([Message("user", problem.prompt)])[:PROBE_TOKENS]

    async def close(self) -> None:
        """End engines and code environment; idempotent."""
        tasks = (self._starting, self._watching, *self._late.values())
        background = [task for task in tasks if task is not None]
        await cancel_all(background)
        async with AsyncExitStack() as stack:  # each is closed, also if another fails
            if self._tools is not None:
                stack.push_async_callback(self._tools.close)
            stack.push_async_callback(self.environment.close)
            if self._fleet is not None:
                stack.push_async_callback(self._fleet.close)


@asynccontextmanager
async def open_runtime(
    recipe: Recipe,
    directory: Path,
    notify: Notify = lambda event, **facts: None,
    environment: EnvironmentProtocol | None = None,
) -> AsyncIterator[Runtime]:
    """Load the model and its learner; engines start when they are first needed.

    Without an environment the recipe's own is used.
    """
    raise_descriptor_limit()
    keep_freed_memory()  # before the learner's thread starts
    environment = environment or load_environment(recipe.environment, recipe.template)
    executor = ThreadPoolExecutor(1, thread_name_prefix="learner")
    loop = asyncio.get_running_loop()
    try:
        model_dir = await loop.run_in_executor(executor, find_model, recipe, directory)
        async with _open_cluster(recipe, notify) as cluster:
            tokenizer, learner = await loop.run_in_executor(
                executor, load_model, recipe, model_dir, cluster
            )
            runtime = Runtime(
                recipe,
                directory,
                model_dir,
                tokenizer,
                learner,
                executor,
                environment=environment,
                cluster=cluster,
                notify=notify,
            )
            try:
                with rare_collections():
                    yield runtime
            finally:
                try:
                    await runtime.close()
                finally:
                    await runtime.on_learner(runtime.learner.close)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@asynccontextmanager
async def _open_cluster(recipe: Recipe, notify: Notify) -> AsyncIterator[RayCluster | None]:
    """The cluster of the recipe; None if the run uses this machine alone."""
    if recipe.cluster is None:
        yield None
        return
    from rstar2.cluster.ray_cluster import open_ray_cluster

    async with open_ray_cluster(recipe, notify) as cluster:
        yield cluster


def scheduling(recipe: Recipe) -> SchedulerConfig:
    """The recipe's policy; deterministic runs reserve the worst case.

    A prefix that is computed again differs in its last bits from one that was kept. With the worst
    case reserved, every prefix is kept. Without it, short turns do not move on one machine.
    """
    config = recipe.scheduler
    if recipe.deterministic:
        config = config.model_copy(update={"policy": "worst_case"})
    if config.move_steps is None and recipe.engine.kind == "embedded" and recipe.cluster is None:
        config = config.model_copy(update={"move_steps": EMBEDDED_MOVE_STEPS})
    return config

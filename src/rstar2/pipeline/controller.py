"""The whole recipe on one page.

    model ──> SFT ──> evaluation      (with `evaluation.every` also of the model, and during RL)
                          │
              ┌───────────┘      for each RL stage (short, longer, hard)
              v
        difficulty filter ── the policy answers each problem k times; always solved ones drop out
              │
              v
        collect ──> resample ──> learn ──> publish ──┐
           ^        (2G -> G)     (G)     (v + 1)    │
           └─────────────────────────────────────────┘
              │
              └──> evaluation ──> export ──> next stage

What each arrow waits for, and what unblocks it:

    collect    the step's last group; groups need engines (Fleet) and tools (CodeEnvClient); a group
               from which resampling would keep only equal rewards is refilled with another problem
    resample   nothing: a pure function of the groups and the seed
    learn      the learner's thread, which runs one call at a time
    publish    the proof of every engine that runs; a dead one joins later, when it is proven

With staleness 0 no two steps overlap: the rollouts of step n + 1 are drawn with the weights of step
n. With staleness k, `collect` starts up to k further steps, which continue while one is learnt;
weights change under running rollouts, whose tokens each carry the version that sampled them. Within
a step everything overlaps: the rollouts of all groups, their tool calls and their grading.

State moves forward in one place, after a step is complete and recorded; a checkpoint holds that
state together with the learner's. So kill -9 at any moment loses at most the steps since the last
checkpoint, and the same command repeats them with the same seeds. Ctrl-C saves the last completed
step first: SFT completes the step that it is in, RL saves unless the learner has begun the next. A
lost learner rank has the effect of a kill: new ranks start from the last checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from rstar2.config import Recipe, StageConfig
from rstar2.environments.base import EnvironmentProtocol
from rstar2.errors import RankError
from rstar2.grpo.batch import teaches
from rstar2.grpo.roc import select
from rstar2.pipeline import stages
from rstar2.pipeline.collapse import detect_collapse
from rstar2.pipeline.difficulty_filter import hard_problems
from rstar2.pipeline.progress import ProgressView, StageKind
from rstar2.pipeline.runtime import open_runtime
from rstar2.pipeline.state import RunState
from rstar2.pipeline.step_metrics import (
    StepTimes,
    engine_metrics,
    staleness_metrics,
    step_metrics,
)
from rstar2.pipeline.stopping import fitted_steps, stage_complete, stage_end, watch_plateau
from rstar2.pipeline.training import BASE, SFT, Training, resample
from rstar2.record import RunDirectory, read_evaluations
from rstar2.rollout.collector import Collector
from rstar2.rollout.fleet import usage_metrics
from rstar2.rollout.lookahead import GroupSlots, LookaheadCollector
from rstar2.seeds import derive_seed
from rstar2.types import Evaluation, Group, Problem

REBUILDS = 3
"""How often the learner ranks of one machine are restarted after one was lost."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a run produced."""

    path: Path
    evaluations: tuple[Evaluation, ...]
    exports: Mapping[str, Path]
    """Model directories by stage, loadable by transformers; `best` if collapse was watched."""
    rl_steps: int
    wall_s: float
    collapsed: str = ""
    """Why training ended early; empty if it did not."""


async def run(
    recipe: Recipe,
    run: RunDirectory,
    view: ProgressView,
    environment: EnvironmentProtocol | None = None,
) -> TrainingResult:
    """Run a recipe in its directory, or resume where an earlier call was stopped.

    Without an environment the recipe's own is used.
    """
    started = monotonic()
    async with open_runtime(recipe, run.path, run.event, environment) as runtime:
        state = await train_with_rebuilds(Training(recipe, run, view, runtime, started))
    return TrainingResult(
        path=run.path,
        evaluations=tuple(read_evaluations(run.path)),
        exports={p.name: p for p in sorted((run.path / "exports").glob("[!.]*"))},
        rl_steps=state.rl_steps,
        wall_s=monotonic() - started,
        collapsed=state.collapsed,
    )


async def train_with_rebuilds(training: Training) -> RunState:
    """Train; when a learner rank is lost, start new ranks and resume from the last checkpoint."""
    cluster = training.recipe.cluster
    rebuilds = REBUILDS if cluster is None else cluster.rebuilds
    rebuild = False
    while True:
        try:
            if rebuild:
                await training.runtime.rebuild_learner()
                training.run.event("back", part="learner")
                rebuild = False
            return await train(training)
        except RankError as error:
            rebuild = True
            training.run.event("lost", part="learner", why=str(error))
            if not rebuilds:
                raise
            rebuilds -= 1
            training.view.note("a learner rank was lost; resuming from the last checkpoint")


async def train(training: Training) -> RunState:
    """Run the stages that are left, from the newest checkpoint on."""
    state = await training.restore()
    state = await initial_policy(training, state)
    for stage in training.recipe.rl.stages:
        if stage.name not in state.done and not state.collapsed:
            if stage.difficulty is not None and stage.name not in state.kept:
                state = await hard_problems(training, stage, state)
            state = await rl_stage(training, stage, state)
            await close_stage(training, stage.name, state)
        await conclude(training, stage.name, state)
    return state


async def initial_policy(training: Training, state: RunState) -> RunState:
    """Run SFT if the recipe has it; in both cases evaluate the policy that RL starts from."""
    if training.recipe.sft is not None and SFT not in state.done:
        if not training.recipe.engine.sleep:  # the learner has the GPUs first
            training.runtime.start_serving()
        if training.recipe.evaluation.every and not state.step:
            await stages.evaluation(training, BASE, state)
        state = await stages.sft(training, training.recipe.sft, state)
        await close_stage(training, SFT, state)
    elif training.recipe.sft is None and not state.phase:
        state = state.begin(SFT).finish(SFT)
    await conclude(training, SFT, state)
    return state


# --------------------------------------------------------------------------- RL


async def rl_stage(training: Training, stage: StageConfig, state: RunState) -> RunState:
    """Run one RL stage until its steps are done, its metric is flat or training collapses."""
    recipe, rl = training.recipe, training.recipe.rl
    if state.phase != stage.name:
        await training.start_optimizer(stage)
    state = state.begin(stage.name)
    training.view.stage(stage.name, StageKind.RL, stage.steps, state.step)
    await training.publish(state.version)
    collector = make_collector(training, stage, problems_of(training, stage, state))
    training.runtime.fleet.take_usage()
    if recipe.minutes is not None and state.begun_s is None:
        state = replace(state, begun_s=training.run_seconds())
    end_s, durations, fitted = end_of_stage(training, stage, state), list[float](), stage.steps
    try:
        while not stage_complete(stage, state) and not state.collapsed and state.step < fitted:
            started = monotonic()
            state = await rl_step(training, stage, state, collector)
            durations.append(monotonic() - started)
            if end_s is not None:
                fitted = fit_steps(training, stage, state.step, durations, end_s)
            if state.step < stage.steps and state.step % recipe.record.checkpoint_every == 0:
                await training.save(state)
            if rl.collapse and state.window.best_step == state.rl_steps:
                await training.keep_best(state)
    except asyncio.CancelledError:  # Ctrl-C: keep the steps since the last checkpoint
        await training.save_if_newer(state)
        raise
    finally:
        await collector.close()
    if state.step < stage.steps and not state.collapsed:
        record_early_end(training, stage, state)
    return state.finish(stage.name)


def record_early_end(training: Training, stage: StageConfig, state: RunState) -> None:
    """Record why a stage ended before its last step: its metric is flat, or its time is over."""
    after = f"after {state.step} of {stage.steps} steps"
    if stage_complete(stage, state):
        training.view.note(f"{stage.name}: plateau {after}")
        training.run.event("plateau", stage=stage.name, step=state.step, values=state.recent)
    else:
        training.view.note(f"{stage.name}: out of time {after}")
        minutes = training.recipe.minutes
        training.run.event("budget", stage=stage.name, step=state.step, minutes=minutes)


def end_of_stage(training: Training, stage: StageConfig, state: RunState) -> float | None:
    """The run second at which a time budget ends a stage; None without a budget."""
    recipe = training.recipe
    if recipe.minutes is None or state.begun_s is None:
        return None
    last = read_evaluations(training.run.path)[-len(stages.evaluation_modes(recipe.evaluation)) :]
    return stage_end(
        recipe.rl.stages,
        stage.name,
        now_s=state.begun_s,
        budget_s=60 * recipe.minutes,
        evaluation_s=max((evaluation.wall_s for evaluation in last), default=0.0),
    )


def fit_steps(
    training: Training, stage: StageConfig, done: int, durations: Sequence[float], end_s: float
) -> int:
    """How many steps a stage will have within its time; the view shows it."""
    now_s = training.run_seconds()
    fitted = fitted_steps(stage.steps, done, durations, now_s=now_s, end_s=end_s)
    training.view.steps(fitted)
    if len(durations) == 1:
        training.view.note(
            f"{stage.name}: a step takes about {durations[0]:.0f} s, so {fitted} of {stage.steps} "
            f"steps fit into the {training.recipe.minutes:g} minutes"
        )
    return fitted


async def rl_step(
    training: Training, stage: StageConfig, state: RunState, collector: LookaheadCollector
) -> RunState:
    """Collect, resample, learn, publish: the step is recorded and served when this returns."""
    rl, step, runtime = training.recipe.rl, state.step + 1, training.runtime
    started = monotonic()
    collected = await collector.collect(step, state.position, state.version)
    collected_at = monotonic()
    uses = runtime.fleet.take_usage()
    resampled = resample(step, collected, rl, roc_seed(training, stage, step))
    async with runtime.changing_weights():
        learned = await training.learn(stage.name, resampled)
        version = state.version if learned is None else state.version + 1
        learned_at = monotonic()
        published = await training.publish(version)
    times = StepTimes(
        collect_s=collected_at - started,
        learn_s=learned_at - collected_at,
        publish_s=monotonic() - learned_at,
        overlapped=rl.staleness > 0 and not training.recipe.deterministic,
    )
    metrics = step_metrics(collected, resampled.selections, learned, times)
    metrics |= usage_metrics(uses) | engine_metrics(uses) | published
    metrics |= staleness_metrics(collected, state.version)
    if stages.evaluation_due(training, stage, step, state.rl_steps + 1):
        metrics |= await stages.evaluation_metrics(training, stage.name, step)
        runtime.fleet.take_usage()  # the next step's metrics are of its own rollouts
    state = replace(
        state,
        step=step,
        rl_steps=state.rl_steps + 1,
        position=collected.position,
        version=version,
    )
    state = watch_plateau(stage, watch_collapse(training, state, metrics), metrics)
    training.run.metrics(stage.name, step, metrics)
    training.view.step(step, metrics)
    return state


def make_collector(
    training: Training, stage: StageConfig, problems: Sequence[Problem]
) -> LookaheadCollector:
    """The stage's collector; it refills groups from which resampling keeps equal rewards."""
    rl, runtime = training.recipe.rl, training.runtime

    def group_teaches(step: int, group: Group) -> bool:
        seed = roc_seed(training, stage, step)
        cost = rl.reward.tool_errors
        return (group.informative or cost > 0) and teaches(
            select(group, rl.roc, seed, tool_errors=cost)
        )

    def on_progress(step: int, done: int, total: int) -> None:
        if step == lookahead.step:
            training.view.progress(done, total, "groups")

    collector = Collector(
        runtime.runner,
        problems,
        rl,
        stage,
        seed=training.recipe.seed,
        teaches=group_teaches,
        on_progress=on_progress,
        version=lambda: runtime.fleet.scheduler.version,
        slot=GroupSlots(training.recipe.groups_in_flight).acquire,
        refill_below=training.recipe.refill_below,
    )
    lookahead = LookaheadCollector(
        collector,
        staleness=rl.staleness,
        last=stage.steps,
        overlap=not training.recipe.deterministic,
    )
    return lookahead


def roc_seed(training: Training, stage: StageConfig, step: int) -> int:
    """The seed of a step's resampling."""
    return derive_seed(training.recipe.seed, stage.name, step, "roc")


def problems_of(training: Training, stage: StageConfig, state: RunState) -> Sequence[Problem]:
    """The problems of a stage: all, or those that its difficulty filter kept."""
    problems = training.runtime.problems
    kept = state.kept.get(stage.name) if stage.difficulty else None
    if kept is None:
        return problems
    if not kept:
        training.view.note(
            f"{stage.name}: every problem is always solved; the stage uses all problems"
        )
        return problems
    return [problems[index] for index in kept]


def watch_collapse(training: Training, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """Mark training as collapsed if the recipe watches for it and this step shows it."""
    config = training.recipe.rl.collapse
    if config is None or "entropy" not in metrics:
        return state
    window, reason = detect_collapse(
        state.window,
        config,
        step=state.rl_steps,
        reward=metrics["reward"],
        entropy=metrics["entropy"],
        format_share=1.0 - metrics["no_answer"],
    )
    if reason:
        training.view.note(f"training collapsed: {reason}")
        training.run.event(
            "collapsed", reason=reason, rl_step=state.rl_steps, best=window.best_step
        )
    return replace(state, window=window, collapsed=reason)


# --------------------------------------------------------------------------- end of a stage


async def close_stage(training: Training, stage: str, state: RunState) -> None:
    """Save and export the result of a complete stage."""
    await training.save(state)
    await training.export(stage)
    training.run.event("stage", stage=stage, step=state.step, version=state.version)


async def conclude(training: Training, stage: str, state: RunState) -> None:
    """Evaluate a stage if the current weights are its weights; earlier stages are recorded."""
    if state.phase != stage:
        return
    trained = stage in state.done and (stage != SFT or training.recipe.sft is not None)
    if trained and not (training.run.path / "exports" / stage).exists():
        await training.export(stage)  # the run was killed between saving and exporting
    await stages.evaluation(training, stage, state)
    if trained:
        training.describe(stage)

"""What the controller strings together: SFT, RL, difficulty filter, evaluation.

Each takes the state after the last completed step and returns the state after its own; it records
a step only when the step is complete, and saves by `desk.save` what a resumed run starts from.
What is drawn and how it is sampled depends on the recipe's seed and the state alone, so a step that
is done again after a crash is the same step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import msgspec

from rstar2.agent.loop import RolloutSpec
from rstar2.config import OptimizerConfig, Recipe, SamplingConfig, SftConfig, StageConfig
from rstar2.evaluate.run import GREEDY, answer_all, evaluate
from rstar2.files import write_file
from rstar2.grpo.batch import make_batch
from rstar2.pipeline.collapse import watch
from rstar2.pipeline.figures import Clock, engine_metrics, staleness_metrics, step_metrics
from rstar2.pipeline.parts import Parts
from rstar2.pipeline.state import State
from rstar2.pipeline.view import StageKind, View
from rstar2.problems.conversations import batches, held_out, sft_steps
from rstar2.problems.difficulty import difficulty
from rstar2.record import RunDirectory, evaluation_stage, filter_stage
from rstar2.rollout.ahead import Ahead, Places
from rstar2.rollout.collector import Collected, Collector
from rstar2.rollout.fleet import total_use
from rstar2.rollout.groups import together
from rstar2.types import Conversation, Evaluation, Group, Problem

log = logging.getLogger(__name__)

SFT = "sft"
SFT_HELDOUT = 64
"""Conversations in the held-out loss."""
SFT_SAVE_EVERY = 100

Row = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Desk:
    """What every stage works with."""

    recipe: Recipe
    run: RunDirectory
    view: View
    parts: Parts
    save: Callable[[State], None]
    keep_best: Callable[[State], None]


# --------------------------------------------------------------------------- SFT


async def sft(desk: Desk, config: SftConfig, state: State) -> State:
    """Teach the format. Batches are tokenised while the learner works on the one before."""
    learner, total = desk.parts.learner, sft_steps(config)
    state = state.begin(SFT)
    if state.step == 0:
        await desk.parts.learn(learner.reset_optimizer, config.optimizer, total)
    desk.view.stage(SFT, StageKind.SFT, total, state.step)
    heldout = [row for c in held_out(config, SFT_HELDOUT) if (row := sft_row(desk, config, c))]
    stream = batches(config, desk.recipe.seed, first=state.step)
    rows = sft_rows(desk, config, next(stream, ()))
    while state.step < total:
        started = monotonic()
        step = state.step + 1
        work = asyncio.ensure_future(desk.parts.learn(learner.sft_step, rows))
        await asyncio.sleep(0)  # let the learner begin before the next batch is tokenised
        rows = sft_rows(desk, config, next(stream, ()))
        metrics = await work
        desk.parts.check()
        if config.eval_every and heldout and step % config.eval_every == 0:
            metrics["heldout_loss"] = await desk.parts.learn(learner.sft_loss, heldout)
        metrics["time/step"] = monotonic() - started
        state = replace(state, step=step, sft_steps=step)
        desk.run.metrics(SFT, step, metrics)
        desk.view.step(step, metrics)
        if step % SFT_SAVE_EVERY == 0 and step < total:
            await desk.parts.learn(desk.save, state)
    return replace(state.finish(SFT), version=state.version + 1)


def sft_rows(desk: Desk, config: SftConfig, conversations: Sequence[Conversation]) -> list[Row]:
    """Tokens and masks of a batch; conversations that teach nothing within the length are out."""
    return [row for c in conversations if (row := sft_row(desk, config, c)) is not None]


def sft_row(desk: Desk, config: SftConfig, conversation: Conversation) -> Row | None:
    """One conversation, cut at the longest length; None if no trained token is left."""
    ids, mask = desk.parts.template.conversation_ids(conversation)
    ids, mask = ids[: config.max_length], mask[: config.max_length]
    return (ids, mask) if any(mask[1:]) else None


# --------------------------------------------------------------------------- difficulty filter


async def hard_problems(desk: Desk, stage: StageConfig, state: State) -> State:
    """Let the current policy answer every problem and keep those it does not always solve.

    The outcome is written to a file that names the weights it holds for, so that a run killed
    later does not answer them all again.
    """
    assert stage.difficulty is not None
    file = desk.run.path / f"{filter_stage(stage.name)}.json"
    known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    if known.get("version") != state.version:
        name, problems = filter_stage(stage.name), desk.parts.problems
        desk.view.stage(name, StageKind.FILTER, len(problems))
        runner, _ = await desk.parts.serve(state.version)
        groups = await answer_all(
            runner,
            problems,
            name=name,
            step=1,
            seed=desk.recipe.seed,
            samples=stage.difficulty.samples,
            spec=RolloutSpec(desk.recipe.rl.sampling, stage.max_length, stage.max_turns),
            on_problem=lambda done, total: desk.view.progress(done, total, "problems"),
        )
        found = difficulty(groups)
        for group in groups:
            desk.run.trajectories(name, 1, group)
        desk.run.metrics(name, 1, found.metrics())
        known = {"version": state.version, "kept": found.kept}
        write_file(file, msgspec.json.encode(known))
    kept = tuple(known["kept"])
    desk.view.note(f"{stage.name}: {len(kept)} of {len(desk.parts.problems)} problems are hard")
    return replace(state, kept={**state.kept, stage.name: kept})


# --------------------------------------------------------------------------- RL


async def rl(desk: Desk, stage: StageConfig, state: State) -> State:
    """One RL stage: collect, resample, learn, publish, until its steps are done.

    With staleness k, up to k further steps are collected while one is learnt.
    """
    recipe, rl_config = desk.recipe, desk.recipe.rl
    if state.phase != stage.name:
        await start_optimizer(desk, stage)
    state = state.begin(stage.name)
    desk.view.stage(stage.name, StageKind.RL, stage.steps, state.step)
    runner, _ = await desk.parts.serve(state.version)
    collector = Collector(
        runner,
        problems_of(desk, stage, state),
        rl_config,
        stage,
        seed=recipe.seed,
        on_group=lambda done, total: desk.view.progress(done, total, "groups"),
        version=lambda: desk.parts.fleet.scheduler.version,
        place=Places(rl_config.prompts_per_step).one,
    )
    desk.parts.fleet.take_use()
    ahead = Ahead(collector, staleness=rl_config.staleness, last=stage.steps)
    try:
        while state.step < stage.steps and not state.collapsed:
            state = await rl_step(desk, stage, state, ahead)
            if state.step < stage.steps and state.step % recipe.record.checkpoint_every == 0:
                await desk.parts.learn(desk.save, state)
            if rl_config.collapse and state.window.best_step == state.rl_steps:
                await desk.parts.learn(desk.keep_best, state)
    finally:
        await ahead.close()
    return state.finish(stage.name)


async def rl_step(desk: Desk, stage: StageConfig, state: State, ahead: Ahead) -> State:
    """One step; complete, recorded and served when it returns."""
    rl_config, step = desk.recipe.rl, state.step + 1
    started = monotonic()
    collected = await ahead.take(step, state.position, state.version)
    learned = monotonic()
    uses = desk.parts.fleet.take_use()
    use = total_use(uses) | engine_metrics(uses)
    async with desk.parts.changing():
        metrics = await learn_from(desk, stage.name, step, collected)
        version = state.version + bool(metrics)
        published = monotonic()
        _, publishing = await desk.parts.serve(version)
    ended = monotonic()
    clock = Clock(
        learned - started, published - learned, ended - published, rl_config.staleness > 0
    )
    metrics = step_metrics(collected, metrics, clock) | use | publishing
    metrics |= staleness_metrics(collected, state.version)
    state = replace(
        state,
        step=step,
        rl_steps=state.rl_steps + 1,
        position=collected.position,
        version=version,
    )
    state = watch_collapse(desk, state, metrics)
    desk.run.metrics(stage.name, step, metrics)
    desk.view.step(step, metrics)
    return state


async def learn_from(desk: Desk, stage: str, step: int, collected: Collected) -> dict[str, float]:
    """Train on what was collected, and record it meanwhile; empty if it teaches nothing."""
    rl_config, learner = desk.recipe.rl, desk.parts.learner
    batch = make_batch(step, collected.pairs, rl_config.loss)
    if not batch.samples:
        record_groups(desk, stage, step, collected)
        desk.view.note(f"{stage} step {step}: every group had equal rewards, nothing to learn")
        return {}
    work = asyncio.ensure_future(
        desk.parts.learn(learner.rl_step, batch, rl_config.loss, rl_config.minibatches)
    )
    await asyncio.sleep(0)  # let the learner begin before the record is written
    record_groups(desk, stage, step, collected)
    metrics = await work
    if desk.recipe.record.tokens:
        values = await desk.parts.learn(learner.token_values)
        desk.run.tokens(stage, step, values)
    return metrics


def record_groups(desk: Desk, stage: str, step: int, collected: Collected) -> None:
    """Write the step's groups, those that were not used included."""
    for drawn in collected.drawn:
        desk.run.trajectories(stage, step, drawn.group, drawn.selection if drawn.used else None)


async def start_optimizer(desk: Desk, stage: StageConfig) -> None:
    """A stage's learning rate; fresh moments at the first stage and where the recipe says so."""
    rl_config = desk.recipe.rl
    config: OptimizerConfig = rl_config.optimizer
    if stage.lr is not None:
        config = config.model_copy(update={"lr": stage.lr})
    first = stage.name == rl_config.stages[0].name
    updates = sum(s.steps for s in rl_config.stages) * rl_config.minibatches
    if first or stage.reset_optimizer:
        await desk.parts.learn(desk.parts.learner.reset_optimizer, config, updates)
    else:
        await desk.parts.learn(desk.parts.learner.retune, config, updates)


def problems_of(desk: Desk, stage: StageConfig, state: State) -> Sequence[Problem]:
    """The problems of a stage: all, or those that its filter kept."""
    kept = state.kept.get(stage.name) if stage.difficulty else None
    if kept is None:
        return desk.parts.problems
    if not kept:
        desk.view.note(f"{stage.name}: every problem is solved every time; all of them are used")
        return desk.parts.problems
    return [desk.parts.problems[index] for index in kept]


def watch_collapse(desk: Desk, state: State, metrics: dict[str, float]) -> State:
    """Stop training that fell off a cliff, if the recipe asks for it."""
    config = desk.recipe.rl.collapse
    if config is None or "entropy" not in metrics:
        return state
    window, reason = watch(
        state.window,
        config,
        step=state.rl_steps,
        reward=metrics["reward"],
        entropy=metrics["entropy"],
        format_share=1.0 - metrics["no_answer"],
    )
    if reason:
        desk.view.note(f"training collapsed: {reason}")
        desk.run.event("collapsed", reason=reason, rl_step=state.rl_steps, best=window.best_step)
    return replace(state, window=window, collapsed=reason)


# --------------------------------------------------------------------------- evaluation


async def evaluation(desk: Desk, stage: str, state: State) -> None:
    """Answer the held-out problems in every mode that is not on record yet."""
    config = desk.recipe.evaluation
    modes: dict[str, tuple[SamplingConfig, int]] = {
        "sampled": (SamplingConfig(temperature=config.temperature), config.samples)
    }
    if config.greedy:
        modes = {"greedy": (GREEDY, 1), **modes}
    missing = {m: how for m, how in modes.items() if desk.run.evaluated(stage, m) is None}
    if not missing:
        return
    problems = desk.parts.heldout
    total = len(problems) * len(missing)
    desk.view.stage(f"eval-{stage}", StageKind.EVALUATION, total)
    runner, _ = await desk.parts.serve(state.version)
    progress = dict.fromkeys(missing, 0)

    async def one(mode: str, sampling: SamplingConfig, samples: int) -> tuple[Evaluation, Any]:
        def on_problem(done: int, _: int) -> None:
            progress[mode] = done
            desk.view.progress(sum(progress.values()), total, "problems")

        spec = RolloutSpec(sampling, config.max_length, config.max_turns)
        return await evaluate(
            runner,
            problems,
            stage=stage,
            step=state.step,
            mode=mode,
            seed=desk.recipe.seed,
            samples=samples,
            spec=spec,
            on_problem=on_problem,
        )

    results = await together(one(mode, *how) for mode, how in missing.items())
    for made, groups in results:
        record_evaluation(desk, made, groups)


def record_evaluation(desk: Desk, made: Evaluation, groups: Sequence[Group]) -> None:
    """Rollouts first, figures last: an evaluation on record is complete."""
    name = evaluation_stage(made.stage, made.mode)
    for group in groups:
        desk.run.trajectories(name, made.step, group)
    desk.run.evaluation(made)
    desk.view.evaluation(made)

"""The stages around RL: SFT and evaluation (`difficulty_filter` has the filter).

Each takes the state after the last completed step and returns the state after its own. It records
a step only when the step is complete, and saves a checkpoint with `Training.save`. Problems and
samples depend on the recipe's seed and the state alone, so a step that is repeated after a crash is
the same step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.prompts import shown_conversation
from rstar2.config import EvaluationConfig, SamplingConfig, SftConfig, StageConfig
from rstar2.errors import InfrastructureError, RecipeError
from rstar2.evaluate.run import GREEDY, evaluate, groups_at_once, without_values
from rstar2.pipeline.progress import StageKind
from rstar2.pipeline.state import RunState
from rstar2.pipeline.training import SFT, Training
from rstar2.problems.conversations import MakeConversations, batches, held_out, sft_steps
from rstar2.record import evaluation_stage
from rstar2.record.read import problem_number, stage_label
from rstar2.tasks import to_the_end, together
from rstar2.types import Conversation, Evaluation, Group

if TYPE_CHECKING:
    from rstar2.learner.sft_loss import SftRow

SFT_HELDOUT = 64
"""Conversations in the held-out loss."""
SFT_SAVE_EVERY = 100


# --------------------------------------------------------------------------- SFT


async def sft(training: Training, config: SftConfig, state: RunState) -> RunState:
    """Teach the format. Each batch is tokenised while the learner trains on the previous one."""
    learner, total = training.runtime.learner, sft_steps(config)
    state = state.begin(SFT)
    training.runtime.tolerance.forget()
    await training.runtime.use_gpus_to_learn()
    if state.step == 0:
        await training.runtime.on_learner(learner.reset_optimizer, config.optimizer, total)
    training.view.stage(SFT, StageKind.SFT, total, state.step)
    show = demonstrations(training)
    unseen = held_out(config, SFT_HELDOUT, demonstrations=show)
    heldout = [row for c in unseen if (row := sft_row(training, config, c))]
    stream = batches(config, training.recipe.seed, first=state.step, demonstrations=show)
    rows = sft_rows(training, config, next(stream, ()))
    if not rows and state.step < total:
        raise RecipeError(
            f"environment {training.runtime.environment.name} has no demonstrations for SFT: leave "
            "SFT out with `sft: null`, or give conversations with sft.data"
        )

    async def one_step() -> None:
        nonlocal state, rows
        started = monotonic()
        step = state.step + 1
        work = asyncio.ensure_future(training.runtime.on_learner(learner.sft_step, rows))
        await asyncio.sleep(0)  # the learner starts before the next batch is tokenised
        rows = sft_rows(training, config, next(stream, ()))
        metrics = await work
        training.runtime.check()
        if config.eval_every and heldout and step % config.eval_every == 0:
            metrics["heldout_loss"] = await training.runtime.on_learner(learner.sft_loss, heldout)
        metrics["time/step"] = monotonic() - started
        state = replace(state, step=step, sft_steps=step)
        training.run.metrics(SFT, step, metrics)
        training.view.step(step, metrics)

    try:
        while state.step < total:
            await to_the_end(one_step())
            if state.step % SFT_SAVE_EVERY == 0 and state.step < total:
                await training.save(state)
    except asyncio.CancelledError:  # Ctrl-C: the step that the learner had begun is complete
        if state.step:
            await training.save_if_newer(state)
        raise
    return replace(state.finish(SFT), version=state.version + 1)


def demonstrations(training: Training) -> MakeConversations:
    """The environment's demonstrations, with the system message and tools as rollouts have them."""
    environment, config = training.runtime.environment, training.recipe.template
    return lambda count, seed: (
        shown_conversation(conversation, config)
        for conversation in environment.demonstrations(count, seed)
    )


def sft_rows(
    training: Training, config: SftConfig, conversations: Sequence[Conversation]
) -> list[SftRow]:
    """Tokens and masks of a batch, without conversations that have no trained token."""
    return [row for c in conversations if (row := sft_row(training, config, c)) is not None]


def sft_row(training: Training, config: SftConfig, conversation: Conversation) -> SftRow | None:
    """One conversation, cut to the maximum length; None if no trained token is left."""
    ids, mask = training.runtime.template.conversation_ids(conversation)
    ids, mask = ids[: config.max_length], mask[: config.max_length]
    return (ids, mask) if any(mask[1:]) else None


# --------------------------------------------------------------------------- evaluation


Mode = tuple[SamplingConfig, int]
"""How answers are sampled, and how many for each problem."""


def evaluation_modes(config: EvaluationConfig) -> dict[str, Mode]:
    """The modes of an evaluation by name."""
    sampled = {"sampled": (SamplingConfig(temperature=config.temperature), config.samples)}
    return {"greedy": (GREEDY, 1), **sampled} if config.greedy else sampled


async def evaluation(training: Training, stage: str, state: RunState) -> None:
    """Answer the held-out problems in every mode that has no recorded evaluation."""
    modes = evaluation_modes(training.recipe.evaluation)
    missing = {m: how for m, how in modes.items() if training.run.evaluated(stage, m) is None}
    if not missing:
        return
    total = len(training.runtime.heldout) * len(missing)
    training.view.stage(f"eval-{shown_stage(training, stage)}", StageKind.EVALUATION, total)
    await training.publish(state.version)
    for result in await answer_heldout(training, stage, state.step, missing, recorded=True):
        training.run.evaluation(result)
        training.view.evaluation(replace(result, stage=shown_stage(training, result.stage)))


def evaluation_due(training: Training, stage: StageConfig, step: int, rl_steps: int) -> bool:
    """Whether a step is followed by an evaluation; the last step of a stage always has its own."""
    every = training.recipe.evaluation.every
    return bool(every) and rl_steps % every == 0 and step < stage.steps


async def evaluation_metrics(training: Training, stage: str, step: int) -> dict[str, float]:
    """Evaluate the weights that are served now; figures for the metrics of the step.

    Seeds do not depend on the step, so that a curve compares answers to the same draws.
    """
    started = monotonic()
    modes = evaluation_modes(training.recipe.evaluation)
    metrics: dict[str, float] = {}
    for result in await answer_heldout(training, stage, step, modes):
        metrics[f"evaluation/{result.mode}"] = result.accuracy.mean
        metrics[f"evaluation/{result.mode}_length"] = result.mean_length
        if result.failing_calls_in_correct is not None:
            name = f"evaluation/{result.mode}_failing_calls_in_correct"
            metrics[name] = result.failing_calls_in_correct
    if not all(map(math.isfinite, metrics.values())):
        raise InfrastructureError(f"evaluation at step {step} of {stage}: nothing could be graded")
    shown = ", ".join(f"{mode} {100 * metrics[f'evaluation/{mode}']:.1f}%" for mode in modes)
    training.view.note(f"{stage} step {step}: {shown} on held-out problems")
    metrics["time/evaluate"] = monotonic() - started
    return metrics


async def answer_heldout(
    training: Training, stage: str, step: int, modes: Mapping[str, Mode], *, recorded: bool = False
) -> list[Evaluation]:
    """Answer the held-out problems in some modes, all modes at once.

    If `recorded`, rollouts are written as they end, and what an interrupted evaluation has written
    is not answered again. The caller records the evaluation last: without it they count as
    incomplete.
    """
    config, problems = training.recipe.evaluation, training.runtime.heldout
    done = 0

    async def one(mode: str, how: Mode) -> Evaluation:
        nonlocal done
        name = evaluation_stage(stage, mode)
        answered = training.run.resume_groups(name) if recorded else ()
        before = {problem_number(group.id): without_values(group) for group in answered}
        done += len(before)

        def on_group(index: int, group: Group) -> None:
            nonlocal done
            done += 1
            training.view.progress(done, len(problems) * len(modes), "problems")
            if recorded:
                training.run.trajectories(name, step, group)
                training.run.flush()

        sampling, samples = how
        spec = RolloutSpec(sampling, config.max_length, config.max_turns)
        return await evaluate(
            training.runtime.runner,
            problems,
            stage=stage,
            step=step,
            mode=mode,
            seed=training.recipe.seed,
            samples=samples,
            spec=spec,
            at_once=groups_at_once(training.recipe, samples),
            on_group=on_group,
            before=before,
        )

    return await together(one(mode, how) for mode, how in modes.items())


def shown_stage(training: Training, stage: str) -> str:
    """The name of an evaluated stage in the terminal."""
    return stage_label({"sft": training.recipe.sft}, stage)

"""The stages around RL: SFT, the difficulty filter, evaluation.

Each takes the state after the last completed step and returns the state after its own. It records
a step only when the step is complete, and saves a checkpoint with `Training.save`. Problems and
samples depend on the recipe's seed and the state alone, so a step that is repeated after a crash is
the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import msgspec

from rstar2.agent.loop import RolloutSpec
from rstar2.config import SamplingConfig, SftConfig, StageConfig
from rstar2.evaluate.run import GREEDY, answer_all, evaluate
from rstar2.files import write_file
from rstar2.learner.learner import SftRow
from rstar2.pipeline.progress import StageKind
from rstar2.pipeline.state import RunState
from rstar2.pipeline.training import SFT, Training
from rstar2.problems.conversations import batches, held_out, sft_steps
from rstar2.problems.model_filters import difficulty
from rstar2.record import evaluation_stage, filter_stage
from rstar2.rollout.groups import together
from rstar2.types import Conversation, Evaluation, Group

SFT_HELDOUT = 64
"""Conversations in the held-out loss."""
SFT_SAVE_EVERY = 100


# --------------------------------------------------------------------------- SFT


async def sft(training: Training, config: SftConfig, state: RunState) -> RunState:
    """Teach the format. Each batch is tokenised while the learner trains on the previous one."""
    learner, total = training.runtime.learner, sft_steps(config)
    state = state.begin(SFT)
    if state.step == 0:
        await training.runtime.on_learner(learner.reset_optimizer, config.optimizer, total)
    training.view.stage(SFT, StageKind.SFT, total, state.step)
    heldout = [row for c in held_out(config, SFT_HELDOUT) if (row := sft_row(training, config, c))]
    stream = batches(config, training.recipe.seed, first=state.step)
    rows = sft_rows(training, config, next(stream, ()))
    while state.step < total:
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
        if step % SFT_SAVE_EVERY == 0 and step < total:
            await training.save(state)
    return replace(state.finish(SFT), version=state.version + 1)


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


# --------------------------------------------------------------------------- difficulty filter


async def hard_problems(training: Training, stage: StageConfig, state: RunState) -> RunState:
    """Let the current policy answer every problem and keep those that it does not always solve.

    The result is written to a file with the version of the weights, so that a resumed run does not
    answer all problems again.
    """
    assert stage.difficulty is not None
    file = training.run.path / f"{filter_stage(stage.name)}.json"
    known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    if known.get("version") != state.version:
        name, problems = filter_stage(stage.name), training.runtime.problems
        training.view.stage(name, StageKind.FILTER, len(problems))
        await training.publish(state.version)
        groups = await answer_all(
            training.runtime.runner,
            problems,
            name=name,
            step=1,
            seed=training.recipe.seed,
            samples=stage.difficulty.samples,
            spec=RolloutSpec(training.recipe.rl.sampling, stage.max_length, stage.max_turns),
            on_problem=lambda done, total: training.view.progress(done, total, "problems"),
        )
        result = difficulty(groups)
        for group in groups:
            training.run.trajectories(name, 1, group)
        training.run.metrics(name, 1, result.metrics())
        known = {"version": state.version, "kept": result.kept}
        write_file(file, msgspec.json.encode(known))
    kept = tuple(known["kept"])
    training.view.note(
        f"{stage.name}: {len(kept)} of {len(training.runtime.problems)} problems are hard"
    )
    return replace(state, kept={**state.kept, stage.name: kept})


# --------------------------------------------------------------------------- evaluation


async def evaluation(training: Training, stage: str, state: RunState) -> None:
    """Answer the held-out problems in every mode that has no recorded evaluation."""
    config = training.recipe.evaluation
    modes: dict[str, tuple[SamplingConfig, int]] = {
        "sampled": (SamplingConfig(temperature=config.temperature), config.samples)
    }
    if config.greedy:
        modes = {"greedy": (GREEDY, 1), **modes}
    missing = {m: how for m, how in modes.items() if training.run.evaluated(stage, m) is None}
    if not missing:
        return
    problems = training.runtime.heldout
    total = len(problems) * len(missing)
    training.view.stage(f"eval-{stage}", StageKind.EVALUATION, total)
    await training.publish(state.version)
    progress = dict.fromkeys(missing, 0)

    async def one(
        mode: str, sampling: SamplingConfig, samples: int
    ) -> tuple[Evaluation, tuple[Group, ...]]:
        def on_problem(done: int, _: int) -> None:
            progress[mode] = done
            training.view.progress(sum(progress.values()), total, "problems")

        spec = RolloutSpec(sampling, config.max_length, config.max_turns)
        return await evaluate(
            training.runtime.runner,
            problems,
            stage=stage,
            step=state.step,
            mode=mode,
            seed=training.recipe.seed,
            samples=samples,
            spec=spec,
            on_problem=on_problem,
        )

    results = await together(one(mode, *how) for mode, how in missing.items())
    for result, groups in results:
        record_evaluation(training, result, groups)


def record_evaluation(training: Training, result: Evaluation, groups: Sequence[Group]) -> None:
    """Write the rollouts first, the evaluation last: a recorded evaluation is complete."""
    name = evaluation_stage(result.stage, result.mode)
    for group in groups:
        training.run.trajectories(name, result.step, group)
    training.run.evaluation(result)
    training.view.evaluation(result)

"""One run's training, as the stages use it: resample, learn, publish, and the checkpoints.

A checkpoint holds the pipeline's state together with the learner's, after everything that it
builds on is on disk. `restore` returns to the newest complete one and rewinds the record to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rstar2.config import OptimizerConfig, Recipe, RlConfig, StageConfig
from rstar2.errors import CheckpointError
from rstar2.grpo.batch import make_batch, resample_groups
from rstar2.pipeline.export import write_card
from rstar2.pipeline.progress import ProgressView
from rstar2.pipeline.runtime import Runtime
from rstar2.pipeline.state import RunState
from rstar2.record import MODES, RunDirectory, evaluation_stage
from rstar2.record.solved import unfinished_filters
from rstar2.rollout.collector import CollectedStep
from rstar2.types import Batch, Selection, WeightVersion

if TYPE_CHECKING:
    from rstar2.learner.checkpoint import SavedCheckpoint

BASE = "base"
"""The model before SFT, in evaluations."""
SFT = "sft"
BEST = "best"
ADAPTERS = "adapters"
"""Directory of the run directory with the LoRA adapter of every export."""


@dataclass(frozen=True, slots=True)
class ResampledStep:
    """The groups of one step, the selection of each group that is used, and the batch."""

    collected: CollectedStep
    selections: tuple[Selection, ...]
    """In the order of `collected.groups`."""
    batch: Batch


def resample(step: int, collected: CollectedStep, rl: RlConfig, seed: int) -> ResampledStep:
    """Select G of the 2G rollouts of every used group and make the batch. Pure."""
    selections = resample_groups(collected.groups, rl.roc, seed, tool_errors=rl.reward.tool_errors)
    pairs = zip(collected.groups, selections, strict=True)
    return ResampledStep(collected, selections, make_batch(step, pairs, rl.loss, rl.advantage))


def scheduled_updates(rl: RlConfig, name: str) -> int:
    """Optimizer updates of the schedule that a stage is part of.

    A schedule starts with the first stage and with every stage that resets the optimizer.
    """
    here = [stage.name for stage in rl.stages].index(name)
    starts = [i for i, stage in enumerate(rl.stages) if stage.reset_optimizer or i == 0]
    first = max(i for i in starts if i <= here)
    end = min((i for i in starts if i > here), default=len(rl.stages))
    return sum(stage.steps for stage in rl.stages[first:end]) * rl.minibatches


class Training:
    """A recipe, its run directory and view, and the processes that carry it out."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        view: ProgressView,
        runtime: Runtime,
        started: float | None = None,
    ) -> None:
        """`started` is when this process began to work on the run (`monotonic`); default: now."""
        from rstar2.learner.checkpoint import CheckpointStore  # torch: the runtime has loaded it

        self.recipe, self.run, self.view, self.runtime = recipe, run, view, runtime
        self.checkpoints = CheckpointStore(run.path / "checkpoints", recipe.record.keep_checkpoints)
        self._saved: int | None = None
        """Ordinal of the last state that was saved or loaded."""
        self._learned: int | None = None
        """Number of the RL step whose batch the learner has received last."""
        self._started = monotonic() if started is None else started
        self._spent_s: float | None = None
        """Seconds that earlier processes worked on the run; None before `restore`."""

    # ------------------------------------------------------------------ learn and publish

    async def start_optimizer(self, stage: StageConfig) -> None:
        """Set a stage's learning rate; the first stage and `reset_optimizer` start new moments."""
        rl, learner = self.recipe.rl, self.runtime.learner
        config: OptimizerConfig = rl.optimizer
        if stage.lr is not None:
            config = config.model_copy(update={"lr": stage.lr})
        updates = scheduled_updates(rl, stage.name)
        fresh = stage.reset_optimizer or stage.name == rl.stages[0].name
        start = learner.reset_optimizer if fresh else learner.retune
        await self.runtime.on_learner(start, config, updates)

    async def learn(self, stage: str, resampled: ResampledStep) -> dict[str, float] | None:
        """Train on a step's batch and record its groups at the same time; the learner's metrics.

        None if the batch is empty: no group had different rewards, so the weights stay the same.
        """
        rl, learner, batch = self.recipe.rl, self.runtime.learner, resampled.batch
        self._learned = batch.step
        if not batch.samples:
            self._record_groups(stage, resampled)
            self.view.note(
                f"{stage} step {batch.step}: every group had equal rewards, nothing to learn"
            )
            return None
        await self.runtime.use_gpus_to_learn()
        learning = asyncio.ensure_future(
            self.runtime.on_learner(
                learner.rl_step, batch, rl.loss, rl.minibatches, rl.sampling.temperature
            )
        )
        await asyncio.sleep(0)  # the learner starts before the record is written
        self._record_groups(stage, resampled)
        metrics = await learning
        if self.recipe.record.tokens:
            values = await self.runtime.on_learner(learner.token_values)
            self.run.tokens(stage, batch.step, values)
        return metrics

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        """Make all engines serve the learner's weights as `version`; returns metrics of it."""
        return await self.runtime.publish(version)

    def _record_groups(self, stage: str, resampled: ResampledStep) -> None:
        """Write all groups of a step; those that were used with their selection."""
        selections = {selection.group_id: selection for selection in resampled.selections}
        for drawn in resampled.collected.drawn:
            selection = selections.get(drawn.group.id)
            self.run.trajectories(stage, resampled.batch.step, drawn.group, selection)

    # ------------------------------------------------------------------ checkpoints

    def run_seconds(self) -> float:
        """How long this run has worked, in this process and those before it."""
        return (self._spent_s or 0.0) + monotonic() - self._started

    async def save(self, state: RunState) -> None:
        """Write a checkpoint that a resumed run starts from."""
        if self.recipe.minutes is not None:
            state = replace(state, spent_s=self.run_seconds())

        def save() -> None:
            self.run.sync()  # everything that a checkpoint builds on is on disk before it
            self.checkpoints.save(state.ordinal, self.runtime.learner, state.to_dict())

        await self.runtime.on_learner(save)
        self._saved = state.ordinal
        self.run.event("checkpoint", phase=state.phase, step=state.step)

    async def save_if_newer(self, state: RunState) -> None:
        """Save a state that no checkpoint has, if the learner still has its weights."""
        if state.ordinal != self._saved and self._learned in (None, state.step):
            await self.save(state)
            self.view.note(f"saved step {state.step} of {state.phase}")

    async def restore(self) -> RunState:
        """Load the newest complete checkpoint and rewind the record to it, or start the run."""
        saved = await self._load_latest()
        if saved is None:
            initial = {BASE} if self.recipe.sft is not None else {BASE, SFT}
            self.run.rewind(BASE, 0, keep=_evaluations_of(initial))
            return RunState()
        state = RunState.from_dict(saved.state)
        self._saved, self._learned = state.ordinal, None
        if self._spent_s is None:  # after the loss of a rank, this process has its own time
            self._spent_s = state.spent_s
        if saved.torn:
            self.run.event("damaged", checkpoints=saved.torn, used=saved.path.name)
        for reason in saved.torn:
            self.view.note(f"damaged checkpoint: {reason}; {saved.path.name} is used instead")
        stages = [stage.name for stage in self.recipe.rl.stages]
        keep = unfinished_filters(self.run.path, stages, state.version)
        if state.phase in state.done:  # its evaluation resumes: the checkpoint has its weights
            keep |= _evaluations_of({state.phase})
        self.run.rewind(state.phase, state.step, keep=keep)
        self.view.note(f"resuming after step {state.step} of {state.phase}")
        return state

    async def _load_latest(self) -> SavedCheckpoint | None:
        """Load the newest checkpoint that can be loaded into the learner."""
        from rstar2.learner.checkpoint import TornError

        damaged: list[Path] = []
        while (saved := self.checkpoints.latest(damaged)) is not None:
            phase = RunState.from_dict(saved.state).phase
            if phase not in {SFT, *(stage.name for stage in self.recipe.rl.stages)}:
                raise CheckpointError(f"{saved.path}: this recipe has no stage {phase!r}")
            try:
                await self.runtime.on_learner(self.runtime.learner.load, saved.path)
            except TornError:
                damaged.append(saved.path)
            else:
                break
        return saved

    async def export(self, name: str) -> None:
        """Write the current weights as a model directory that prompts as they were trained."""
        path, runtime = self.run.path / "exports" / name, self.runtime
        tokenizer = await runtime.exported_tokenizer()
        stop_ids = runtime.template.stop_ids
        await runtime.on_learner(runtime.learner.export, path, tokenizer, stop_ids)
        if self.recipe.learner.lora is not None:
            adapter = self.run.path / ADAPTERS / name
            await runtime.on_learner(runtime.learner.export_adapter, adapter)
        self.describe(name)

    def describe(self, name: str) -> None:
        """Write the model card of an export, with the evaluations that are recorded by now."""
        write_card(self.run.path, name, self.run.path / "exports" / name)

    async def keep_best(self, state: RunState) -> None:
        """Export the weights that had the best reward so far."""
        await self.export(BEST)
        self.run.event("best", rl_step=state.rl_steps, reward=state.window.best_reward)


def _evaluations_of(stages: Collection[str]) -> set[str]:
    """The names under which the evaluations of these stages are recorded."""
    return {evaluation_stage(stage, mode) for stage in stages for mode in MODES}

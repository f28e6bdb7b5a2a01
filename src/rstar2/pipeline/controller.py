"""The whole recipe on one page.

    model ──> SFT ──> evaluation
                          │
              ┌───────────┘      for each RL stage (short, longer, hard)
              v
        hard problems?  ── the policy answers each k times; always solved ones go
              │
              v
        collect ──> resample ──> learn ──> publish ──┐    waits for: groups; the learner's thread;
           ^        (2G -> G)     (G)     (v + 1)    │    every engine's probe
           └─────────────────────────────────────────┘
              │
              └──> evaluation ──> export ──> next stage

With staleness 0 nothing overlaps two steps: rollouts of step n + 1 are drawn by the weights of
step n. With staleness k, up to k further steps are collected while one is learnt; weights change
under running rollouts, whose tokens each carry the version that sampled them. Within a step
everything overlaps: rollouts of all groups, their tool calls and their grading.

State moves forward in one place, after a step is complete and recorded; a checkpoint holds that
state together with the learner's. So kill -9 at any moment loses at most the steps since the last
checkpoint, and the same call does them again, with the same seeds. A lost learner rank is the same
without the kill: the group is made anew and the steps since the last checkpoint are done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rstar2.config import Recipe
from rstar2.errors import CheckpointError
from rstar2.learner.checkpoint import CheckpointStore
from rstar2.learner.group import RankError
from rstar2.pipeline import stages
from rstar2.pipeline.parts import Parts, open_parts
from rstar2.pipeline.stages import SFT, Desk
from rstar2.pipeline.state import State
from rstar2.pipeline.view import View
from rstar2.record import RunDirectory, read_evaluations
from rstar2.types import Evaluation

BEST = "best"
REBUILDS = 3
"""How often lost learner ranks of one machine are made anew."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    path: Path
    evaluations: tuple[Evaluation, ...]
    exports: Mapping[str, Path]
    """Model directories by stage, loadable by transformers; `best` if collapse was watched."""
    rl_steps: int
    wall_s: float
    collapsed: str = ""
    """Why training ended early; empty if it did not."""


async def run(recipe: Recipe, run: RunDirectory, view: View) -> Result:
    """Run a recipe in its directory, or go on where an earlier call was stopped."""
    started = monotonic()
    async with open_parts(recipe, run.path, run.event) as parts:
        desk = make_desk(recipe, run, view, parts)
        state = await train_on(desk)
    return Result(
        path=run.path,
        evaluations=tuple(read_evaluations(run.path)),
        exports={p.name: p for p in sorted((run.path / "exports").glob("[!.]*"))},
        rl_steps=state.rl_steps,
        wall_s=monotonic() - started,
        collapsed=state.collapsed,
    )


async def train(desk: Desk) -> State:
    """The stages that are left, from the newest checkpoint on."""
    state = await restore(desk)
    state = await initial_policy(desk, state)
    for stage in desk.recipe.rl.stages:
        if stage.name not in state.done and not state.collapsed:
            if stage.difficulty is not None and stage.name not in state.kept:
                state = await stages.hard_problems(desk, stage, state)
            state = await stages.rl(desk, stage, state)
            await close_stage(desk, stage.name, state)
        await conclude(desk, stage.name, state)
    return state


async def train_on(desk: Desk) -> State:
    """Train; a lost learner rank is made good by a new group, from the last checkpoint on."""
    cluster = desk.recipe.cluster
    rebuilds = REBUILDS if cluster is None else cluster.rebuilds
    whole = True
    while True:
        try:
            if not whole:
                await desk.parts.rebuild_learner()
                desk.run.event("back", part="learner")
                whole = True
            return await train(desk)
        except RankError as error:
            whole = False
            desk.run.event("lost", part="learner", why=str(error))
            if not rebuilds:
                raise
            rebuilds -= 1
            desk.view.note("a learner rank was lost; going on from the last checkpoint")


async def initial_policy(desk: Desk, state: State) -> State:
    """SFT if the recipe has it; either way the policy that RL starts from is evaluated."""
    if desk.recipe.sft is not None and SFT not in state.done:
        desk.parts.start_serving()
        state = await stages.sft(desk, desk.recipe.sft, state)
        await close_stage(desk, SFT, state)
    elif desk.recipe.sft is None and not state.phase:
        state = state.begin(SFT).finish(SFT)
    await conclude(desk, SFT, state)
    return state


async def close_stage(desk: Desk, stage: str, state: State) -> None:
    """A stage is complete: what came out of it is saved and exported."""
    await desk.parts.learn(desk.save, state)
    await desk.parts.learn(export, desk, stage)
    desk.run.event("stage", stage=stage, step=state.step, version=state.version)


async def conclude(desk: Desk, stage: str, state: State) -> None:
    """Evaluate the stage whose weights these are; all of this is on record for earlier ones."""
    if state.phase != stage:
        return
    made = stage in state.done and (stage != SFT or desk.recipe.sft is not None)
    if made and not (desk.run.path / "exports" / stage).exists():
        # killed after saving, before exporting
        await desk.parts.learn(export, desk, stage)
    await stages.evaluation(desk, stage, state)


# --------------------------------------------------------------------------- going on


def make_desk(recipe: Recipe, run: RunDirectory, view: View, parts: Parts) -> Desk:
    """What the stages work with, saving included."""
    store = CheckpointStore(run.path / "checkpoints", recipe.record.keep_checkpoints)

    def save(state: State) -> None:
        run.sync()  # nothing that a checkpoint builds on may be lost with it
        store.save(state.ordinal, parts.learner, state.to_dict())
        run.event("checkpoint", phase=state.phase, step=state.step)

    def keep_best(state: State) -> None:
        export(desk, BEST)
        run.event("best", rl_step=state.rl_steps, reward=state.window.best_reward)

    desk = Desk(recipe, run, view, parts, save, keep_best)
    return desk


async def restore(desk: Desk) -> State:
    """The newest complete checkpoint, with the record cut back to it; else the beginning."""
    store = CheckpointStore(desk.run.path / "checkpoints", desk.recipe.record.keep_checkpoints)
    saved = store.latest()
    if saved is None:
        desk.run.rewind(SFT, 0)
        return State()
    state = State.from_dict(saved.state)
    known = {SFT, *(stage.name for stage in desk.recipe.rl.stages)}
    if state.phase not in known:
        raise CheckpointError(f"{saved.path}: this recipe has no stage {state.phase!r}")
    await desk.parts.learn(desk.parts.learner.load, saved.path)
    desk.run.rewind(state.phase, state.step)
    desk.view.note(f"going on after step {state.step} of {state.phase}")
    return state


def export(desk: Desk, name: str) -> None:
    """Write the current weights as a model directory."""
    path = desk.run.path / "exports" / name
    desk.parts.learner.export(path, desk.parts.tokenizer)

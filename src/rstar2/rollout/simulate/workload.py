"""Workloads for the simulator: drawn from distributions, or read from a recorded run.

A rollout is a prompt and turns; each turn samples tokens, waits for its tools and gets their
response. A workload is drawn from a seed in advance, so that every policy gets the same work.

The paper gives means and limits but no distributions. Assumed here: the length a rollout wants is
log-normal with one factor per problem (some are hard for every rollout) and one per rollout, cut
at the limit; the number of calls is Poisson with a mean that grows with the length; the tokens are
divided between turns by a flat Dirichlet; tool latencies are log-normal, up to a call's deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from rstar2.errors import UserError
from rstar2.record import read_groups, read_recipe
from rstar2.rollout.simulate.model import (
    EngineFit,
    EngineModel,
    MeasuredStep,
    fit_engine,
    from_hardware,
)
from rstar2.types import Trajectory

TOOL_DEADLINE_S = 60.0
"""The code environment stops calls that take longer."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn: tokens to sample, then seconds in tools and the tokens of their response."""

    sampled: int
    tool_s: float = 0.0
    response: int = 0


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One whole rollout; only the simulator and the lower bound see it."""

    id: str
    group: str
    prompt: int
    turns: tuple[TurnPlan, ...]
    limit: int
    truncated: bool = False

    @property
    def tokens(self) -> int:
        """Tokens at its end."""
        return self.prompt + sum(t.sampled + t.response for t in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts and the engines they run on."""

    name: str
    rollouts: tuple[RolloutPlan, ...]
    model: EngineModel
    engines: int
    about: str = ""

    @property
    def max_length(self) -> int:
        return max(rollout.limit for rollout in self.rollouts)


# --------------------------------------------------------------------------- drawn


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The distributions of one RL step's rollouts."""

    name: str
    about: str
    limit: int = 8192
    mean: int = 4000
    """Mean completion tokens before the cut at the limit."""
    problem_sigma: float = 0.45
    rollout_sigma: float = 0.5
    turns: int = 10
    calls: float = 2.7
    tool_s: float = 0.3
    tool_sigma: float = 1.0
    memory_share: float = 0.9
    """Share of each GPU's memory for weights and KV cache (the learner has the rest)."""
    problems: int = 512
    group: int = 32
    engines: int = 16


_LIGHT = {"problem_sigma": 0.15, "rollout_sigma": 0.15, "mean": 5000}
_HEAVY = {"problem_sigma": 0.7, "rollout_sigma": 0.8, "mean": 6000, "limit": 12288}
_SHORT, _AMPLE = 0.3, 0.9
_SLOW, _FAST = 10.0, 0.05


def _grid() -> Iterable[WorkloadShape]:
    """{short, ample} KV x {slow, fast} tools x {light, heavy} tail of lengths."""
    for kv, share in (("short", _SHORT), ("ample", _AMPLE)):
        for tools, seconds in (("slow", _SLOW), ("fast", _FAST)):
            for tail, lengths in (("light", _LIGHT), ("heavy", _HEAVY)):
                yield WorkloadShape(
                    name=f"{kv}-{tools}-{tail}",
                    about=f"KV {kv}, tools of {seconds:g} s, {tail} tail",
                    memory_share=share,
                    tool_s=seconds,
                    **lengths,  # type: ignore[arg-type]
                )


SHAPES: dict[str, WorkloadShape] = {
    shape.name: shape
    for shape in (
        WorkloadShape("stage1", "the paper's first stage, late: 8K, mean about 4K"),
        WorkloadShape(
            "stage2", "the paper's second stage: 12K, mean about 6K", limit=12288, mean=6500
        ),
        WorkloadShape(
            "stage3",
            "the paper's third stage: 12K, mean about 8K, 15 turns",
            limit=12288,
            mean=9500,
            turns=15,
            calls=3.5,
        ),
        *_grid(),
    )
}


def draw_workload(shape: WorkloadShape, seed: int, *, scale: float = 1.0) -> Workload:
    """Draw the rollouts of one step; `scale` multiplies both problems and engines."""
    engines = max(1, round(shape.engines * scale))
    problems = max(1, round(shape.problems * engines / shape.engines))
    rng = np.random.default_rng([seed, sum(shape.name.encode())])
    sigma = (shape.problem_sigma**2 + shape.rollout_sigma**2) ** 0.5
    median = log(shape.mean) - sigma**2 / 2
    rollouts: list[RolloutPlan] = []
    for problem in range(problems):
        prompt = int(np.clip(rng.lognormal(log(380), 0.25), 250, 1200))
        hard = rng.normal(0, shape.problem_sigma)
        for member in range(shape.group):
            wanted = int(np.exp(median + hard + rng.normal(0, shape.rollout_sigma)))
            rollouts.append(_rollout(shape, rng, f"{problem}/{member}", prompt, max(32, wanted)))
    return Workload(
        shape.name,
        tuple(rollouts),
        from_hardware(memory_share=shape.memory_share),
        engines,
        shape.about,
    )


def _rollout(
    shape: WorkloadShape, rng: np.random.Generator, name: str, prompt: int, wanted: int
) -> RolloutPlan:
    """Divide a wanted length into turns and cut it at the limit."""
    room = shape.limit - prompt
    calls = min(shape.turns - 1, int(rng.poisson(shape.calls * (wanted / shape.mean) ** 0.5)))
    responses = np.clip(rng.lognormal(log(70), 0.8, calls), 8, 512).astype(int)
    latencies = rng.lognormal(log(shape.tool_s) - shape.tool_sigma**2 / 2, shape.tool_sigma, calls)
    latencies = np.minimum(latencies, TOOL_DEADLINE_S)
    shares = rng.dirichlet(np.ones(calls + 1))
    turns: list[TurnPlan] = []
    held = 0
    for index, share in enumerate(shares):
        sampled = max(8, int(share * wanted))
        if held + sampled >= room:
            turns.append(TurnPlan(room - held))
            return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit, True)
        if index == calls:
            turns.append(TurnPlan(sampled))
            break
        response = min(int(responses[index]), room - held - sampled - 1)
        if response <= 0:
            turns.append(TurnPlan(sampled))
            return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit, True)
        turns.append(TurnPlan(sampled, float(latencies[index]), response))
        held += sampled + response
    return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit)


# --------------------------------------------------------------------------- recorded


def recorded_workload(
    run: Path, model: EngineModel, *, stage: str, step: int, engines: int | None = None
) -> Workload:
    """The rollouts of one recorded RL step, with their recorded lengths and tool latencies."""
    recipe = read_recipe(run)
    limit = _limit(run, recipe, stage)
    plans = [
        _planned(trajectory, limit)
        for line in read_groups(run, stage)
        if line.step == step
        for trajectory in line.group.trajectories
        if trajectory.turns
    ]
    if not plans:
        raise UserError(f"{run}: no rollouts of step {step} of {stage} are recorded")
    count = engines or int(recipe.get("engine", {}).get("count", 1))
    return Workload(f"{stage}:{step}", tuple(plans), model, count, f"recorded in {run.name}")


def _limit(run: Path, recipe: dict[str, Any], stage: str) -> int:
    """The stage's length limit."""
    limits = {s["name"]: int(s["max_length"]) for s in recipe.get("rl", {}).get("stages", ())}
    if stage not in limits:
        raise UserError(f"{run} has no RL stage {stage!r}; it has {', '.join(limits) or 'none'}")
    return limits[stage]


def _planned(trajectory: Trajectory, limit: int) -> RolloutPlan:
    turns = tuple(
        TurnPlan(max(1, len(turn.sampled_ids)), turn.tools_s, len(turn.response_ids))
        for turn in trajectory.turns
    )
    last = replace(turns[-1], tool_s=0.0, response=0)
    prompt = len(trajectory.prompt_ids)
    plan = RolloutPlan(
        trajectory.id,
        trajectory.group_id,
        prompt,
        (*turns[:-1], last),
        limit,
        trajectory.truncated,
    )
    return replace(plan, limit=max(limit, plan.tokens))


def fit_recorded_engine(run: Path, *, stage: str, steps: int = 20) -> EngineFit:
    """Fit an engine model to the durations of a run's recorded turns.

    A turn of n tokens that took s seconds counts as one measured step of s / n seconds, with the
    mean number of sequences and the mean context on its engine during the turn, and 1/n of the
    prompt tokens of the turns that started there during it.
    """
    recipe = read_recipe(run)
    _limit(run, recipe, stage)
    engine = recipe.get("engine", {})
    embedded = engine.get("kind") == "embedded"
    model = EngineModel(
        name=f"{run.name}/{stage}",
        kv_tokens=int(engine.get("kv_tokens", 65_536)),
        max_sequences=int(engine.get("max_sequences", 256)),
        block_tokens=1 if embedded else 16,  # the embedded engine reuses a prefix to the token
        forgets=embedded,
    )
    groups = [line for line in read_groups(run, stage) if line.step <= steps]
    rows = [
        row
        for step in sorted({line.step for line in groups})
        for row in _measured([t for g in groups if g.step == step for t in g.group.trajectories])
    ]
    if not rows:
        raise UserError(f"{run}: no turns of {stage} are recorded; give --engine FILE")
    return fit_engine(model, rows)


def _measured(trajectories: list[Trajectory]) -> Iterator[MeasuredStep]:
    """One measured step per turn, with the other sequences on its engine."""
    turns: dict[str, list[tuple[float, float, int, int, int]]] = {}
    for trajectory in trajectories:
        held = len(trajectory.prompt_ids)
        for turn in trajectory.turns:
            start = trajectory.started_at + turn.started_s + turn.queue_s
            sampled = len(turn.sampled_ids)
            if sampled > 1 and turn.generate_s > 0:
                row = (start, start + turn.generate_s, held, sampled, held - turn.cached_tokens)
                turns.setdefault(turn.engine, []).append(row)
            held += sampled + len(turn.response_ids)
    for rows in turns.values():
        table = np.array(rows)
        table = table[table[:, 0].argsort()]
        starts, ends, held_, sampled_ = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
        prefilled = np.concatenate([[0.0], np.cumsum(np.maximum(0, table[:, 4]))])
        for start, end, _, sampled, _ in rows:
            first, last = np.searchsorted(starts, (start, end))
            overlap = np.clip(np.minimum(ends, end) - np.maximum(starts, start), 0, None)
            share = overlap / (end - start)
            yield MeasuredStep(
                batch=round(float(share.sum())),
                context=round(float((share * (held_ + sampled_ / 2)).sum())),
                seconds=(end - start) / sampled,
                prefill=round(float(prefilled[last] - prefilled[first]) / sampled),
            )

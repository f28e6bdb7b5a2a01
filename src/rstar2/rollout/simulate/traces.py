"""Recorded runs as workloads: their rollouts, their engines, and how fast these were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rstar2.errors import UserError
from rstar2.record import read_groups, read_recipe
from rstar2.rollout.simulate.model import EngineModel, Fit, StepRow, fit
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan, Workload
from rstar2.types import Trajectory


def recorded(
    run: Path, model: EngineModel, *, stage: str, step: int, engines: int | None = None
) -> Workload:
    """The rollouts of one recorded RL step, lengths and tool latencies as they were."""
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
        raise UserError(f"{run}: no rollouts of step {step} of {stage} are on record")
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


# --------------------------------------------------------------------------- speed


def fitted(run: Path, *, stage: str, steps: int = 20) -> Fit:
    """The speed of the run's own engines, from how long its recorded turns took.

    A turn of n tokens that took s seconds is one measured step of s / n, with the sequences and
    the context that were on its engine meanwhile, on average, and an n-th of the prompt tokens of
    the turns that began there meanwhile.
    """
    recipe = read_recipe(run)
    _limit(run, recipe, stage)
    engine = recipe.get("engine", {})
    embedded = engine.get("kind") == "embedded"
    model = EngineModel(
        name=f"{run.name}/{stage}",
        kv_tokens=int(engine.get("kv_tokens", 65_536)),
        max_sequences=int(engine.get("max_sequences", 256)),
        block_tokens=1 if embedded else 16,  # ours reuses a prefix to the token
        forgets=embedded,
    )
    groups = [line for line in read_groups(run, stage) if line.step <= steps]
    rows = [
        row
        for step in sorted({line.step for line in groups})
        for row in _measured([t for g in groups if g.step == step for t in g.group.trajectories])
    ]
    if not rows:
        raise UserError(f"{run}: no turns of {stage} are on record; give --engine FILE")
    return fit(model, rows)


def _measured(trajectories: list[Trajectory]) -> Iterator[StepRow]:
    """One row per turn of a step, with who else was on its engine."""
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
            yield StepRow(
                batch=round(float(share.sum())),
                context=round(float((share * (held_ + sampled_ / 2)).sum())),
                seconds=(end - start) / sampled,
                prefill=round(float(prefilled[last] - prefilled[first]) / sampled),
            )

"""User workloads: a recorded step of a run, or a file.

A file is JSON Lines, one rollout per line. `turns` are [sampled tokens, tool seconds, response
tokens]; the last turn needs only its sampled tokens:

    {"group": "p1", "prompt": 350, "turns": [[900, 0.4, 60], [1200]]}

`limit` is the most tokens that the rollout may have; without it, the longest rollout of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rstar2.errors import DataError, UserError
from rstar2.record import read_groups, read_recipe
from rstar2.rollout.simulate.model import EngineFit, EngineModel, MeasuredStep, fit_engine
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan
from rstar2.types import Trajectory


class _RolloutLine(msgspec.Struct, forbid_unknown_fields=True):
    group: str
    prompt: int
    turns: list[list[float]]
    limit: int | None = None


def rollouts_from_file(path: Path) -> tuple[RolloutPlan, ...]:
    """Read rollouts from a JSON Lines file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot read rollouts: {error}") from error
    plans: list[RolloutPlan] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                plans.append(_read(msgspec.json.decode(line, type=_RolloutLine), len(plans)))
            except (msgspec.MsgspecError, ValueError) as error:
                raise DataError(f"{path}, line {number}: {error}") from error
    if not plans:
        raise DataError(f"{path} has no rollouts: give one JSON object per line")
    longest = max(max(plan.limit, plan.tokens) for plan in plans)
    return tuple(replace(plan, limit=plan.limit or longest) for plan in plans)


def _read(line: _RolloutLine, index: int) -> RolloutPlan:
    if line.prompt < 1:
        raise ValueError(f"prompt is {line.prompt}: give at least 1 token")
    if not line.turns:
        raise ValueError("turns is empty: give at least one turn, as [sampled tokens]")
    turns: list[TurnPlan] = []
    for turn in line.turns:
        last = len(turns) == len(line.turns) - 1
        if len(turn) != 3 and not (last and len(turn) == 1):
            raise ValueError(
                f"turn {len(turns)} is {turn}: give [sampled tokens, tool seconds, response tokens]"
            )
        sampled, tool_s, response = (*turn, 0.0, 0.0)[:3]
        if sampled < 1 or tool_s < 0 or response < 0:
            raise ValueError(
                f"turn {len(turns)} is {turn}: at least one sampled token, none below 0"
            )
        turns.append(TurnPlan(int(sampled), *((0.0, 0) if last else (tool_s, int(response)))))
    plan = RolloutPlan(f"{line.group}/{index}", line.group, line.prompt, tuple(turns), 0)
    if line.limit is not None and line.limit < plan.tokens:
        raise ValueError(f"limit is {line.limit}, but the rollout has {plan.tokens} tokens")
    return replace(plan, limit=line.limit or 0)


# --------------------------------------------------------------------------- recorded runs


def recorded_rollouts(run: Path, *, stage: str, step: int) -> tuple[RolloutPlan, ...]:
    """The rollouts of one recorded RL step, with their recorded lengths and tool latencies."""
    limit = _limit(run, read_recipe(run), stage)
    plans = tuple(
        _planned(trajectory, limit)
        for line in read_groups(run, stage)
        if line.step == step
        for trajectory in line.group.trajectories
        if trajectory.turns
    )
    if not plans:
        raise UserError(f"{run}: no rollouts of step {step} of {stage} are recorded")
    return plans


def recorded_engines(run: Path) -> int:
    """The number of engines of a recorded run."""
    return int(read_recipe(run).get("engine", {}).get("count", 1))


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

"""What the page shows below the curves: a step, a group, a rollout, its tokens. Plain data out.

Texts longer than LONGEST are cut here, with a count of what was left out: a page must open
whatever a rollout printed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rstar2.entropy.classes import classify, failures_before, top_tokens
from rstar2.grpo.roc import penalties
from rstar2.report.segments import segments
from rstar2.types import Choice, Group, Selection, ToolResult, Trajectory, Turn
from rstar2.viewer.catalog import Catalog, GroupRef
from rstar2.viewer.overview import step_metrics
from rstar2.viewer.query import cells
from rstar2.viewer.run import NotRecordedError, Run

LONGEST = 200_000
GROUPS = 100
"""Groups of one page of a step."""


# --------------------------------------------------------------------------- step


def step(run: Run, stage: str, number: int, start: int = 0) -> dict[str, Any]:
    """The groups of one step, each with its rollouts as dots."""
    catalog = run.catalogs.get(stage)
    metrics = step_metrics(run, stage, number)
    groups = catalog.of_step(number) if catalog else []
    if not groups and not metrics:
        raise NotRecordedError(f"{run.name} has no step {number} of {stage!r} on record")
    recorded = catalog.steps() if catalog else []
    earlier = [s for s in recorded if s < number]
    later = [s for s in recorded if s > number]
    return {
        "stage": stage,
        "step": number,
        "metrics": metrics,
        "total": len(groups),
        "start": start,
        "groups": [
            group_row(catalog, group) for group in groups[start : start + GROUPS] if catalog
        ],
        "previous": earlier[-1] if earlier else None,
        "following": later[0] if later else None,
    }


def group_row(catalog: Catalog, group: GroupRef) -> dict[str, Any]:
    """One group as a step's list shows it."""
    rows = catalog.members(group)
    graded = [float(r) for r in rows["reward"] if not math.isnan(r)]
    right = sum(r > 0.5 for r in graded)
    return {
        "id": group.id,
        "problem": group.problem,
        "kind": group.kind,
        "prompt": group.prompt,
        "used": group.used,
        "right": right,
        "graded": len(graded),
        "why": why_unused(group.used, graded, catalog.stage),
        "tokens": float(rows["tokens"].mean()) if len(rows) else 0.0,
        "failed": int(rows["failed"].sum()),
        "calls": int(rows["calls"].sum()),
        "rollouts": [
            {"reward": c["reward"], "kept": c["kept"], "failed": c["failed"], "stop": c["stop"]}
            for c in map(cells, rows)
        ],
    }


def why_unused(used: bool, rewards: Sequence[float], stage: str) -> str:
    """Why a group of a training step was left out of the batch; empty if it was not."""
    if used or stage.startswith(("eval-", "filter-")):
        return ""
    if not rewards:
        return "every rollout was lost to infrastructure"
    if len(set(rewards)) == 1:
        return "all right: nothing to learn" if rewards[0] > 0.5 else "all wrong: nothing to learn"
    return "what resampling kept had equal rewards"


# --------------------------------------------------------------------------- group


def group(run: Run, group_id: str) -> dict[str, Any]:
    """A problem, its rollouts, and why resampling kept each or did not."""
    catalog, place = run.find_group(group_id)
    line = run.read_group(catalog, place)
    found, selection = line.group, line.selection
    rewards = [t.reward.value for t in found.trajectories if t.reward]
    choices = _choices(found, selection)
    by_id = {t.id: t for t in found.trajectories}
    rows = dict(zip(by_id, catalog.members(place), strict=False))
    neighbours = [g.id for g in catalog.of_step(place.step)]
    here = neighbours.index(group_id)
    return {
        "id": found.id,
        "stage": catalog.stage,
        "step": line.step,
        "problem": _problem(found),
        "used": selection is not None,
        "why": why_unused(selection is not None, rewards, catalog.stage),
        "variant": selection.variant if selection else None,
        "quota": _quota(choices) if selection else None,
        "lost": dict(found.dropped),
        "rollouts": [
            _choice_row(choice, by_id.get(choice.trajectory_id))
            | (cells(rows[choice.trajectory_id]) if choice.trajectory_id in rows else {})
            for choice in choices
        ],
        "previous": neighbours[here - 1] if here else None,
        "following": neighbours[here + 1] if here + 1 < len(neighbours) else None,
    }


def _choices(found: Group, selection: Selection | None) -> Sequence[Choice]:
    """The recorded choices; where a group was not used, only what they would be made from."""
    if selection is not None:
        return selection.choices
    return [
        Choice(t.id, False, "", t.reward.value if t.reward else 0.0, *penalties(t), 0.0)
        for t in found.trajectories
    ]


def _quota(choices: Sequence[Choice]) -> dict[str, int]:
    return {
        "right": sum(c.reward > 0.5 for c in choices),
        "wrong": sum(c.reward <= 0.5 for c in choices),
        "right_kept": sum(c.reward > 0.5 and c.kept for c in choices),
        "wrong_kept": sum(c.reward <= 0.5 and c.kept for c in choices),
    }


def _choice_row(choice: Choice, trajectory: Trajectory | None) -> dict[str, Any]:
    return {
        "id": choice.trajectory_id,
        "recorded": trajectory is not None,
        "correct": choice.reward > 0.5,
        "answer": _cut(trajectory.answer or "", 200) if trajectory else None,
        "p_err": choice.p_err,
        "p_format": choice.p_format,
        "weight": choice.weight,
        "chosen": choice.kept,
        "reason": choice.reason,
        "results": [r.outcome.value for r in trajectory.results] if trajectory else [],
    }


def _problem(found: Group) -> dict[str, Any]:
    problem = found.problem
    return {
        "id": problem.id,
        "prompt": _cut(problem.prompt),
        "answer": _cut(problem.answer, 2000),
        "grader": problem.grader,
        "kind": problem.kind,
        "source": problem.source,
    }


# --------------------------------------------------------------------------- rollout


def find(run: Run, trajectory_id: str) -> tuple[Catalog, GroupRef, Group, Selection | None, int]:
    """A rollout by its id: its stage, group, and place in it."""
    group_id = trajectory_id.rpartition("/")[0]
    catalog, place = run.find_group(group_id)
    line = run.read_group(catalog, place)
    for number, trajectory in enumerate(line.group.trajectories):
        if trajectory.id == trajectory_id:
            return catalog, place, line.group, line.selection, number
    raise NotRecordedError(f"{run.name} has no rollout {trajectory_id!r} on record")


def rollout(run: Run, trajectory_id: str) -> dict[str, Any]:
    """One trajectory as a person reads it."""
    catalog, place, found, selection, number = find(run, trajectory_id)
    trajectory = found.trajectories[number]
    choices = {c.trajectory_id: c for c in selection.choices} if selection else {}
    ids = [t.id for t in found.trajectories]
    prompt = "".join(run.pieces(trajectory.prompt_ids)) if run.pieces.path else ""
    return {
        **cells(catalog.members(place)[number]),
        "id": trajectory.id,
        "group": found.id,
        "stage": catalog.stage,
        "step": place.step,
        "problem": _problem(found),
        "prompt": _cut(prompt),
        "choice": asdict(choices[trajectory.id]) if trajectory.id in choices else None,
        "used": selection is not None,
        "correct": trajectory.correct,
        "reward": asdict(trajectory.reward) if trajectory.reward else None,
        "answer": _cut(trajectory.answer or "", 2000),
        "answer_tags": trajectory.answer_tags,
        "penalties": penalties(trajectory),
        "seed": trajectory.seed,
        "attempts": trajectory.attempts,
        "wall_s": trajectory.wall_s,
        "segments": [_segment(s, trajectory) for s in segments(trajectory)],
        "turns": [_turn(turn) for turn in trajectory.turns],
        "previous": ids[number - 1] if number else None,
        "following": ids[number + 1] if number + 1 < len(ids) else None,
    }


def _segment(segment: Any, trajectory: Trajectory) -> dict[str, Any]:
    shown = {
        "kind": segment.kind,
        "turn": segment.turn,
        "text": _cut(segment.text),
        "cut": max(0, len(segment.text) - LONGEST),
    }
    if segment.kind == "result":
        result = trajectory.turns[segment.turn].results[segment.result]
        shown |= {"outcome": segment.outcome, "failed": segment.failed, **_result(result)}
    return shown


def _result(result: ToolResult) -> dict[str, Any]:
    return {
        "message": _cut(result.message, 2000),
        "wall_s": result.wall_s,
        "queue_s": result.queue_s,
        "cpu_s": result.cpu_s,
        "peak_mb": result.peak_mb,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "isolation": result.isolation,
        "attempts": result.attempts,
        "truncated": bool(result.truncated),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    outcomes = Counter(r.outcome.value for r in turn.results)
    return {
        "engine": turn.engine,
        "started_s": turn.started_s,
        "queue_s": turn.queue_s,
        "generate_s": turn.generate_s,
        "tools_s": turn.tools_s,
        "sampled": len(turn.sampled_ids),
        "response": len(turn.response_ids),
        "cached": turn.cached_tokens,
        "finish": turn.finish.value,
        "versions": [v for v, _ in turn.versions],
        "outcomes": dict(outcomes),
    }


# --------------------------------------------------------------------------- tokens


def tokens(run: Run, trajectory_id: str) -> dict[str, Any]:
    """Every token of a trajectory with what is known of it, as columns.

    `source`: p prompt, s sampled, t tool response. Columns of sampled tokens only hold one value
    per `s`, in order.
    """
    catalog, place, found, _, number = find(run, trajectory_id)
    trajectory = found.trajectories[number]
    texts = [run.pieces(turn.sampled_ids) for turn in trajectory.turns]
    pieces = run.pieces(trajectory.prompt_ids)
    source = "p" * len(pieces)
    for turn, text in zip(trajectory.turns, texts, strict=True):
        response = run.pieces(turn.response_ids)
        pieces += [*text, *response]
        source += "s" * len(text) + "t" * len(response)
    learner = run.token_values(catalog.stage, place.step).get(trajectory_id)
    entropies = _entropies(trajectory)
    kinds = [k for part in classify(texts, failures_before(trajectory)) for k in part]
    return {
        "id": trajectory_id,
        "pieces": pieces,
        "ids": list(trajectory.token_ids),
        "source": source,
        "logprob": [p for turn in trajectory.turns for p in turn.logprobs],
        "entropy": entropies,
        "top": sorted(top_tokens(entropies)) if entropies else [],
        "kind": kinds,
        "version": [v for turn in trajectory.turns for v, n in turn.versions for _ in range(n)],
        "turn": [n for n, turn in enumerate(trajectory.turns) for _ in turn.sampled_ids],
        "old": list(learner.old) if learner else None,
        "current": list(learner.current) if learner else None,
        "decoded": run.pieces.path is not None,
    }


def _entropies(trajectory: Trajectory) -> list[float] | None:
    """Of every sampled token, if the engine reported them for all turns."""
    if any(turn.entropies is None for turn in trajectory.turns):
        return None
    return [e for turn in trajectory.turns for e in turn.entropies or ()]


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[:longest]

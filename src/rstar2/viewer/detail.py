"""What the page shows below the curves, as JSON values: a step and its timeline, a group, a
rollout, its tokens.

Texts longer than LONGEST characters are cut here and the number of removed characters is sent, so
that a page opens even if a rollout printed megabytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rstar2.entropy.classes import classify, failures_before, recorded_entropies, top_tokens
from rstar2.grpo.roc import penalties
from rstar2.record import GroupLine
from rstar2.record.index import GroupEntry
from rstar2.report.latex import formulas, whole_formula
from rstar2.report.segments import Segment, segments
from rstar2.rollout.timeline import STATES, TimelineSpan, chrome_trace, svg
from rstar2.types import (
    Choice,
    Group,
    Selection,
    TokenSegment,
    TokenValues,
    ToolResult,
    Trajectory,
    Turn,
)
from rstar2.viewer.catalog import Catalog, GroupRef
from rstar2.viewer.overview import step_metrics
from rstar2.viewer.run import NotRecordedError, ViewedRun

LONGEST = 200_000
GROUPS = 100
"""Groups on one page of a step."""
SHORTEST_S = 1e-4
"""Shorter states are left out of the timeline."""


# --------------------------------------------------------------------------- step


def step(run: ViewedRun, stage: str, number: int, start: int = 0) -> dict[str, Any]:
    """The groups of one step, each with its rollouts."""
    metrics = step_metrics(run, stage, number)
    groups = run.catalog.groups_of_step(stage, number)
    if not groups and not metrics:
        raise NotRecordedError(f"{run.name} has no step {number} of {stage!r} on record")
    recorded = run.catalog.steps(stage)
    return {
        "stage": stage,
        "step": number,
        "metrics": metrics,
        "total": len(groups),
        "start": start,
        "groups": [group_row(run.catalog, group) for group in groups[start : start + GROUPS]],
        "previous": max((s for s in recorded if s < number), default=None),
        "following": min((s for s in recorded if s > number), default=None),
    }


def group_row(catalog: Catalog, group: GroupRef) -> dict[str, Any]:
    """One group as the list of a step shows it."""
    rollouts = catalog.rollouts_of(group)
    graded = [r["reward"] for r in rollouts if r["reward"] is not None]
    return {
        "id": group.id,
        "problem": group.problem,
        "kind": group.kind,
        "prompt": group.prompt,
        "prompt_math": formulas(group.prompt),
        "used": group.used,
        "right": sum(reward > 0.5 for reward in graded),
        "graded": len(graded),
        "why": why_unused(group.used, graded, catalog.stage_of(group)),
        "tokens": math.fsum(r["tokens"] for r in rollouts) / max(1, len(rollouts)),
        "failed": sum(r["failed"] for r in rollouts),
        "calls": sum(r["calls"] for r in rollouts),
        "rollouts": [
            {name: r[name] for name in ("reward", "kept", "failed", "stop")} for r in rollouts
        ],
    }


def why_unused(used: bool, rewards: Sequence[float], stage: str) -> str:
    """Why a group of a training step was left out of the batch; empty if it was not."""
    if used or stage.startswith(("eval-", "filter-")):
        return ""
    if not rewards:
        return "every rollout was lost to infrastructure failures"
    if len(set(rewards)) == 1:
        verdict = "correct" if rewards[0] > 0.5 else "wrong"
        return f"all rollouts are {verdict}: no learning signal"
    return "the rollouts kept by resampling had equal rewards"


# --------------------------------------------------------------------------- timeline


def timeline(run: ViewedRun, stage: str, step: int) -> dict[str, Any]:
    """The states of a step's rollouts over time as columns, in milliseconds."""
    entries = _entries_of_step(run, stage, step)
    spans = _spans(entries)
    states = tuple(STATES)
    engines = sorted({span.engine for span in spans})
    names = list(dict.fromkeys(span.trajectory for span in spans))
    number_of = {name: number for number, name in enumerate(names)}
    rewards = {f"{entry.group}/{r.name}": r.reward for entry in entries for r in entry.rollouts}
    return {
        "stage": stage,
        "step": step,
        "states": states,
        "colours": list(STATES.values()),
        "engines": engines,
        "trajectories": names,
        "rewards": [rewards.get(name) for name in names],
        "end": round(1000 * max((s.end for s in spans), default=0.0)),
        "spans": [
            [
                engines.index(s.engine),
                number_of[s.trajectory],
                states.index(s.state),
                round(1000 * s.start, 1),
                round(1000 * s.end, 1),
            ]
            for s in spans
        ],
    }


def timeline_trace(run: ViewedRun, stage: str, step: int) -> bytes:
    """The timeline of a step as a Chrome trace, which Perfetto opens."""
    return chrome_trace(_spans(_entries_of_step(run, stage, step))).encode()


def timeline_svg(run: ViewedRun, stage: str, step: int) -> bytes:
    """The timeline of a step as the simulator draws it."""
    title = f"{run.name}: {stage} step {step}"
    return svg(_spans(_entries_of_step(run, stage, step)), title=title).encode()


def _entries_of_step(run: ViewedRun, stage: str, step: int) -> list[GroupEntry]:
    groups = run.catalog.groups_of_step(stage, step)
    if not groups:
        raise NotRecordedError(f"{run.name} has no rollouts of step {step} of {stage!r} on record")
    return [run.catalog.entry(group) for group in groups]


def _spans(entries: list[GroupEntry]) -> list[TimelineSpan]:
    """The states of every rollout, in seconds since the first one of the step started."""
    starts = [r.started_at for entry in entries for r in entry.rollouts if r.started_at]
    origin = min(starts, default=0.0)
    return [span for entry in entries for span in _spans_of_group(entry, origin)]


def _spans_of_group(entry: GroupEntry, origin: float) -> Iterator[TimelineSpan]:
    """A turn is recorded with the sum of its preemptions, drawn in one piece before its tokens."""
    for rollout in entry.rollouts:
        name = f"{entry.group}/{rollout.name}"
        began = rollout.started_at - origin
        for turn in rollout.turns:
            requested = began + turn.started_s
            admitted = requested + min(turn.queue_s, turn.generate_s)
            sampled = requested + turn.generate_s
            resumed = admitted + min(turn.preempted_s, sampled - admitted)
            for state, start, end in (
                ("queued", requested, admitted),
                ("preempted", admitted, resumed),
                ("generating", resumed, sampled),
                ("tool", sampled, sampled + turn.tools_s),
            ):
                if end - start > SHORTEST_S:
                    yield TimelineSpan(turn.engine, name, state, start, end)


# --------------------------------------------------------------------------- group


def group(run: ViewedRun, group_id: str) -> dict[str, Any]:
    """A problem, its rollouts, and why resampling kept or dropped each."""
    ref = run.find_group(group_id)
    line = run.read_group(ref)
    recorded, selection = line.group, line.selection
    stage = run.catalog.stage_of(ref)
    rewards = [t.reward.value for t in recorded.trajectories if t.reward]
    choices = _choices(recorded, selection)
    by_id = {t.id: t for t in recorded.trajectories}
    rows = dict(zip(by_id, run.catalog.rollouts_of(ref), strict=False))
    neighbours = [g.id for g in run.catalog.groups_of_step(stage, ref.step)]
    here = neighbours.index(group_id)
    return {
        "id": recorded.id,
        "stage": stage,
        "step": line.step,
        "problem": _problem(recorded),
        "used": selection is not None,
        "why": why_unused(selection is not None, rewards, stage),
        "variant": selection.variant if selection else None,
        "quota": _quota(choices) if selection else None,
        "lost": dict(recorded.dropped),
        "rollouts": [
            _choice_row(choice, by_id.get(choice.trajectory_id))
            | rows.get(choice.trajectory_id, {})
            for choice in choices
        ],
        "previous": neighbours[here - 1] if here else None,
        "following": neighbours[here + 1] if here + 1 < len(neighbours) else None,
    }


def _choices(recorded: Group, selection: Selection | None) -> Sequence[Choice]:
    """The recorded choices; for an unused group, choices that only hold rewards and penalties."""
    if selection is not None:
        return selection.choices
    return [
        Choice(t.id, False, "", t.reward.value if t.reward else 0.0, *penalties(t), 0.0)
        for t in recorded.trajectories
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
        "answer_math": whole_formula(trajectory.answer or "") if trajectory else None,
        "p_err": choice.p_err,
        "p_format": choice.p_format,
        "weight": choice.weight,
        "chosen": choice.kept,
        "reason": choice.reason,
        "results": [r.outcome.value for r in trajectory.results] if trajectory else [],
    }


def _problem(recorded: Group) -> dict[str, Any]:
    problem = recorded.problem
    return {
        "id": problem.id,
        "prompt": _cut(problem.prompt),
        "prompt_math": formulas(_cut(problem.prompt)),
        "answer": _cut(problem.answer, 2000),
        "answer_math": whole_formula(problem.answer),
        "grader": problem.grader,
        "kind": problem.kind,
        "source": problem.source,
    }


# --------------------------------------------------------------------------- rollout


def _find_rollout(run: ViewedRun, trajectory_id: str) -> tuple[GroupRef, GroupLine, int]:
    """A rollout by its id: its group, and its position in the group."""
    ref = run.find_group(trajectory_id.rpartition("/")[0])
    line = run.read_group(ref)
    for number, trajectory in enumerate(line.group.trajectories):
        if trajectory.id == trajectory_id:
            return ref, line, number
    raise NotRecordedError(f"{run.name} has no rollout {trajectory_id!r} on record")


def rollout(run: ViewedRun, trajectory_id: str) -> dict[str, Any]:
    """One trajectory as text, with its results and figures."""
    ref, line, number = _find_rollout(run, trajectory_id)
    group, selection = line.group, line.selection
    trajectory = group.trajectories[number]
    choices = {c.trajectory_id: c for c in selection.choices} if selection else {}
    ids = [t.id for t in group.trajectories]
    prompt = "".join(run.pieces(trajectory.prompt_ids)) if run.pieces.path else ""
    return {
        **run.catalog.rollouts_of(ref)[number],
        "id": trajectory.id,
        "group": group.id,
        "stage": run.catalog.stage_of(ref),
        "step": ref.step,
        "problem": _problem(group),
        "prompt": _cut(prompt),
        "choice": asdict(choices[trajectory.id]) if trajectory.id in choices else None,
        "used": selection is not None,
        "correct": trajectory.correct,
        "reward": asdict(trajectory.reward) if trajectory.reward else None,
        "answer": _cut(trajectory.answer or "", 2000),
        "answer_math": whole_formula(trajectory.answer or ""),
        "answer_tags": trajectory.answer_tags,
        "penalties": penalties(trajectory),
        "seed": trajectory.seed,
        "attempts": trajectory.attempts,
        "wall_s": trajectory.wall_s,
        "segments": [_segment(s, trajectory) for s in segments(trajectory)],
        "turns": [_turn(turn) for turn in trajectory.all_turns],
        "previous": ids[number - 1] if number else None,
        "following": ids[number + 1] if number + 1 < len(ids) else None,
    }


def _segment(segment: Segment, trajectory: Trajectory) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "kind": segment.kind,
        "turn": segment.turn,
        "text": _cut(segment.text),
        "cut": max(0, len(segment.text) - LONGEST),
    }
    if segment.kind in ("thought", "answer"):
        shown["math"] = formulas(shown["text"])
    if segment.kind == "result":
        result = trajectory.all_turns[segment.turn].results[segment.result]
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


def tokens(run: ViewedRun, trajectory_id: str) -> dict[str, Any]:
    """Every token of a trajectory and its values, as columns.

    `source`: p prompt, s sampled, t tool response. Columns that only sampled tokens have hold one
    value per `s`, in order.
    """
    ref, line, number = _find_rollout(run, trajectory_id)
    trajectory = line.group.trajectories[number]
    turns = trajectory.all_turns
    texts = [run.pieces(turn.sampled_ids) for turn in turns]
    pieces: list[str] = []
    source = ""
    for segment in trajectory.segments:
        for kind, ids in (("p", segment.prompt_ids), *_parts(segment)):
            shown = run.pieces(ids)
            pieces += shown
            source += kind * len(shown)
    learner = _learner_values(run, ref, trajectory)
    by_turn = recorded_entropies(trajectory)
    entropies = None if by_turn is None else [e for turn in by_turn for e in turn]
    kinds = [k for part in classify(texts, failures_before(trajectory)) for k in part]
    return {
        "id": trajectory_id,
        "pieces": pieces,
        "ids": [id for segment in trajectory.segments for id in segment.token_ids],
        "source": source,
        "logprob": [p for turn in turns for p in turn.logprobs],
        "entropy": entropies,
        "top": sorted(top_tokens(entropies)) if entropies else [],
        "kind": kinds,
        "version": [v for turn in turns for v, n in turn.versions for _ in range(n)],
        "turn": [n for n, turn in enumerate(turns) for _ in turn.sampled_ids],
        "old": [value for part in learner for value in part.old] if learner else None,
        "current": [value for part in learner for value in part.current] if learner else None,
        "decoded": run.pieces.path is not None,
    }


def _parts(segment: TokenSegment) -> Iterator[tuple[str, Sequence[int]]]:
    """The sampled ids and the response of every turn, each with its source."""
    for turn in segment.turns:
        yield "s", turn.sampled_ids
        yield "t", turn.response_ids


def _learner_values(run: ViewedRun, ref: GroupRef, trajectory: Trajectory) -> list[TokenValues]:
    """The learner's values of each segment that was sampled; empty unless all are recorded."""
    values = run.token_values(run.catalog.stage_of(ref), ref.step)
    names = [
        f"{trajectory.id}#{number}" if number else trajectory.id
        for number, segment in enumerate(trajectory.segments)
        if segment.sampled_tokens
    ]
    return [values[name] for name in names] if values.keys() >= set(names) else []


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[:longest]

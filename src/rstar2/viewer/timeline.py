"""The rollouts of one step over time, from their recorded turns: who waited for what, and where.
States, colours, export and file are the simulator's (rollout.timeline): both can be compared.

A turn that lost its KV to another is `preempted` for as long as it waited to go on. Only the sum is
on record, so it is drawn in one piece, before the turn's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rstar2.record.index import GroupEntry
from rstar2.rollout.timeline import STATES as COLOURS
from rstar2.rollout.timeline import TimelineSpan, chrome_trace, svg
from rstar2.viewer.run import NotRecordedError, Run

QUEUED, PREEMPTED, GENERATING, TOOL = "queued", "preempted", "generating", "tool"
STATES = tuple(COLOURS)
SHORTEST_S = 1e-4
"""What took less is not drawn."""


def entries(run: Run, stage: str, step: int) -> list[GroupEntry]:
    """The index entries of a step's groups."""
    catalog = run.catalogs.get(stage)
    groups = catalog.of_step(step) if catalog else []
    if catalog is None or not groups:
        raise NotRecordedError(f"{run.name} has no rollouts of step {step} of {stage!r} on record")
    return [catalog.entry(group) for group in groups]


def spans(found: list[GroupEntry]) -> list[TimelineSpan]:
    """What every rollout did, in seconds since the first one of the step started."""
    starts = [r.started_at for entry in found for r in entry.rollouts if r.started_at]
    origin = min(starts, default=0.0)
    return [span for entry in found for span in _of_group(entry, origin)]


def _of_group(entry: GroupEntry, origin: float) -> Iterator[TimelineSpan]:
    for rollout in entry.rollouts:
        name = f"{entry.group}/{rollout.name}"
        began = rollout.started_at - origin
        for turn in rollout.turns:
            asked = began + turn.started_s
            placed = asked + min(turn.queue_s, turn.generate_s)
            sampled = asked + turn.generate_s
            back = placed + min(turn.preempted_s, sampled - placed)
            for state, start, end in (
                (QUEUED, asked, placed),
                (PREEMPTED, placed, back),
                (GENERATING, back, sampled),
                (TOOL, sampled, sampled + turn.tools_s),
            ):
                if end - start > SHORTEST_S:
                    yield TimelineSpan(turn.engine, name, state, start, end)


def drawing(run: Run, stage: str, step: int) -> dict[str, Any]:
    """The spans as columns, for the page: names once, numbers in milliseconds."""
    found = entries(run, stage, step)
    made = spans(found)
    engines = sorted({span.engine for span in made})
    names = list(dict.fromkeys(span.trajectory for span in made))
    place = {name: index for index, name in enumerate(names)}
    rewards = {f"{entry.group}/{r.name}": r.reward for entry in found for r in entry.rollouts}
    return {
        "stage": stage,
        "step": step,
        "states": STATES,
        "colours": list(COLOURS.values()),
        "engines": engines,
        "trajectories": names,
        "rewards": [rewards.get(name) for name in names],
        "end": round(1000 * max((s.end for s in made), default=0.0)),
        "spans": [
            [
                engines.index(s.engine),
                place[s.trajectory],
                STATES.index(s.state),
                round(1000 * s.start, 1),
                round(1000 * s.end, 1),
            ]
            for s in made
        ],
    }


def trace(run: Run, stage: str, step: int) -> bytes:
    """The spans as a Chrome trace, which Perfetto opens."""
    return chrome_trace(spans(entries(run, stage, step))).encode()


def picture(run: Run, stage: str, step: int) -> bytes:
    """The simulator's own drawing of these spans, as a file."""
    title = f"{run.name}: {stage} step {step}"
    return svg(spans(entries(run, stage, step)), title=title).encode()

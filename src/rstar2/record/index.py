"""The index of recorded groups: one small line per group, so that a reader of 100,000 rollouts need
not parse their tokens.

`index/<stage>.jsonl` stands beside `trajectories/<stage>.jsonl` and says where each group's line
is and what its rollouts came to. It is a convenience, never the truth: whoever reads it takes an
entry only where it fits the file (`usable`), and makes the missing ones from the lines themselves
(`entry_of_line`). So a run of before the index, or one killed between two writes, reads alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from rstar2.types import Group, Selection

PROMPT_CHARS = 160


class TurnEntry(msgspec.Struct, array_like=True, frozen=True):
    """When one turn did what, in seconds: `started_s` since its rollout began, then durations."""

    engine: str
    started_s: float
    queue_s: float
    generate_s: float
    """From asking to the last token, the queue included."""
    tools_s: float
    preempted_s: float = 0.0


class RolloutEntry(msgspec.Struct, array_like=True, frozen=True):
    """What a list of rollouts shows and can be filtered by."""

    name: str
    """What follows the group's id and a slash in the trajectory's id."""
    reward: float | None
    stop: str
    kept: bool | None
    """Whether resampling kept it; None where the group was not used to learn from."""
    outcomes: tuple[str, ...]
    """Of its tool calls, in order."""
    tokens: int
    """Of the completion, tool responses included."""
    sampled: int
    entropy: float | None
    """Mean over sampled tokens, if the engine reported it."""
    started_at: float
    wall_s: float
    turns: tuple[TurnEntry, ...]


class GroupEntry(msgspec.Struct, frozen=True):
    """One line of index/<stage>.jsonl."""

    stage: str
    step: int
    at: int
    """Byte offset of the group's line in trajectories/<stage>.jsonl, and its length."""
    size: int
    group: str
    problem: str
    kind: str
    prompt: str
    used: bool
    rollouts: tuple[RolloutEntry, ...]

    @property
    def end(self) -> int:
        return self.at + self.size


def entry_of(
    stage: str, step: int, at: int, size: int, group: Group, selection: Selection | None
) -> GroupEntry:
    """The entry of a group whose line has just been written."""
    kept = {} if selection is None else {c.trajectory_id: c.kept for c in selection.choices}
    rollouts = []
    for trajectory in group.trajectories:
        entropies = [e for turn in trajectory.turns for e in turn.entropies or ()]
        rollouts.append(
            RolloutEntry(
                name=_name(trajectory.id, group.id),
                reward=trajectory.reward.value if trajectory.reward else None,
                stop=trajectory.stop.value,
                kept=kept.get(trajectory.id),
                outcomes=tuple(r.outcome.value for r in trajectory.results),
                tokens=len(trajectory.completion_ids),
                sampled=trajectory.sampled_tokens,
                entropy=_mean(entropies),
                started_at=trajectory.started_at,
                wall_s=round(trajectory.wall_s, 4),
                turns=tuple(map(_turn, trajectory.turns)),
            )
        )
    problem = group.problem
    return GroupEntry(
        stage, step, at, size, group.id, problem.id, problem.kind, problem.prompt[:PROMPT_CHARS],
        selection is not None, tuple(rollouts),
    )  # fmt: skip


def usable(entries: Iterable[GroupEntry], size: int) -> list[GroupEntry]:
    """The entries that lie within a file of `size` bytes, in its order and without overlap.

    A run that was killed may have left entries of lines that were never written; those written
    after it was resumed start at the same offsets and take their place.
    """
    found: list[GroupEntry] = []
    for entry in entries:
        while found and found[-1].end > entry.at:
            found.pop()
        found.append(entry)
    while found and found[-1].end > size:
        found.pop()
    return found


# --------------------------------------------------------------------------- from the line itself


class _Result(msgspec.Struct):
    outcome: str


class _Turn(msgspec.Struct):
    sampled_ids: msgspec.Raw
    response_ids: msgspec.Raw = msgspec.Raw(b"[]")
    results: tuple[_Result, ...] = ()
    entropies: tuple[float, ...] | None = None
    engine: str = ""
    started_s: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    tools_s: float = 0.0
    preempted_s: float = 0.0


class _Reward(msgspec.Struct):
    value: float


class _Trajectory(msgspec.Struct):
    id: str
    stop: str
    turns: tuple[_Turn, ...]
    reward: _Reward | None = None
    started_at: float = 0.0
    wall_s: float = 0.0


class _Problem(msgspec.Struct):
    id: str
    prompt: str
    kind: str = ""


class _Group(msgspec.Struct):
    id: str
    problem: _Problem
    trajectories: tuple[_Trajectory, ...]


class _Choice(msgspec.Struct):
    trajectory_id: str
    kept: bool


class _Selection(msgspec.Struct):
    choices: tuple[_Choice, ...]


class _Line(msgspec.Struct):
    stage: str
    step: int
    group: _Group
    selection: _Selection | None = None


_LINE = msgspec.json.Decoder(_Line)


def entry_of_line(line: bytes, at: int) -> GroupEntry:
    """The entry of a recorded line, without decoding its tokens."""
    read = _LINE.decode(line)
    group = read.group
    kept = (
        {} if read.selection is None else {c.trajectory_id: c.kept for c in read.selection.choices}
    )
    rollouts = []
    for trajectory in group.trajectories:
        sampled = sum(_count(turn.sampled_ids) for turn in trajectory.turns)
        rollouts.append(
            RolloutEntry(
                name=_name(trajectory.id, group.id),
                reward=trajectory.reward.value if trajectory.reward else None,
                stop=trajectory.stop,
                kept=kept.get(trajectory.id),
                outcomes=tuple(r.outcome for turn in trajectory.turns for r in turn.results),
                tokens=sampled + sum(_count(turn.response_ids) for turn in trajectory.turns),
                sampled=sampled,
                entropy=_mean([e for turn in trajectory.turns for e in turn.entropies or ()]),
                started_at=trajectory.started_at,
                wall_s=round(trajectory.wall_s, 4),
                turns=tuple(map(_turn, trajectory.turns)),
            )
        )
    problem = group.problem
    return GroupEntry(
        read.stage, read.step, at, len(line), group.id, problem.id, problem.kind,
        problem.prompt[:PROMPT_CHARS], read.selection is not None, tuple(rollouts),
    )  # fmt: skip


def _count(ids: msgspec.Raw) -> int:
    """How many numbers an encoded list has."""
    text = bytes(ids)
    return 0 if text == b"[]" else text.count(b",") + 1


def _name(trajectory: str, group: str) -> str:
    return trajectory.removeprefix(f"{group}/")


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 5) if values else None


def _turn(turn: Any) -> TurnEntry:
    return TurnEntry(
        turn.engine,
        round(turn.started_s, 4),
        round(turn.queue_s, 4),
        round(turn.generate_s, 4),
        round(turn.tools_s, 4),
        round(turn.preempted_s, 4),
    )

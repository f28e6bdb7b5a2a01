"""The index of recorded groups: one short line per group, so that a reader of 100,000 rollouts does
not have to decode their tokens.

`index/<stage>.jsonl` stands beside `trajectories/<stage>.jsonl`. It stores where the line of each
group is and the figures of its rollouts. The recorded lines are the truth and the index is a cache:
a reader checks an entry against the file, and makes missing entries from the lines
(`index_entry`). So runs without an index, and runs killed between two writes, are readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rstar2.record.packed import plain_line
from rstar2.record.read import GroupLine
from rstar2.types import ToolCall, Trajectory, Turn

PROMPT_CHARS = 160


class TurnEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The times of one turn in seconds: `started_s` since the rollout began, then durations."""

    engine: str
    started_s: float
    queue_s: float
    generate_s: float
    """From the request to the last token, the queue included."""
    tools_s: float
    preempted_s: float = 0.0


class RolloutEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The figures of a rollout that lists show and filter by."""

    name: str
    """The trajectory's id without the group's id and the slash."""
    reward: float | None
    stop: str
    kept: bool | None
    """Whether resampling kept it; None if the group was not used for training."""
    outcomes: tuple[str, ...]
    """The outcome of each tool call, in order."""
    tokens: int
    """Length of the completion, tool responses included."""
    sampled: int
    entropy: float | None
    """Mean over sampled tokens, if the engine reported it."""
    started_at: float
    wall_s: float
    turns: tuple[TurnEntry, ...]


class GroupEntry(msgspec.Struct, frozen=True, gc=False):
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


# --------------------------------------------------------------------------- partial decoding


class PartialCall(msgspec.Struct, gc=False):
    """The arguments of a recorded tool call; version 0.2 recorded only `code`."""

    code: str = ""
    arguments: dict[str, Any] = {}

    @property
    def shown(self) -> str:
        """The call for people, as `ToolCall.shown`."""
        return self.code or ToolCall("", "", self.arguments).shown


class PartialResult(msgspec.Struct, gc=False):
    """The outcome of a recorded tool result."""

    outcome: str


class PartialTurn(msgspec.Struct, gc=False):
    """A recorded turn whose token ids stay encoded."""

    sampled_ids: msgspec.Raw
    response_ids: msgspec.Raw = msgspec.Raw(b"[]")
    calls: tuple[PartialCall, ...] = ()
    results: tuple[PartialResult, ...] = ()
    entropies: tuple[float, ...] | None = None
    engine: str = ""
    started_s: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    tools_s: float = 0.0
    preempted_s: float = 0.0


class PartialReward(msgspec.Struct, gc=False):
    """The value of a recorded reward."""

    value: float


class PartialSegment(msgspec.Struct, gc=False):
    """The turns of a further segment of a recorded trajectory."""

    turns: tuple[PartialTurn, ...]


class PartialTrajectory(msgspec.Struct, gc=False):
    """A recorded trajectory without its token ids and logprobs."""

    id: str
    stop: str
    turns: tuple[PartialTurn, ...]
    text: str = ""
    reward: PartialReward | None = None
    started_at: float = 0.0
    wall_s: float = 0.0
    more_segments: tuple[PartialSegment, ...] = ()

    @property
    def all_turns(self) -> tuple[PartialTurn, ...]:
        """The turns of all segments."""
        return (*self.turns, *(turn for segment in self.more_segments for turn in segment.turns))


class PartialProblem(msgspec.Struct, gc=False):
    """The parts of a recorded problem that lists show."""

    id: str
    prompt: str
    kind: str = ""


class PartialGroup(msgspec.Struct, gc=False):
    """A recorded group without tokens."""

    id: str
    problem: PartialProblem
    trajectories: tuple[PartialTrajectory, ...]


class PartialChoice(msgspec.Struct, gc=False):
    """Whether resampling kept one trajectory."""

    trajectory_id: str
    kept: bool


class PartialSelection(msgspec.Struct, gc=False):
    """The choices of a recorded selection."""

    choices: tuple[PartialChoice, ...]


class PartialGroupLine(msgspec.Struct, gc=False):
    """One line of trajectories/<stage>.jsonl, decoded without tokens and logprobs."""

    stage: str
    step: int
    group: PartialGroup
    selection: PartialSelection | None = None


_DECODER = msgspec.json.Decoder(PartialGroupLine)


def decode_without_tokens(line: bytes) -> PartialGroupLine:
    """A recorded line without tokens and logprobs: several times faster than decoding it whole."""
    return _DECODER.decode(plain_line(line, values_of="entropies"))


def index_entry(line: bytes, at: int) -> GroupEntry:
    """The index entry of a recorded line that begins at byte `at`."""
    return group_entry(decode_without_tokens(line), at, len(line))


def group_entry(recorded: GroupLine | PartialGroupLine, at: int, size: int) -> GroupEntry:
    """The index entry of a group whose line has `size` bytes from byte `at`."""
    group, selection = recorded.group, recorded.selection
    kept = {} if selection is None else {c.trajectory_id: c.kept for c in selection.choices}
    rollouts = tuple(
        _rollout_entry(trajectory, group.id, kept.get(trajectory.id))
        for trajectory in group.trajectories
    )
    problem = group.problem
    return GroupEntry(
        recorded.stage, recorded.step, at, size, group.id, problem.id, problem.kind,
        problem.prompt[:PROMPT_CHARS], selection is not None, rollouts,
    )  # fmt: skip


def _rollout_entry(
    trajectory: Trajectory | PartialTrajectory, group: str, kept: bool | None
) -> RolloutEntry:
    sampled = responses = 0
    outcomes: list[str] = []
    entropies: list[float] = []
    for turn in trajectory.all_turns:
        sampled += _count(turn.sampled_ids)
        responses += _count(turn.response_ids)
        outcomes += [result.outcome for result in turn.results]
        entropies += turn.entropies or ()
    return RolloutEntry(
        trajectory.id.removeprefix(f"{group}/"),
        trajectory.reward.value if trajectory.reward else None,
        trajectory.stop,
        kept,
        tuple(outcomes),
        sampled + responses,
        sampled,
        round(sum(entropies) / len(entropies), 5) if entropies else None,
        trajectory.started_at,
        round(trajectory.wall_s, 4),
        tuple(map(_turn_entry, trajectory.all_turns)),
    )


def _count(ids: Sequence[int] | msgspec.Raw) -> int:
    """The length of a list of numbers, encoded or not."""
    if not isinstance(ids, msgspec.Raw):
        return len(ids)
    text = bytes(ids)
    return 0 if text == b"[]" else text.count(b",") + 1


def _turn_entry(turn: Turn | PartialTurn) -> TurnEntry:
    return TurnEntry(
        turn.engine,
        round(turn.started_s, 4),
        round(turn.queue_s, 4),
        round(turn.generate_s, 4),
        round(turn.tools_s, 4),
        round(turn.preempted_s, 4),
    )

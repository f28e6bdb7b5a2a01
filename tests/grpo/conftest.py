"""Trajectories and groups built from the few fields that resampling reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rstar2.paper_format import format_penalty
from rstar2.types import (
    Group,
    Outcome,
    Problem,
    Reward,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

MakeTrajectory = Callable[..., Trajectory]
MakeGroup = Callable[..., Group]


def make_trajectory(
    index: int = 0,
    reward: float | None = 1.0,
    outcomes: tuple[Outcome, ...] = (Outcome.OK,),
    tags: int = 1,
    turns: int | None = None,
    stop: StopReason = StopReason.ANSWERED,
    sampled: tuple[int, ...] = (5, 6),
) -> Trajectory:
    """One call per turn, then an answer; `turns` adds turns without calls."""
    calls = [
        Turn(
            sampled_ids=sampled,
            logprobs=(-0.5,) * len(sampled),
            versions=((3, len(sampled)),),
            calls=(ToolCall(f"{index}.{n}", "tool"),),
            results=(ToolResult(f"{index}.{n}", outcome),),
            response_ids=(8, 9),
        )
        for n, outcome in enumerate(outcomes)
    ]
    plain = Turn(
        sampled_ids=sampled, logprobs=(-0.25,) * len(sampled), versions=((4, len(sampled)),)
    )
    count = len(calls) + 1 if turns is None else turns
    return Trajectory(
        id=f"t{index}",
        problem_id="p",
        group_id="g",
        seed=index,
        prompt_ids=(1, 2, 3),
        turns=(*calls, *[plain] * (count - len(calls))),
        stop=stop,
        answer_tags=tags,
        format_penalty=format_penalty(tags, count),
        reward=None if reward is None else Reward(reward, "1", "exact"),
    )


def make_group(trajectories: list[Trajectory], id: str = "g") -> Group:
    return Group(id, Problem("p", "?", "1"), 0, tuple(trajectories))


@pytest.fixture
def trajectory() -> MakeTrajectory:
    return make_trajectory


@pytest.fixture
def group() -> MakeGroup:
    return make_group

"""An export answers the same through the agent loop, plain transformers and vLLM's OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rstar2 import Sandbox
from rstar2.paper_format import TOOL
from rstar2.record import read_groups
from rstar2.types import Trajectory
from tests.vllm.answering import converse, serving, with_openai, with_transformers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def recorded(stage: Path) -> list[tuple[str, Trajectory]]:
    """Questions, and what the agent loop answered to them at temperature 0."""
    lines = read_groups(stage.parents[1], "eval-sft-greedy")
    return [(line.group.problem.prompt, line.group.trajectories[0]) for line in lines]


@pytest.fixture(scope="module")
def served(stage: Path) -> Iterator[httpx.Client]:
    """The server of the export."""
    with serving(stage) as client:
        yield client


def agent_said(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns]


def comparable(recorded: list[tuple[str, Trajectory]]) -> list[tuple[str, Trajectory]]:
    """Rollouts whose calls are all valid: the OpenAI format cannot express a call that is not."""
    return [
        (question, trajectory)
        for question, trajectory in recorded
        if all(call.error is None for turn in trajectory.turns for call in turn.calls)
        and trajectory.stop.value != "max_length"
    ]


def test_transformers_answers_as_the_agent_loop(
    stage: Path, recorded: list[tuple[str, Trajectory]]
) -> None:
    complete = with_transformers(stage)
    compared = comparable(recorded)
    assert len(compared) >= 4
    with Sandbox() as box:
        for question, trajectory in compared:
            assert converse(complete, question, box) == agent_said(trajectory)


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "no tools"])
def test_the_openai_api_of_vllm_answers_as_the_agent_loop(
    tools: list[dict[str, Any]] | None,
    served: httpx.Client,
    recorded: list[tuple[str, Trajectory]],
) -> None:
    complete = with_openai(served, tools)
    compared = comparable(recorded)
    assert any(turn.calls for _, trajectory in compared for turn in trajectory.turns)
    with Sandbox() as box:
        for question, trajectory in compared:
            assert converse(complete, question, box) == agent_said(trajectory)

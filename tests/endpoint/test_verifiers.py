"""A real verifiers environment: its own taskset, scoring, interception and client, our tokens."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.endpoint.verifiers import VerifiersEnvironment
from rstar2.errors import UserError
from rstar2.types import Problem, StopReason, Trajectory
from tests.endpoint.scripted import ScriptedGenerator, tiny_template

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEMPLATE = tiny_template()


@pytest.fixture
def reverse(monkeypatch: pytest.MonkeyPatch) -> VerifiersEnvironment:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("verifiers_reverse")
    environment = module.environment()
    assert isinstance(environment, VerifiersEnvironment)
    return environment


async def rollout(
    environment: VerifiersEnvironment,
    problem: Problem,
    answer: Callable[[str], str],
    *,
    number: int = 0,
    max_length: int = 96,
) -> Trajectory:
    return await environment.rollout(
        problem,
        id=f"g/{number}",
        group_id="g",
        seed=0,
        generator=ScriptedGenerator(TEMPLATE, answer),
        template=TEMPLATE,
        agent=AgentConfig(),
        spec=RolloutSpec(SamplingConfig(), max_length, 3),
    )


def reversed_letters(prompt: str) -> str:
    letters = prompt.split("Reverse: ")[1].split("<|im_end|>")[0].split()
    return " ".join(reversed(letters))


async def test_episodes_have_the_environments_own_reward(reverse: VerifiersEnvironment) -> None:
    problems = reverse.problems("train", 6, 0)
    right = await asyncio.gather(
        *(rollout(reverse, p, reversed_letters, number=i) for i, p in enumerate(problems))
    )
    assert [t.failure for t in right] == [None] * 6
    assert [t.reward.value for t in right if t.reward] == [1.0] * 6
    half = await rollout(
        reverse, problems[0], lambda p: " ".join(reversed_letters(p).split()[:1] * 3)
    )
    assert half.reward is not None
    assert half.reward.value == pytest.approx(1 / 3)
    assert half.stop is StopReason.ANSWERED
    assert TEMPLATE.decode(half.prompt_ids).startswith("<|im_start|>user\nReverse: ")
    await reverse.close()


async def test_a_rollout_without_room_has_reward_zero(reverse: VerifiersEnvironment) -> None:
    problem = reverse.problems("train", 1, 0)[0]
    short = await rollout(reverse, problem, reversed_letters, max_length=10)
    assert short.failure is None
    assert short.reward is not None
    assert (short.reward.value, short.stop) == (0.0, StopReason.MAX_LENGTH)
    await reverse.close()


def test_the_splits_are_disjoint_and_repeat(reverse: VerifiersEnvironment) -> None:
    train = {p.prompt for p in reverse.problems("train", None, 0)}
    heldout = {p.prompt for p in reverse.problems("heldout", None, 0)}
    assert len(train) + len(heldout) == 8 * 7 * 6
    assert not train & heldout
    assert reverse.problems("train", 5, 0) == reverse.problems("train", 5, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "no-such-taskset"}, "no-such-taskset"),
        ({"id": "verifiers_reverse", "taskset": {"colour": "red"}}, "colour"),
    ],
)
def test_a_wrong_taskset_is_the_users_error(
    reverse: VerifiersEnvironment, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        VerifiersEnvironment(**arguments)  # type: ignore[arg-type]

"""A real verifiers environment: its own taskset, scoring, interception and client, our tokens."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.endpoint.verifiers import VerifiersEnvironment
from rstar2.errors import UserError
from rstar2.types import Problem, StopReason, Trajectory
from tests.endpoint.scripted import ScriptedGenerator
from tests.tiny import tiny_template

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def reverse(monkeypatch: pytest.MonkeyPatch) -> VerifiersEnvironment:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("verifiers_reverse")
    environment = module.environment("letters_taskset")
    assert isinstance(environment, VerifiersEnvironment)
    return environment


async def rollout(
    environment: VerifiersEnvironment,
    problem: Problem,
    answer: Callable[[str], str],
    *,
    number: int = 0,
    max_length: int = 96,
    max_turns: int = 3,
) -> Trajectory:
    return await environment.rollout(
        problem,
        id=f"g/{number}",
        group_id="g",
        seed=0,
        generator=ScriptedGenerator(tiny_template(), answer),
        template=tiny_template(),
        agent=AgentConfig(),
        spec=RolloutSpec(SamplingConfig(), max_length, max_turns),
    )


def reversed_letters(prompt: str) -> str:
    word = prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    return f"<reversed_text>{word[::-1]}</reversed_text>"


async def test_episodes_have_the_environments_own_reward(reverse: VerifiersEnvironment) -> None:
    problems = reverse.problems("train", 6, 0)
    right = await asyncio.gather(
        *(rollout(reverse, p, reversed_letters, number=i) for i, p in enumerate(problems))
    )
    assert [t.failure for t in right] == [None] * 6
    assert [t.reward.value for t in right if t.reward] == [1.0] * 6
    near = problems[0].prompt[:0:-1] + "-"
    part = await rollout(reverse, problems[0], lambda _: f"<reversed_text>{near}</reversed_text>")
    assert part.reward is not None
    assert part.reward.value == pytest.approx(2 / 3)
    assert part.stop is StopReason.ANSWERED
    assert (
        tiny_template()
        .decode(part.prompt_ids)
        .startswith(f"<|im_start|>user\n{problems[0].prompt}")
    )
    await reverse.close()


async def test_a_rollout_without_room_has_reward_zero(reverse: VerifiersEnvironment) -> None:
    problem = reverse.problems("train", 1, 0)[0]
    short = await rollout(reverse, problem, reversed_letters, max_length=10)
    assert short.failure is None
    assert short.reward is not None
    assert (short.reward.value, short.stop) == (0.0, StopReason.MAX_LENGTH)
    await reverse.close()


async def test_a_broken_scorer_after_a_limit_is_no_reward(
    reverse: VerifiersEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness survives the refusal of a second request, and the task's reward raises."""
    import openai
    import verifiers.v1 as vf

    harness = importlib.import_module("verifiers_reverse").ChatHarness
    task = importlib.import_module("letters_taskset").LettersTask
    launch = harness.launch

    async def twice(*arguments: Any) -> Any:
        ended = await launch(*arguments)
        with contextlib.suppress(openai.BadRequestError):
            await launch(*arguments)
        return ended

    async def right_places(self: object, trace: object) -> float:
        raise LookupError("the word list is gone")

    monkeypatch.setattr(harness, "launch", twice)
    monkeypatch.setattr(task, "right_places", vf.reward(right_places))
    problem = reverse.problems("train", 1, 0)[0]
    lost = await rollout(reverse, problem, reversed_letters, max_turns=1)
    assert lost.reward is None
    assert lost.failure is not None
    assert "the word list is gone" in lost.failure.message
    await reverse.close()


def test_the_splits_are_disjoint_and_repeat(reverse: VerifiersEnvironment) -> None:
    train = {p.prompt for p in reverse.problems("train", None, 0)}
    heldout = {p.prompt for p in reverse.problems("heldout", None, 0)}
    assert len(train) + len(heldout) == 7 * 7 * 6
    assert not train & heldout
    assert reverse.problems("train", 5, 0) == reverse.problems("train", 5, 1)


def test_tasks_of_one_name_have_ids_of_their_own(
    reverse: VerifiersEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = importlib.import_module("letters_taskset")
    load = letters.LettersTaskset.load

    def named(taskset: Any) -> Iterator[Any]:
        for task in load(taskset):
            data = task.data.model_copy(update={"name": "reverse"})
            yield letters.LettersTask(data, taskset.config.task)

    monkeypatch.setattr(letters.LettersTaskset, "load", named)
    environment = importlib.import_module("verifiers_reverse").environment("letters_taskset")
    splits = [environment.problems(split, None, 0) for split in ("train", "heldout")]
    problems = [problem for split in splits for problem in split]
    assert len({problem.id for problem in problems}) == len(problems) == 7 * 7 * 6
    assert all(environment._tasks[p.id].data.prompt == p.prompt for p in problems)


async def test_closing_has_a_deadline(
    reverse: VerifiersEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of the environment that do not end are abandoned; the endpoint still closes."""
    monkeypatch.setattr("rstar2.endpoint.verifiers.CLOSE_DEADLINE_S", 0.05)
    stopped = asyncio.Event()

    async def stop() -> None:
        stopped.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(reverse._env, "stop", stop)
    problem = reverse.problems("train", 1, 0)[0]
    assert (await rollout(reverse, problem, reversed_letters)).failure is None
    holder = reverse._holder
    assert holder is not None
    await reverse.close()
    assert stopped.is_set()
    assert reverse._server is None
    await asyncio.wait({holder})  # it has been cancelled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "no-such-taskset"}, "no-such-taskset"),
        ({"id": "letters_taskset", "taskset": {"dataset_name": "x", "colour": "red"}}, "colour"),
    ],
)
def test_a_wrong_taskset_is_the_users_error(
    reverse: VerifiersEnvironment, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        VerifiersEnvironment(**arguments)  # type: ignore[arg-type]

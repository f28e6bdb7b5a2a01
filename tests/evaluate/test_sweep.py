"""What is missing is drawn with seeds of its own; what infrastructure loses stays missing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.engine.openai import ChatReply
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError, InfrastructureError
from rstar2.evaluate.answerers import EndpointAnswerer, Task
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.store import EvalDirectory
from rstar2.evaluate.sweep import answer_all, missing_tasks, sweep
from rstar2.types import (
    Failure,
    Finish,
    Message,
    Outcome,
    StopReason,
    ToolResult,
    Trajectory,
)
from tests.agent.agent_fakes import ScriptedTools
from tests.evaluate.evaluate_helpers import given, problem, settings

SET = Benchmark("set", "made", tuple(problem(name) for name in "abc"))
LIMITS = RolloutSpec(SamplingConfig(), 128, 3)


class Scripted:
    """Answers at once; loses the rollouts that a test names."""

    def __init__(self, *lost: tuple[str, int]) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self.lost = set(lost)

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        key = (task.problem.id, task.sample)
        self.asked[key] += 1
        trajectory = given(*key, "1", correct=True).trajectory
        if key in self.lost:
            failure = Failure("engine", "it died")
            return replace(trajectory, reward=None, failure=failure), 0
        return trajectory, 3


async def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    asked = settings(samples=2)
    with EvalDirectory.open(tmp_path / "e", asked, [SET]) as directory:
        directory.add(given("a", 1, "1", correct=True))
        tasks = list(missing_tasks([SET], asked, directory))
        answerer = Scripted()
        assert not await sweep(tasks, answerer, directory, LIMITS, concurrency=2)
        assert answerer.asked == Counter(
            {(p, s): 1 for p in "abc" for s in (0, 1) if (p, s) != ("a", 1)}
        )
        assert not list(missing_tasks([SET], asked, directory))


async def test_seeds_do_not_depend_on_what_was_done_before(tmp_path: Path) -> None:
    asked = settings(samples=4)
    with EvalDirectory.open(tmp_path / "e", asked, [SET]) as directory:
        fresh = {(t.problem.id, t.sample): t.seed for t in missing_tasks([SET], asked, directory)}
        directory.add(given("a", 0, "1", correct=True))
        directory.add(given("b", 2, "1", correct=True))
        rest = {(t.problem.id, t.sample): t.seed for t in missing_tasks([SET], asked, directory)}
    assert len(set(fresh.values())) == 12
    assert rest == {key: fresh[key] for key in rest}
    assert len(rest) == 10


async def test_lost_rollouts_are_counted_and_tried_again(tmp_path: Path) -> None:
    asked = settings(samples=1)
    with EvalDirectory.open(tmp_path / "e", asked, [SET]) as directory:
        tasks = list(missing_tasks([SET], asked, directory))
        lost = await sweep(tasks, Scripted(("b", 0)), directory, LIMITS, concurrency=1)
        assert lost == Counter(engine=1)
        assert [t.problem.id for t in missing_tasks([SET], asked, directory)] == ["b"]


async def test_an_outage_ends_the_sweep(tmp_path: Path) -> None:
    asked = settings(samples=8)
    with EvalDirectory.open(tmp_path / "e", asked, [SET]) as directory:
        tasks = list(missing_tasks([SET], asked, directory))
        everything = Scripted(*((p, s) for p in "abc" for s in range(8)))
        with pytest.raises(InfrastructureError, match="8 rollouts in a row"):
            await sweep(tasks, everything, directory, LIMITS, concurrency=1)
        assert everything.asked.total() == 8


async def test_answers_without_a_record_are_bounded_and_in_the_order_of_tasks(
    tmp_path: Path,
) -> None:
    class Bounded(Scripted):
        running = most = 0

        async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
            self.running += 1
            self.most = max(self.most, self.running)
            for _ in range(3 if task.problem.id == "a" else 1):  # they end in another order
                await asyncio.sleep(0)
            self.running -= 1
            return await super().answer(task, spec)

    asked = settings(samples=8)
    with EvalDirectory.open(tmp_path / "e", asked, [SET]) as directory:
        tasks = list(missing_tasks([SET], asked, directory))
        answerer = Bounded()
        made = await answer_all(answerer, tasks, LIMITS, 4)
        assert answerer.most == 4
        assert [t.problem_id for t in made] == [task.problem.id for task in tasks]
        everything = Scripted(*((p, s) for p in "abc" for s in range(8)))
        with pytest.raises(InfrastructureError, match="8 rollouts in a row"):
            await answer_all(everything, tasks, LIMITS, 4)


# --------------------------------------------------------------------------- endpoints

CALL = (
    '<tool_call>\n{"name": "execute_python_code_with_standard_io", '
    '"arguments": {"code": "print(1)", "input": ""}}\n</tool_call>'
)
ANSWER = "<answer>\\boxed{1}</answer>"


class Chat:
    """An endpoint by script; notes what it was asked."""

    def __init__(self, *replies: ChatReply | Exception) -> None:
        self.replies = list(replies)
        self.budgets: list[int] = []

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int, **how: Any
    ) -> ChatReply:
        self.budgets.append(max_tokens)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def endpoint(chat: Chat, retries: int = 1) -> EndpointAnswerer:
    tools = ScriptedTools(lambda request: ToolResult(request.id, Outcome.OK, stdout="1\n"))
    agent = AgentConfig(retries=retries)
    return EndpointAnswerer(chat, PythonMath(), tools, agent, TemplateConfig())


TASK = Task("set", problem("a"), "eval/set/0", 0, 7)


async def test_an_endpoint_shares_one_budget_between_turns() -> None:
    chat = Chat(
        ChatReply(CALL, Finish.STOP, prompt_tokens=50, completion_tokens=30),
        ChatReply(ANSWER, Finish.STOP, prompt_tokens=95, completion_tokens=10),
    )
    trajectory, tokens = await endpoint(chat).answer(TASK, LIMITS)
    assert trajectory.correct
    assert chat.budgets == [128, 98]
    assert tokens == 55, "two turns and the tool response between them"


async def test_an_endpoint_stops_at_its_budget() -> None:
    chat = Chat(ChatReply(CALL, Finish.STOP, prompt_tokens=50, completion_tokens=128))
    trajectory, tokens = await endpoint(chat).answer(TASK, LIMITS)
    assert trajectory.stop is StopReason.MAX_LENGTH
    assert not trajectory.correct
    assert tokens == 128


async def test_an_endpoint_that_fails_is_asked_again_and_never_graded_wrong() -> None:
    chat = Chat(EngineError("gone"), ChatReply(ANSWER, Finish.STOP))
    trajectory, _ = await endpoint(chat).answer(TASK, LIMITS)
    assert trajectory.correct
    assert trajectory.attempts == 2
    lost, _ = await endpoint(Chat(EngineError("gone")), retries=0).answer(TASK, LIMITS)
    assert lost.reward is None
    assert lost.failure == Failure("engine", "gone")

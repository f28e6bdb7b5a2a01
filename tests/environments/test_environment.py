"""Own environments in the real agent loop: tools, replies, rewards, and what breaks in them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rstar2
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.environments.base import EnvironmentProtocol, SandboxClient, ToolSpec
from rstar2.environments.environment import EpisodeView
from rstar2.environments.tools import call_text
from rstar2.errors import DataError, InfrastructureError, UserError
from rstar2.types import (
    Failure,
    Message,
    Outcome,
    Problem,
    Reward,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    decode,
    encode,
)
from tests.agent.agent_fakes import ScriptedGenerator
from tests.tiny import tokenizer

CITIES = [{"prompt": "How many people live in Rome?", "answer": 4, "city": "Rome"}]
CONFIG = TemplateConfig(system="none", instruction="none")


@rstar2.tool
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Rome": 4}[city]


def right(episode: EpisodeView) -> float:
    return float(episode.answer == episode.problem.answer)


def roll(
    environment: EnvironmentProtocol,
    lines: Sequence[str],
    *,
    max_turns: int = 8,
    agent: AgentConfig | None = None,
    sandbox: SandboxClient | None = None,
    config: TemplateConfig = CONFIG,
) -> tuple[Trajectory, ScriptedGenerator]:
    template = Template(tokenizer(), config, environment.prefill)
    generator = ScriptedGenerator(template, lines)
    loop = AgentLoop(environment, generator, sandbox, template, agent or AgentConfig())
    (problem,) = environment.problems("train", 1, 0)
    spec = RolloutSpec(SamplingConfig(), 4000, max_turns)
    trajectory = asyncio.run(loop.run(problem, id="r", group_id="g", seed=1, spec=spec))
    assert generator.released == ([] if not generator.prompts else ["r"])
    assert decode(encode(trajectory), Trajectory) == trajectory
    return trajectory, generator


def outcomes(trajectory: Trajectory) -> list[Outcome]:
    return [result.outcome for result in trajectory.results]


def test_a_tool_is_called_and_the_answer_is_rewarded() -> None:
    env = rstar2.Environment(CITIES, right, tools=[population], system="About cities.")
    trajectory, generator = roll(env, [population.call_text(city="Rome"), "4"])
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.answer, trajectory.format_penalty) == (1.0, "4", 0)
    assert outcomes(trajectory) == [Outcome.OK]
    shown = generator.template.decode(generator.prompts[1])
    assert "<tool_response>\n4\n</tool_response>" in shown
    assert "About cities" not in shown, "template.system: none"


def test_the_prompt_has_system_message_and_schemas() -> None:
    env = rstar2.Environment(CITIES, right, tools=[population], system="About cities.")
    _, generator = roll(env, ["4"], config=TemplateConfig())
    shown = generator.template.decode(generator.prompts[0])
    assert shown.startswith("<|im_start|>system\nAbout cities.\n\n# Tools")
    assert json.dumps(population.spec.signature) in shown


def test_no_tools_is_an_environment_too() -> None:
    env = rstar2.Environment(CITIES, right)
    assert not env.needs_sandbox
    trajectory, _ = roll(env, ["4"])
    assert trajectory.correct
    trajectory, _ = roll(env, [call_text("population", {}), "4"])
    assert outcomes(trajectory) == [Outcome.UNKNOWN_TOOL]


def test_a_game_replies_until_it_ends_and_keeps_its_state() -> None:
    def reply(episode: EpisodeView) -> str | None:
        guesses = episode.state.setdefault("guesses", [])
        guesses.append(int(episode.text))
        if guesses[-1] == 42:
            return None
        return "higher" if guesses[-1] < 42 else "lower"

    def reward(episode: EpisodeView) -> float:
        return 1.0 / len(episode.state["guesses"])

    env = rstar2.Environment([{"prompt": "Guess."}], reward, reply=reply)
    trajectory, generator = roll(env, ["10", "70", "42"])
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.reward is not None
    assert trajectory.reward.value == pytest.approx(1 / 3)
    assert [turn.reply for turn in trajectory.turns] == [
        (Message("user", "higher"),), (Message("user", "lower"),), ()
    ]  # fmt: skip
    assert "<|im_start|>user\nlower<|im_end|>" in generator.template.decode(generator.prompts[2])
    trajectory, _ = roll(env, ["10", "70"], max_turns=2)
    assert trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.turns[-1].response_ids == ()


def test_a_reply_sees_the_turns_with_tool_calls_too() -> None:
    def look(place: str) -> str:
        """Look somewhere."""
        return f"nothing in {place}"

    def reply(episode: EpisodeView) -> str | None:
        seen.append([[call.name for call in turn.calls] for turn in episode.turns])
        return None if len(seen) == 2 else "Look again."

    seen: list[list[list[str]]] = []
    env = rstar2.Environment(CITIES, right, tools=[look], reply=reply)
    roll(env, [call_text("look", {"place": "Rome"}), "3", "4"])
    assert seen == [[["look"], []], [["look"], [], []]]


def test_tools_share_their_state_with_the_reward() -> None:
    def tools(episode: EpisodeView) -> list[Callable[..., Any]]:
        def add(item: str) -> int:
            """Put an item into the cart."""
            cart = episode.state.setdefault("cart", [])
            cart.append(item)
            return len(cart)

        return [add]

    def bought(episode: EpisodeView) -> int:
        return len(episode.state["cart"])

    env = rstar2.Environment(CITIES, bought, tools=tools)
    trajectory, _ = roll(env, [call_text("add", {"item": "fig"}) * 2, "done"])
    assert trajectory.reward is not None
    assert trajectory.reward.value == 2


def test_tools_may_depend_on_the_problem_and_are_made_for_every_episode() -> None:
    made = []

    def tools(episode: EpisodeView) -> list[Callable[..., Any]]:
        count = 0

        def step() -> int:
            """Count a step."""
            nonlocal count
            count += 1
            return count

        made.append(episode.problem.meta["city"])
        return [step]

    env = rstar2.Environment(CITIES, right, tools=tools)
    for _ in range(2):
        trajectory, _ = roll(env, [call_text("step", {}), call_text("step", {}), "4"])
        assert [result.stdout for result in trajectory.results] == ["1", "2"]
    assert made == ["Rome", "Rome"]


def test_calls_of_a_turn_run_at_the_same_time_and_results_keep_their_order() -> None:
    meeting = asyncio.Event()

    @rstar2.tool
    async def first() -> str:
        """Wait for the second."""
        await meeting.wait()
        return "one"

    @rstar2.tool
    async def second() -> str:
        """Release the first."""
        meeting.set()
        return "two"

    env = rstar2.Environment(CITIES, right, tools=[first, second])
    trajectory, _ = roll(env, [first.call_text() + second.call_text(), "4"])
    assert [result.stdout for result in trajectory.results] == ["one", "two"]


def test_calls_of_a_stateful_tool_run_one_after_another() -> None:
    running, order = [0], []

    @rstar2.tool(stateful=True)
    async def push(x: int) -> None:
        """Push a number."""
        running[0] += 1
        assert running[0] == 1
        await asyncio.sleep(0)
        order.append(x)
        running[0] -= 1

    env = rstar2.Environment(CITIES, right, tools=[push])
    trajectory, _ = roll(env, [push.call_text(x=1) + push.call_text(x=2), "4"])
    assert outcomes(trajectory) == [Outcome.NO_OUTPUT] * 2
    assert order == [1, 2]


# --------------------------------------------------------------------------- what breaks


def raising(error: Exception) -> Callable[[EpisodeView], float]:
    def reward(episode: EpisodeView) -> float:
        raise error

    return reward


@pytest.mark.parametrize(
    ("reward", "name", "message"),
    [
        (raising(KeyError("Paris")), "reward", "reward raised KeyError: 'Paris'"),
        (raising(InfrastructureError("judge is down")), "infrastructure", "judge is down"),
        (raising(ConnectionResetError("judge")), "connection", "judge"),
        (lambda episode: math.nan, "reward", "the reward is nan"),
        (lambda episode: math.inf, "reward", "the reward is inf"),
        (lambda episode: 10**400, "reward", "the reward is an integer of 401 digits"),
        (lambda episode: Reward(math.nan), "reward", "the reward is nan"),
        (lambda episode: Reward(10**400), "reward", "the reward is an integer of 401 digits"),
        (lambda episode: Failure("judge", "no verdict"), "judge", "no verdict"),
        (lambda episode: None, "reward", "must be a number, got None"),
        (lambda episode: "1", "reward", "must be a number, got '1'"),
    ],
)
def test_a_reward_that_fails_is_a_failure_and_never_zero(
    reward: Callable[[EpisodeView], Any], name: str, message: str
) -> None:
    trajectory, _ = roll(rstar2.Environment(CITIES, reward), ["4"])
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.name == name
    assert message in trajectory.failure.message
    assert "/rstar2/" not in trajectory.failure.message.replace(str(Path(__file__)), "")


def test_a_reward_may_be_negative_and_async() -> None:
    async def reward(episode: EpisodeView) -> float:
        await asyncio.sleep(0)
        return -2.5

    trajectory, _ = roll(rstar2.Environment(CITIES, reward), ["4"])
    assert trajectory.reward is not None
    assert trajectory.reward.value == -2.5


def test_a_reward_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2.agent.episodes.GRACE_S", 0.0)

    async def reward(episode: EpisodeView) -> float:
        await asyncio.Event().wait()
        return 1.0

    agent = AgentConfig(reward_deadline_s=0.05)
    trajectory, _ = roll(rstar2.Environment(CITIES, reward), ["4"], agent=agent)
    assert trajectory.failure is not None
    assert trajectory.failure.name == "deadline"


def test_a_tool_that_is_out_of_order_loses_the_rollout() -> None:
    @rstar2.tool
    def gone() -> None:
        """Fail."""
        raise InfrastructureError("the database is down")

    @rstar2.tool
    def raw() -> bytes:
        """Return bytes."""
        return b"raw"

    for tool, name, message in ((gone, "infrastructure", "database"), (raw, "tool", "bytes")):
        env = rstar2.Environment(CITIES, right, tools=[tool])
        trajectory, generator = roll(env, [tool.call_text(), "4"])
        assert trajectory.stop is StopReason.TOOL_FAILED
        assert trajectory.failure is not None
        assert trajectory.failure.name == name
        assert message in trajectory.failure.message
        assert len(generator.prompts) == 1, "the model never reads it"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError"),
        (lambda episode: [], "got no message"),
        (lambda episode: [Message("assistant", "I say")], "got assistant"),
        (lambda episode: ["higher"], "consists of Messages of role user.* got str"),
        (lambda episode: [{"role": "user", "content": "higher"}], "got dict"),
        (lambda episode: 5, "'int' object is not iterable"),
    ],
)
def test_a_reply_that_fails_loses_the_rollout(
    reply: Callable[[EpisodeView], Any], message: str
) -> None:
    trajectory, _ = roll(rstar2.Environment(CITIES, right, reply=reply), ["4"])
    assert trajectory.stop is StopReason.ENVIRONMENT_FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.name == "environment"
    assert re.search(message, trajectory.failure.message)


def test_an_episode_that_cannot_open_is_a_failure() -> None:
    def tools(episode: EpisodeView) -> list[Callable[..., Any]]:
        raise LookupError("no board for this problem")

    trajectory, generator = roll(rstar2.Environment(CITIES, right, tools=tools), ["4"])
    assert trajectory.stop is StopReason.ENVIRONMENT_FAILED
    assert trajectory.failure is not None
    assert "no board for this problem" in trajectory.failure.message
    assert generator.prompts == []


class ClosingTool:
    """A tool whose closing fails, or takes a moment."""

    needs_sandbox = False

    def __init__(self, name: str, closed: list[str], error: Exception | None = None) -> None:
        self.spec = ToolSpec(name, "Close.")
        self.closed, self.error = closed, error

    def open(self, sandbox: SandboxClient | None) -> ClosingTool:
        return self

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        return ToolResult(call.id, Outcome.NO_OUTPUT)

    async def close(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)
        self.closed.append(self.spec.name)


def test_every_tool_is_closed_also_if_another_fails() -> None:
    closed: list[str] = []
    broken = ClosingTool("broken", closed, OSError("gone"))
    tools = [broken, ClosingTool("one", closed), ClosingTool("two", closed)]
    trajectory, _ = roll(rstar2.Environment(CITIES, right, tools=tools), ["4"])
    assert trajectory.correct
    assert closed == ["one", "two"]


def test_a_format_penalty_must_be_usable() -> None:
    env = rstar2.Environment(CITIES, right, format_penalty=lambda trajectory: -1.0)
    trajectory, _ = roll(env, ["4"])
    assert trajectory.failure is not None
    assert trajectory.failure.name == "format_penalty"


def test_tagged_answers_have_the_papers_penalty() -> None:
    env = rstar2.Environment(CITIES, right, answer_tags=("<answer>", "</answer>"))
    trajectory, _ = roll(env, ["<answer> 4 </answer>"])
    assert (trajectory.correct, trajectory.format_penalty) == (True, 0.0)
    trajectory, _ = roll(env, ["4"])
    assert (trajectory.stop, trajectory.format_penalty) == (StopReason.NO_ANSWER, 1.0)
    trajectory, _ = roll(env, ["<answer>3</answer><answer>4</answer>"])
    assert (trajectory.correct, trajectory.format_penalty) == (True, 1.0)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools are called 'population'"):
        rstar2.Environment(CITIES, right, tools=[population, population])
    with pytest.raises(UserError, match="neither a tool nor a function"):
        rstar2.Environment(CITIES, right, tools=["population"])


# --------------------------------------------------------------------------- problems


def test_one_problem_in_eight_is_held_out() -> None:
    env = rstar2.Environment([{"prompt": str(n)} for n in range(20)], right)
    train, heldout = (env.problems(split, None, 0) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (18, 2)
    assert not {p.id for p in train} & {p.id for p in heldout}
    assert len(env.problems("train", 5, 0)) == 5


def test_problems_come_from_a_file_or_a_function(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a?", "answer": 1, "year": 2020}\n\n{"prompt": "b?", "id": "x"}\n')
    first, second = rstar2.Environment(file, right).problems("train", None, 0)
    assert (first.answer, first.meta, second.id) == ("1", {"year": 2020}, "x")
    env = rstar2.Environment(lambda split, seed: [{"prompt": f"{split} {seed}"}], right)
    assert env.problems("heldout", 3, 7)[0].prompt == "heldout 7"


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "has no problems"),
        ([{"answer": "1"}], "problem 0: prompt = None must be text"),
        ([{"prompt": " "}], "prompt is empty"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], "id '1' is already that of"),
        (["a"], "expected a problem or a dict"),
    ],
)
def test_bad_problems_are_named(problems: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rstar2.Environment(problems, right)


# --------------------------------------------------------------------------- demonstrations


def test_demonstrations_become_conversations() -> None:
    def show(problem: Problem, rng: random.Random) -> list[str]:
        city = problem.meta["city"]
        return [population.call_text(city=city), str(population(city)), problem.answer]

    env = rstar2.Environment(CITIES, right, tools=[population], system="S", demonstrations=show)
    first, second = env.demonstrations(2, 0)
    assert [m.role for m in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert first.tools == (population.spec.signature,)
    assert replace(first, id="") == replace(second, id="")
    bad = rstar2.Environment(CITIES, right, demonstrations=lambda problem, rng: ["a", "b"])
    with pytest.raises(UserError, match="ends with a turn"):
        list(bad.demonstrations(1, 0))
    assert list(rstar2.Environment(CITIES, right).demonstrations(3, 0)) == []

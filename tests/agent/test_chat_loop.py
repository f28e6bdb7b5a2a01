"""The chat loop: the same stop reasons as the token loop, over messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rstar2.agent.chat_loop import ChatLoop, opening_messages
from rstar2.agent.episodes import LoopEvent, ToolReturned, TurnSampled, conclude
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.engine.openai import ChatReply
from rstar2.environments.python_math import PythonMath, PythonMathEpisode
from rstar2.errors import CodeEnvError, EngineError
from rstar2.paper_format import INSTRUCTION, SYSTEM, TOOL_NAME
from rstar2.types import Finish, Message, Outcome, Problem, StopReason, ToolResult, Trajectory
from tests.agent.agent_fakes import ScriptedTools

PROBLEM = Problem("p", "What is 6 times 7?", "42")
ANSWER = "<answer>\\boxed{42}</answer>"
CALL = "<tool_call>\n{}\n</tool_call>".format(
    json.dumps({"name": TOOL_NAME, "arguments": {"code": "6 * 7"}})
)


class Endpoint:
    """Says its lines in order and remembers what it was shown."""

    def __init__(self, lines: Sequence[ChatReply | str | Exception]) -> None:
        self.lines = list(lines)
        self.seen: list[list[Message]] = []

    async def complete(self, messages: Sequence[Message], **_options: Any) -> ChatReply:
        self.seen.append(list(messages))
        line = self.lines[len(self.seen) - 1]
        if isinstance(line, Exception):
            raise line
        return line if isinstance(line, ChatReply) else ChatReply(line, Finish.STOP)


def episode(
    tools: ScriptedTools | None = None, config: TemplateConfig | None = None
) -> PythonMathEpisode:
    messages = PythonMath(config).messages(PROBLEM)
    return PythonMathEpisode(PROBLEM, messages, tools or ScriptedTools())


def talk(
    lines: Sequence[ChatReply | str | Exception], turns: int = 5
) -> tuple[ChatLoop, Endpoint, list[LoopEvent]]:
    endpoint = Endpoint(lines)
    events: list[LoopEvent] = []
    chat_loop = ChatLoop(
        endpoint,
        AgentConfig(response_tokens=32),
        SamplingConfig(),
        opening_messages(episode(), TemplateConfig()),
        max_tokens=100,
        max_turns=turns,
        observer=events.append,
    )
    return chat_loop, endpoint, events


async def run(chat_loop: ChatLoop, tools: ScriptedTools | None = None) -> Trajectory:
    opened = episode(tools)
    trajectory = await chat_loop.run(opened, PROBLEM, id="d", group_id="g", seed=1)
    return await conclude(PythonMath(), opened, trajectory, chat_loop.agent, graded=False)


def test_the_opening_describes_format_and_tool() -> None:
    system, user = opening_messages(episode(), TemplateConfig())
    assert system.content.startswith(SYSTEM)
    assert f'"name": "{TOOL_NAME}"' in system.content
    assert "<|im_" not in system.content
    assert user.content == INSTRUCTION.format(problem=PROBLEM.prompt)
    config = TemplateConfig(system="none", instruction="none")
    compact = opening_messages(episode(config=config), config)
    assert compact == [Message("user", PROBLEM.prompt)]


async def test_call_read_answer() -> None:
    chat_loop, endpoint, events = talk([f"Hm.\n{CALL}", ANSWER])
    trajectory = await run(chat_loop)
    assert trajectory.stop is StopReason.ANSWERED
    assert (trajectory.answer, trajectory.answer_tags, trajectory.calls) == ("42", 1, 1)
    assert endpoint.seen[1][-2:] == [
        Message("assistant", f"Hm.\n{CALL}"),
        Message("user", "<tool_response>\nran 6 * 7\n</tool_response>"),
    ]
    assert [type(event) for event in events] == [TurnSampled, ToolReturned, TurnSampled]
    assert chat_loop.messages[-1] == Message("assistant", ANSWER)


@pytest.mark.parametrize(
    ("lines", "turns", "stop"),
    [
        (["nothing"], 5, StopReason.NO_ANSWER),
        ([CALL, CALL], 2, StopReason.MAX_TURNS),
        ([ChatReply(CALL, Finish.LENGTH)], 5, StopReason.MAX_LENGTH),
        (["<tool_call>"] * 3, 5, StopReason.INVALID_CALLS),
        ([CALL, EngineError("gone")], 5, StopReason.ENGINE_FAILED),
    ],
)
async def test_reasons_to_stop(
    lines: list[ChatReply | str | Exception], turns: int, stop: StopReason
) -> None:
    chat_loop, _, _ = talk(lines, turns=turns)
    trajectory = await run(chat_loop)
    assert trajectory.stop is stop
    assert (trajectory.failure is not None) == stop.infrastructure


async def test_a_dying_tool_server_is_not_shown() -> None:
    chat_loop, endpoint, _ = talk([CALL, ANSWER])
    tools = ScriptedTools(fail_at=0, error=CodeEnvError("x"))
    assert (await run(chat_loop, tools)).stop is StopReason.TOOL_FAILED
    assert len(endpoint.seen) == 1


async def test_long_output_is_cut_in_the_middle() -> None:
    tools = ScriptedTools(lambda r: ToolResult(r.id, Outcome.OK, stdout="a" * 5000 + "z"))
    chat_loop, endpoint, _ = talk([CALL, ANSWER])
    await run(chat_loop, tools)
    shown = endpoint.seen[1][-1].content
    assert len(shown) < 32 * 4 + 60
    assert "[...]" in shown
    assert "z\n</tool_response>" in shown

"""The agent loop for endpoints that return text only: for chat and evaluation, not for training.

Parser, tool calls, limits and stop reasons are those of `loop`, with messages instead of token ids.
The trajectory has turns, calls, results, text and answer, but no tokens: the server enforces the
length limit, and the trajectory cannot be used for training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rstar2.agent.loop import (
    CallRunner,
    Observer,
    ToolRunner,
    TurnSampled,
    failure_of,
    result_reporter,
    stop_before_tools,
)
from rstar2.agent.parser import answer_of, parse_turn
from rstar2.agent.prompts import INSTRUCTION, SYSTEM, TOOL, system_text, tool_text
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.engine.openai import ChatReply, OnText
from rstar2.errors import InfrastructureError
from rstar2.seeds import derive_seed
from rstar2.types import (
    Message,
    Problem,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

CHARS_PER_TOKEN = 4
"""Characters of tool response per allowed token; text endpoints give no token counts."""


class ChatModel(Protocol):
    """The method of an endpoint that the chat loop needs."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        deadline_s: float,
        on_text: OnText | None,
    ) -> ChatReply: ...


def opening_messages(problem: Problem, config: TemplateConfig) -> list[Message]:
    """The messages before the first turn; the system message describes the tool."""
    user = problem.prompt.strip()
    if config.instruction == "paper":
        user = INSTRUCTION.format(problem=user)
    messages = [Message("user", user)]
    if config.system == "paper":
        messages.insert(0, Message("system", system_text(SYSTEM, [TOOL])))
    return messages


@dataclass(slots=True)
class ChatLoop:
    """A conversation of model turns, tool responses and user messages."""

    model: ChatModel
    tools: ToolRunner
    agent: AgentConfig
    sampling: SamplingConfig
    messages: list[Message]
    max_tokens: int
    max_turns: int
    observer: Observer | None = None
    on_text: OnText | None = None
    turns: list[Turn] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    async def run(self, problem: Problem, *, id: str, group_id: str, seed: int) -> Trajectory:
        """Run turns until one ends the rollout; `messages` then has the whole conversation."""
        self.turns, self.text = [], []
        calls = CallRunner(self.tools, self.agent, result_reporter(self.observer, tool_text))
        started_at, clock = time.time(), time.perf_counter()
        tags, answer, failure = 0, None, None
        stop: StopReason | None = None
        for index in range(self.max_turns):
            try:
                reply = await self._complete(derive_seed(seed, index))
            except (InfrastructureError, OSError) as error:
                stop, failure = StopReason.ENGINE_FAILED, failure_of(error)
                break
            turn_id = f"{id}/{index}"
            parsed = parse_turn(reply.text, turn_id=turn_id, max_calls=self.agent.calls_per_turn)
            tags += parsed.answer_tags
            answer = answer_of(reply.text) if parsed.answered else answer
            last_turn = index + 1 >= self.max_turns
            stop = stop_before_tools(reply.finish, parsed, last_turn=last_turn)
            results: list[ToolResult] = []
            if stop is None:
                stop = await calls.run(index, parsed.calls, results)
                failure = calls.failure
            self._append(reply, parsed.calls, results, respond=stop is None)
            if stop is not None:
                break
        return Trajectory(
            id=id,
            problem_id=problem.id,
            group_id=group_id,
            seed=seed,
            prompt_ids=(),
            turns=tuple(self.turns),
            stop=stop or StopReason.MAX_TURNS,
            answer_tags=tags,
            answer=answer,
            text="".join(self.text),
            failure=failure,
            started_at=started_at,
            wall_s=time.perf_counter() - clock,
        )

    async def _complete(self, seed: int) -> ChatReply:
        reply = await self.model.complete(
            self.messages,
            max_tokens=self.max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=seed,
            deadline_s=self.agent.generate_deadline_s,
            on_text=self.on_text,
        )
        if self.observer is not None:
            self.observer(TurnSampled(len(self.turns), reply.text))
        return reply

    def _append(
        self,
        reply: ChatReply,
        calls: tuple[ToolCall, ...],
        results: list[ToolResult],
        *,
        respond: bool,
    ) -> None:
        self.turns.append(
            Turn((), (), (), calls=calls, results=tuple(results), finish=reply.finish)
        )
        self.text.append(reply.text)
        self.messages.append(Message("assistant", reply.text))
        if respond:
            limit = self.agent.response_tokens * CHARS_PER_TOKEN // max(1, len(results))
            blocks = [_cut(tool_text(result), limit) for result in results]
            response = "\n".join(f"<tool_response>\n{b}\n</tool_response>" for b in blocks)
            self.text.append(f"\n{response}\n")
            self.messages.append(Message("user", response))


def _cut(text: str, limit: int) -> str:
    """Remove the middle of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[...]\n{text[len(text) - half :]}"

"""One rollout against an endpoint that speaks text only: for chat and evaluation, not training.

The same parser, tool calls, limits and reasons to stop as in `loop`, over messages instead of
token ids. The trajectory it returns has turns, calls, results, text and answer, but no tokens:
lengths are the server's business, and nothing of it can be trained on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rstar2.agent.calls import CallRunner, ToolRunner, failure_of
from rstar2.agent.loop import Observer, Sampled, reporter
from rstar2.agent.outputs import tool_text
from rstar2.agent.parser import answer_of, parse_turn
from rstar2.agent.prompts import INSTRUCTION, SYSTEM, TOOL, system_text
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.engine.openai import OnText, Reply
from rstar2.errors import InfrastructureError
from rstar2.seeds import derive_seed
from rstar2.types import (
    Finish,
    Message,
    Problem,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

CHARS_PER_TOKEN = 4
"""How long a tool response may be, in characters per allowed token."""


class ChatModel(Protocol):
    """The one method of an endpoint that a dialogue needs."""

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
    ) -> Reply: ...


def opening(problem: Problem, config: TemplateConfig) -> list[Message]:
    """The messages before the first turn; the tool is described in the system text."""
    user = problem.prompt.strip()
    if config.instruction == "paper":
        user = INSTRUCTION.format(problem=user)
    messages = [Message("user", user)]
    if config.system == "paper":
        messages.insert(0, Message("system", system_text(SYSTEM, [TOOL])))
    return messages


@dataclass(slots=True)
class Dialogue:
    """A conversation that grows by the model's turns, tool responses and the user's messages."""

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
        """Take turns until one ends the rollout; `messages` then holds the whole conversation."""
        self.turns, self.text = [], []
        calls = CallRunner(self.tools, self.agent, reporter(self.observer, tool_text))
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
            stop = self._stop_before_tools(index, reply, bool(parsed.calls), parsed.answered)
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

    async def _complete(self, seed: int) -> Reply:
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
            self.observer(Sampled(len(self.turns), reply.text))
        return reply

    def _stop_before_tools(
        self, index: int, reply: Reply, called: bool, answered: bool
    ) -> StopReason | None:
        if reply.finish is Finish.LENGTH:
            return StopReason.MAX_LENGTH
        if not called:
            return StopReason.ANSWERED if answered else StopReason.NO_ANSWER
        return StopReason.MAX_TURNS if index + 1 >= self.max_turns else None

    def _append(
        self,
        reply: Reply,
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
    """Cut the middle out of a text of more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[...]\n{text[len(text) - half :]}"

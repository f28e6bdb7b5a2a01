"""The agent loop for endpoints that return text only: for chat and evaluation, not for training.

Parser, episodes, limits and stop reasons are those of `loop`, with messages instead of token ids.
The trajectory has turns, calls, results, text and answer, but no tokens: the server enforces the
length limit, and the trajectory cannot be used for training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rstar2.agent.episodes import (
    CallRunner,
    EpisodeError,
    Observer,
    Replied,
    TurnSampled,
    ask_reply,
    failure_of,
    reply_text,
    result_reporter,
    stop_before_calls,
)
from rstar2.agent.parser import CallParser
from rstar2.agent.prompts import shown_to_model, system_text
from rstar2.config import AgentConfig, SamplingConfig, TemplateConfig
from rstar2.engine.openai import ChatReply, OnText
from rstar2.environments.base import EpisodeProtocol
from rstar2.errors import InfrastructureError
from rstar2.seeds import derive_seed
from rstar2.tool_text import tool_text
from rstar2.types import Failure, Message, Problem, StopReason, ToolResult, Trajectory, Turn

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


def opening_messages(episode: EpisodeProtocol, config: TemplateConfig) -> list[Message]:
    """The messages before the first turn; the system message describes the tools."""
    messages, signatures = shown_to_model(episode.messages, episode.tools, config)
    if not signatures:
        return messages
    system = messages.pop(0).content if messages[0].role == "system" else ""
    return [Message("system", system_text(system, signatures)), *messages]


@dataclass(slots=True)
class ChatLoop:
    """A conversation of model turns, tool responses, replies and user messages."""

    model: ChatModel
    agent: AgentConfig
    sampling: SamplingConfig
    messages: list[Message]
    max_tokens: int
    max_turns: int
    observer: Observer | None = None
    on_text: OnText | None = None
    turns: list[Turn] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    failure: Failure | None = None

    async def run(
        self, episode: EpisodeProtocol, problem: Problem, *, id: str, group_id: str, seed: int
    ) -> Trajectory:
        """Run turns until one ends the rollout; `messages` then has the whole conversation.

        The caller opens and closes the episode, and asks it for answer and reward.
        """
        self.turns, self.text, self.failure = [], [], None
        calls = CallRunner(episode, self.agent, result_reporter(self.observer, tool_text))
        parser = CallParser(tuple(episode.tools), self.agent.calls_per_turn, episode.answer_tags)
        started_at, clock = time.time(), time.perf_counter()
        stop: StopReason | None = None
        for index in range(self.max_turns):
            try:
                reply = await self._complete(derive_seed(seed, index))
            except (InfrastructureError, OSError) as error:
                stop, self.failure = StopReason.ENGINE_FAILED, failure_of(error)
                break
            turn = Turn(
                (), (), (), calls=parser.parse(reply.text, f"{id}/{index}"), text=reply.text
            )
            turn = replace(turn, finish=reply.finish)
            last_turn = index + 1 >= self.max_turns
            stop = stop_before_calls(reply.finish, turn.calls, last_turn=last_turn)
            if stop is None:
                turn, stop = await self._continue(calls, episode, turn, last_turn=last_turn)
            self._append(turn, respond=stop is None)
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
            text="".join(self.text),
            failure=self.failure,
            started_at=started_at,
            wall_s=time.perf_counter() - clock,
        )

    async def _continue(
        self, calls: CallRunner, episode: EpisodeProtocol, turn: Turn, *, last_turn: bool
    ) -> tuple[Turn, StopReason | None]:
        """Run the calls of a turn, or ask for a reply; the turn with what follows it."""
        index = len(self.turns)
        if turn.calls:
            results: list[ToolResult] = []
            stop = await calls.run(index, turn.calls, results)
            self.failure = calls.failure
            return replace(turn, results=tuple(results)), stop
        try:
            reply = await ask_reply(episode, (*self.turns, turn), self.agent)
        except EpisodeError as error:
            self.failure = error.failure
            return turn, StopReason.ENVIRONMENT_FAILED
        if reply is None:
            return turn, StopReason.ANSWERED
        if last_turn:
            return turn, StopReason.MAX_TURNS
        if self.observer is not None:
            self.observer(Replied(index, reply_text(reply)))
        return replace(turn, reply=reply), None

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

    def _append(self, turn: Turn, *, respond: bool) -> None:
        self.turns.append(turn)
        self.text.append(turn.text)
        self.messages.append(Message("assistant", turn.text))
        if not respond:
            return
        limit = self.agent.response_tokens * CHARS_PER_TOKEN
        if turn.reply:
            response = _cut(reply_text(turn.reply), limit)
        else:
            share = limit // max(1, len(turn.results))
            blocks = [_cut(tool_text(result), share) for result in turn.results]
            response = "\n".join(f"<tool_response>\n{b}\n</tool_response>" for b in blocks)
        self.text.append(f"\n{response}\n")
        self.messages.append(Message("user", response))


def _cut(text: str, limit: int) -> str:
    """Remove the middle of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[...]\n{text[len(text) - half :]}"

"""The agent loop for one trajectory: generate, parse, run tool calls, append; then the next turn.

What ends a rollout, in the order of the checks after each turn:

| event                                                      | StopReason                     |
|------------------------------------------------------------|--------------------------------|
| the environment could not open an episode                  | ENVIRONMENT_FAILED             |
| the engine died, refused, or returned an invalid result    | ENGINE_FAILED                  |
| the engine cancelled the request                           | CANCELLED                      |
| the turn reached the length limit                          | MAX_LENGTH                     |
| a tool call in the last allowed turn (it is not executed)  | MAX_TURNS                      |
| a call could not be executed                               | TOOL_FAILED                    |
| too many calls in a row that cannot be executed            | INVALID_CALLS                  |
| no tool call, and the environment has no reply             | ANSWERED or NO_ANSWER          |
| no tool call, and the environment failed to reply          | ENVIRONMENT_FAILED             |
| a reply after the last allowed turn (it is not appended)   | MAX_TURNS                      |
| the response or reply leaves no room for another token     | MAX_LENGTH (it is not appended)|

Invariants: the ids of a turn's prompt start with all ids before it (checked every turn); every
sampled token has its logprob and weight version (checked every turn); the model never reads an
infrastructure failure; the generator's session is released exactly once and then the episode is
closed exactly once, also on cancellation, which then propagates. Infrastructure failures are
returned as data, never raised.

`episodes` has what both loops do with an episode. `chat_loop` is the same loop for endpoints that
return text without token ids.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rstar2.agent.episodes import (
    CallRunner,
    EpisodeError,
    Observer,
    Replied,
    TurnSampled,
    ask_reply,
    conclude,
    failure_of,
    open_episode,
    reply_text,
    result_reporter,
    stop_before_calls,
)
from rstar2.agent.parser import CallParser
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.engine.base import Generator
from rstar2.environments.base import EnvironmentProtocol, EpisodeProtocol, SandboxClient
from rstar2.errors import EngineError, InfrastructureError, InvariantError
from rstar2.seeds import derive_seed
from rstar2.tasks import to_the_end
from rstar2.token_arrays import TokenArray, id_array
from rstar2.types import (
    Failure,
    Finish,
    Generation,
    Message,
    Problem,
    Sampling,
    StopReason,
    ToolResult,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)

RELEASE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How one rollout is sampled, and how long it may become."""

    sampling: SamplingConfig
    max_length: int
    """Tokens of the whole trajectory: prompt, sampled tokens and tool responses."""
    max_turns: int


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """Runs rollouts of one environment with one policy; any number at the same time."""

    environment: EnvironmentProtocol
    generator: Generator
    sandbox: SandboxClient | None
    """The code environment; None if the environment does not need it."""
    template: Template
    config: AgentConfig

    async def run(
        self,
        problem: Problem,
        *,
        id: str,
        group_id: str,
        seed: int,
        spec: RolloutSpec,
        observer: Observer | None = None,
        prompt_ids: Sequence[int] | None = None,
        graded: bool = True,
    ) -> Trajectory:
        """Run one rollout. `prompt_ids` replaces the episode's own prompt (follow-ups in a chat).

        Without `graded` the environment is not asked for a reward.
        """
        blank = Trajectory(
            id=id,
            problem_id=problem.id,
            group_id=group_id,
            seed=seed,
            prompt_ids=(),
            turns=(),
            stop=StopReason.ENVIRONMENT_FAILED,
            started_at=time.time(),
        )
        clock = time.perf_counter()
        opening = open_episode(
            self.environment,
            problem,
            seed=seed,
            sandbox=self.sandbox,
            deadline_s=self.config.tool_deadline_s,
        )
        try:
            async with opening as episode:
                if prompt_ids is None:
                    prompt_ids = self.template.prompt_ids(episode.messages, episode.tools)
                start = id_array(prompt_ids)
                rollout = _TokenLoop(id, seed, start, self, episode, spec, observer)
                try:
                    stop = await rollout.run()
                finally:
                    await release_session(self.generator, id)
                trajectory = replace(
                    blank,
                    prompt_ids=start,
                    turns=tuple(rollout.turns),
                    stop=stop,
                    text="".join(rollout.text),
                    failure=rollout.failure,
                    wall_s=time.perf_counter() - clock,
                )
                return await conclude(
                    self.environment, episode, trajectory, self.config, graded=graded
                )
        except EpisodeError as error:
            return replace(blank, failure=error.failure, wall_s=time.perf_counter() - clock)


@dataclass(slots=True)
class _AfterTurn:
    """What follows a turn."""

    stop: StopReason | None
    """Why the rollout ends with the turn; None if it does not."""
    results: tuple[ToolResult, ...] = ()
    reply: tuple[Message, ...] = ()
    response_ids: tuple[int, ...] = ()


class _TokenLoop:
    """One trajectory while it grows."""

    def __init__(
        self,
        id: str,
        seed: int,
        ids: TokenArray[int],
        loop: AgentLoop,
        episode: EpisodeProtocol,
        spec: RolloutSpec,
        observer: Observer | None,
    ) -> None:
        self.id, self.seed, self.ids = id, seed, ids
        self.generator, self.template, self.agent = loop.generator, loop.template, loop.config
        self.episode, self.spec, self.observer = episode, spec, observer
        self.parser = CallParser(
            tuple(episode.tools), self.agent.calls_per_turn, episode.answer_tags
        )
        reporter = result_reporter(observer, self.template.tool_text)
        self.calls = CallRunner(episode, self.agent, reporter)
        self.turns: list[Turn] = []
        self.text: list[str] = []
        self.failure: Failure | None = None
        self.clock = time.perf_counter()

    async def run(self) -> StopReason:
        """Take turns until one of them ends the rollout."""
        if len(self.ids) >= self.spec.max_length:
            return StopReason.MAX_LENGTH
        for index in range(self.spec.max_turns):
            stop = await self._turn(index)
            if stop is not None:
                return stop
        raise InvariantError("the last allowed turn did not end the rollout")

    async def _turn(self, index: int) -> StopReason | None:
        started = time.perf_counter()
        try:
            generation = await self._generate(index)
        except (InfrastructureError, OSError) as error:
            self.failure = failure_of(error)
            return StopReason.ENGINE_FAILED
        generated = time.perf_counter()
        text = self.template.turn_text(generation.token_ids)
        self.text.append(text)
        if self.observer is not None:
            self.observer(TurnSampled(index, text))
        turn = Turn(
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            calls=self.parser.parse(text, f"{self.id}/{index}"),
            text=text,
            entropies=generation.entropies,
            finish=generation.finish,
            engine=generation.engine,
            started_s=started - self.clock,
            queue_s=generation.queue_s,
            preempted_s=generation.preempted_s,
            generate_s=generated - started,
            cached_tokens=generation.cached_tokens,
        )
        after = await self._continue(index, turn)
        turn = replace(
            turn,
            results=after.results,
            reply=after.reply,
            response_ids=after.response_ids,
            tools_s=time.perf_counter() - generated,
        )
        self.turns.append(turn)
        self._extend(id_array(turn.sampled_ids), id_array(turn.response_ids))
        return after.stop

    async def _continue(self, index: int, turn: Turn) -> _AfterTurn:
        """Run the calls of a turn, or ask for a reply."""
        last_turn = index + 1 >= self.spec.max_turns
        if turn.finish is Finish.CANCELLED:
            self.failure = Failure("cancelled", "the engine cancelled the request")
            return _AfterTurn(StopReason.CANCELLED)
        stop = stop_before_calls(turn.finish, turn.calls, last_turn=last_turn)
        if stop is not None:
            return _AfterTurn(stop)
        if turn.calls:
            results: list[ToolResult] = []
            stop = await self.calls.run(index, turn.calls, results)
            self.failure = self.calls.failure
            after = _AfterTurn(stop, results=tuple(results))
            return after if stop is not None else self._respond(turn, after)
        return await self._reply(index, turn, last_turn=last_turn)

    async def _reply(self, index: int, turn: Turn, *, last_turn: bool) -> _AfterTurn:
        try:
            reply = await ask_reply(self.episode, (*self.turns, turn), self.agent)
        except EpisodeError as error:
            self.failure = error.failure
            return _AfterTurn(StopReason.ENVIRONMENT_FAILED)
        if reply is None:
            return _AfterTurn(StopReason.ANSWERED)
        if last_turn:
            return _AfterTurn(StopReason.MAX_TURNS)
        if self.observer is not None:
            self.observer(Replied(index, reply_text(reply)))
        return self._respond(turn, _AfterTurn(None, reply=reply))

    async def _generate(self, index: int) -> Generation:
        return await sample_turn(
            self.generator,
            self.ids,
            self.spec.sampling,
            self.template,
            max_new_tokens=self.spec.max_length - len(self.ids),
            seed=derive_seed(self.seed, index),
            session=self.id,
            deadline_s=self.agent.generate_deadline_s,
        )

    def _respond(self, turn: Turn, after: _AfterTurn) -> _AfterTurn:
        """Append the tool responses or the reply, if there is room for another token after it."""
        limit = self.agent.response_tokens
        closed = turn.sampled_ids[-1] in self.template.stop_ids
        if after.reply:
            text = reply_text(after.reply)
            response = self.template.follow_up(text, limit=limit, closed=closed)
        else:
            response = self.template.response(after.results, turn.calls, limit=limit, closed=closed)
        total = len(self.ids) + len(turn.sampled_ids) + len(response.ids)
        if total >= self.spec.max_length:
            after.stop = StopReason.MAX_LENGTH
            return after
        self.text.append(response.text)
        after.response_ids = response.ids
        return after

    def _extend(self, sampled: TokenArray[int], response: TokenArray[int]) -> None:
        """Append to the ids, never rewrite them: the next prompt has this one as its prefix."""
        before, self.ids = self.ids, self.ids + sampled + response
        if self.ids[: len(before)] != before or len(self.ids) > self.spec.max_length:
            raise InvariantError(f"{self.id}: a turn's prompt must extend the one before it")


async def sample_turn(
    generator: Generator,
    ids: Sequence[int],
    how: SamplingConfig,
    template: Template,
    *,
    max_new_tokens: int,
    seed: int,
    session: str,
    deadline_s: float,
) -> Generation:
    """Sample one turn after `ids`, and check that it has what training needs."""
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        stop_ids=template.stop_ids,
        seed=seed,
    )
    generation = await generator.generate(ids, sampling, session=session, deadline_s=deadline_s)
    check_generation(generation, sampling)
    return generation


def check_generation(generation: Generation, sampling: Sampling) -> None:
    """Refuse a generation that lacks what training needs (Invariant 2)."""
    count = len(generation.token_ids)
    if generation.finish is not Finish.CANCELLED and count == 0:
        raise EngineError("the engine sampled nothing")
    if count > sampling.max_new_tokens:
        raise EngineError(f"the engine sampled {count} tokens, limit {sampling.max_new_tokens}")
    if len(generation.logprobs) != count or sum(n for _, n in generation.versions) != count:
        raise EngineError("the engine must give one logprob and one weight version per token")
    if not math.isfinite(sum(generation.logprobs)):  # one that is not finite makes the sum so
        raise EngineError("the engine gave a logprob that is not finite")
    if generation.entropies is not None and len(generation.entropies) != count:
        raise EngineError("the engine must give one entropy per token or none")


async def release_session(generator: Generator, session: str) -> None:
    """Release the session on the engine, even if this task is cancelled during the release."""
    await to_the_end(_release(generator, session))


async def _release(generator: Generator, session: str) -> None:
    try:
        async with asyncio.timeout(RELEASE_DEADLINE_S):
            await generator.release(session)
    except (InfrastructureError, OSError, TimeoutError) as error:  # the rollout has ended
        log.warning("session %s could not be released: %r", session, error)

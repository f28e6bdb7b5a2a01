"""The agent loop for one trajectory: generate, parse, run tool calls, append; then the next turn.

What ends a rollout, in the order of the checks after each turn:

| event                                                      | StopReason                     |
|------------------------------------------------------------|--------------------------------|
| the engine died, refused, or returned an invalid result    | ENGINE_FAILED                  |
| the engine cancelled the request                           | CANCELLED                      |
| the turn reached the length limit                          | MAX_LENGTH                     |
| no tool call in the turn                                   | ANSWERED or NO_ANSWER          |
| a tool call in the last allowed turn (it is not executed)  | MAX_TURNS                      |
| no server could execute a call                             | TOOL_FAILED                    |
| too many calls in a row that cannot be executed            | INVALID_CALLS                  |
| the tool response leaves no room for another token         | MAX_LENGTH (it is not appended)|

Invariants: the ids of a turn's prompt start with all ids before it (checked every turn); every
sampled token has its logprob and weight version (checked every turn); the model never reads an
infrastructure failure; the generator's session is released exactly once, also on cancellation,
which then propagates. Infrastructure failures are returned as data, never raised.

`chat_loop` is the same loop for endpoints that return text without token ids.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rstar2.agent.parser import ParsedTurn, answer_of, parse_turn
from rstar2.agent.template import Template
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.engine.base import Generator
from rstar2.errors import (
    CodeEnvError,
    DeadlineError,
    EngineError,
    InfrastructureError,
    InvariantError,
)
from rstar2.seeds import derive_seed
from rstar2.types import (
    Failure,
    Finish,
    Generation,
    Outcome,
    Problem,
    Sampling,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)

RELEASE_DEADLINE_S = 10.0
GRACE_S = 5.0
"""The loop waits this much longer than the engine's or the client's own deadline."""


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """The model finished a turn."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """A tool call returned; `text` is what the model reads."""

    turn: int
    call: ToolCall
    result: ToolResult
    text: str


LoopEvent = TurnSampled | ToolReturned
Observer = Callable[[LoopEvent], None]


def result_reporter(
    observer: Observer | None, text_of: Callable[[ToolResult], str]
) -> Callable[[int, ToolCall, ToolResult], None] | None:
    """A callback that sends tool results to the observer, with the text that the model reads."""
    if observer is None:
        return None
    return lambda turn, call, result: observer(ToolReturned(turn, call, result, text_of(result)))


# --------------------------------------------------------------------------- tool calls


class ToolRunner(Protocol):
    """The method of the code environment's client that the loop needs."""

    async def run(self, request: RunRequest) -> ToolResult: ...


@dataclass(slots=True)
class CallRunner:
    """Runs the tool calls of one rollout in order and counts invalid calls in a row.

    A call that could not be parsed returns its error; a program's own failure is data for the
    model; an infrastructure failure ends the rollout and is never shown to the model.
    """

    tools: ToolRunner
    agent: AgentConfig
    on_result: Callable[[int, ToolCall, ToolResult], None] | None = None
    invalid: int = 0
    failure: Failure | None = None

    async def run(
        self, turn: int, calls: Sequence[ToolCall], results: list[ToolResult]
    ) -> StopReason | None:
        """Append to `results` in order; returns why the rollout must stop, or None."""
        for call in calls:
            if call.error is not None:
                self.invalid += 1
                result = ToolResult(call.id, call.error, message=call.message)
            else:
                self.invalid = 0
                try:
                    result = await self._execute(call)
                except (InfrastructureError, OSError) as error:
                    self.failure = failure_of(error)
                    return StopReason.TOOL_FAILED
            results.append(result)
            if result.outcome is Outcome.INFRASTRUCTURE:
                message = result.message or "a tool call could not be executed"
                self.failure = failure_of(CodeEnvError(message))
                return StopReason.TOOL_FAILED
            if self.on_result is not None:
                self.on_result(turn, call, result)
            if self.invalid >= self.agent.invalid_calls:
                return StopReason.INVALID_CALLS
        return None

    async def _execute(self, call: ToolCall) -> ToolResult:
        deadline = self.agent.tool_deadline_s
        code, stdin = call.arguments["code"], call.arguments.get("input", "")
        request = RunRequest(call.id, code, stdin=stdin, deadline_s=deadline)
        try:
            async with asyncio.timeout(deadline + GRACE_S):
                result = await self.tools.run(request)
        except TimeoutError as error:
            raise DeadlineError(f"no tool result within {deadline + GRACE_S:g} s") from error
        if result.call_id != call.id:
            raise CodeEnvError(f"requested call {call.id}, got the result of {result.call_id}")
        return result


def failure_of(error: InfrastructureError | OSError) -> Failure:
    """The error as a Failure with the error's name."""
    name = error.name if isinstance(error, InfrastructureError) else "connection"
    return Failure(name, str(error) or type(error).__name__)


def stop_before_tools(finish: Finish, parsed: ParsedTurn, *, last_turn: bool) -> StopReason | None:
    """Why the rollout ends with this turn, before its tool calls run; None if they run."""
    if finish is Finish.LENGTH:
        return StopReason.MAX_LENGTH
    if not parsed.calls:
        return StopReason.ANSWERED if parsed.answered else StopReason.NO_ANSWER
    return StopReason.MAX_TURNS if last_turn else None


# --------------------------------------------------------------------------- the token loop


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How one rollout is sampled, and how long it may become."""

    sampling: SamplingConfig
    max_length: int
    """Tokens of the whole trajectory: prompt, sampled tokens and tool responses."""
    max_turns: int


async def run_trajectory(
    problem: Problem,
    *,
    id: str,
    group_id: str,
    seed: int,
    generator: Generator,
    tools: ToolRunner,
    template: Template,
    agent: AgentConfig,
    spec: RolloutSpec,
    observer: Observer | None = None,
    prompt_ids: Sequence[int] | None = None,
) -> Trajectory:
    """Run one rollout. `prompt_ids` replaces the problem's own prompt (follow-ups in a chat)."""
    start = tuple(template.prompt_ids(problem) if prompt_ids is None else prompt_ids)
    calls = CallRunner(tools, agent, result_reporter(observer, template.tool_text))
    rollout = _TokenLoop(id, seed, start, generator, calls, template, agent, spec, observer)
    started_at, clock = time.time(), time.perf_counter()
    try:
        stop = await rollout.run()
    finally:
        await release_session(generator, id)
    return Trajectory(
        id=id,
        problem_id=problem.id,
        group_id=group_id,
        seed=seed,
        prompt_ids=start,
        turns=tuple(rollout.turns),
        stop=stop,
        answer_tags=rollout.answer_tags,
        answer=rollout.answer,
        text="".join(rollout.text),
        failure=rollout.failure,
        started_at=started_at,
        wall_s=time.perf_counter() - clock,
    )


@dataclass(slots=True)
class _TokenLoop:
    """One trajectory while it grows."""

    id: str
    seed: int
    ids: tuple[int, ...]
    generator: Generator
    calls: CallRunner
    template: Template
    agent: AgentConfig
    spec: RolloutSpec
    observer: Observer | None
    turns: list[Turn] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    answer: str | None = None
    answer_tags: int = 0
    failure: Failure | None = None
    clock: float = field(default_factory=time.perf_counter)

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
        parsed = parse_turn(text, turn_id=f"{self.id}/{index}", max_calls=self.agent.calls_per_turn)
        self._record_text(index, text, parsed)
        stop = self._stop_before_tools(index, generation, parsed)
        results: list[ToolResult] = []
        response: tuple[int, ...] = ()
        if stop is None:
            stop = await self.calls.run(index, parsed.calls, results)
            self.failure = self.calls.failure
        if stop is None:
            stop, response = self._respond(generation, parsed.calls, results)
        self.turns.append(
            Turn(
                sampled_ids=generation.token_ids,
                logprobs=generation.logprobs,
                versions=generation.versions,
                calls=parsed.calls,
                results=tuple(results),
                response_ids=response,
                entropies=generation.entropies,
                finish=generation.finish,
                engine=generation.engine,
                started_s=started - self.clock,
                queue_s=generation.queue_s,
                preempted_s=generation.preempted_s,
                generate_s=generated - started,
                tools_s=time.perf_counter() - generated,
                cached_tokens=generation.cached_tokens,
            )
        )
        self._extend(generation.token_ids, response)
        return stop

    async def _generate(self, index: int) -> Generation:
        sampling = Sampling(
            max_new_tokens=self.spec.max_length - len(self.ids),
            temperature=self.spec.sampling.temperature,
            top_p=self.spec.sampling.top_p,
            top_k=self.spec.sampling.top_k,
            stop_ids=self.template.stop_ids,
            seed=derive_seed(self.seed, index),
        )
        deadline = self.agent.generate_deadline_s
        try:
            async with asyncio.timeout(deadline + GRACE_S):
                generation = await self.generator.generate(
                    self.ids, sampling, session=self.id, deadline_s=deadline
                )
        except TimeoutError as error:
            raise DeadlineError(f"no turn within {deadline + GRACE_S:g} s") from error
        check_generation(generation, sampling)
        return generation

    def _record_text(self, index: int, text: str, parsed: ParsedTurn) -> None:
        """Keep the text, the answer and the count of answer tags; notify the observer."""
        self.text.append(text)
        self.answer_tags += parsed.answer_tags
        if parsed.answered:
            self.answer = answer_of(text)
        if self.observer is not None:
            self.observer(TurnSampled(index, text))

    def _stop_before_tools(
        self, index: int, generation: Generation, parsed: ParsedTurn
    ) -> StopReason | None:
        if generation.finish is Finish.CANCELLED:
            self.failure = Failure("cancelled", "the engine cancelled the request")
            return StopReason.CANCELLED
        last_turn = index + 1 >= self.spec.max_turns
        return stop_before_tools(generation.finish, parsed, last_turn=last_turn)

    def _respond(
        self, generation: Generation, calls: Sequence[ToolCall], results: Sequence[ToolResult]
    ) -> tuple[StopReason | None, tuple[int, ...]]:
        response = self.template.response(
            results,
            calls,
            limit=self.agent.response_tokens,
            closed=generation.token_ids[-1] in self.template.stop_ids,
        )
        total = len(self.ids) + len(generation.token_ids) + len(response.ids)
        if total >= self.spec.max_length:
            return StopReason.MAX_LENGTH, ()
        self.text.append(response.text)
        return None, response.ids

    def _extend(self, sampled: tuple[int, ...], response: tuple[int, ...]) -> None:
        """Append to the ids, never rewrite them: the next prompt has this one as its prefix."""
        before, self.ids = self.ids, self.ids + sampled + response
        if self.ids[: len(before)] != before or len(self.ids) > self.spec.max_length:
            raise InvariantError(f"{self.id}: a turn's prompt must extend the one before it")


def check_generation(generation: Generation, sampling: Sampling) -> None:
    """Refuse a generation that lacks what training needs (Invariant 2)."""
    count = len(generation.token_ids)
    if generation.finish is not Finish.CANCELLED and count == 0:
        raise EngineError("the engine sampled nothing")
    if count > sampling.max_new_tokens:
        raise EngineError(f"the engine sampled {count} tokens, limit {sampling.max_new_tokens}")
    if len(generation.logprobs) != count or sum(n for _, n in generation.versions) != count:
        raise EngineError("the engine must give one logprob and one weight version per token")
    if not all(math.isfinite(value) for value in generation.logprobs):
        raise EngineError("the engine gave a logprob that is not finite")
    if generation.entropies is not None and len(generation.entropies) != count:
        raise EngineError("the engine must give one entropy per token or none")


async def release_session(generator: Generator, session: str) -> None:
    """Release the session on the engine, even if this task is cancelled during the release."""
    task = asyncio.ensure_future(_release_with_deadline(generator, session))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def _release_with_deadline(generator: Generator, session: str) -> None:
    try:
        async with asyncio.timeout(RELEASE_DEADLINE_S):
            await generator.release(session)
    except (InfrastructureError, OSError, TimeoutError) as error:  # the rollout has ended
        log.warning("session %s could not be released: %r", session, error)

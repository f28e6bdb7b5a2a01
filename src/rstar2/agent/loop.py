"""One trajectory: generate, parse, call tools, append, until there is a reason to stop.

What ends a rollout, in the order it is looked for after each turn:

| what happened                                              | StopReason                     |
|------------------------------------------------------------|--------------------------------|
| the engine died, refused, or answered nonsense             | ENGINE_FAILED                  |
| the engine gave the request up                             | CANCELLED                      |
| the turn was cut by the length limit                       | MAX_LENGTH                     |
| no tool call in the turn                                   | ANSWERED or NO_ANSWER          |
| a tool call in the last allowed turn (it is not executed)  | MAX_TURNS                      |
| no server could execute a call                             | TOOL_FAILED                    |
| too many calls in a row that cannot be executed            | INVALID_CALLS                  |
| the tool response leaves no room for another token         | MAX_LENGTH (it is not appended)|

Invariants: the ids of a turn's prompt begin with all ids before it (checked every turn); every
sampled token has its logprob and weight version (checked every turn); the model never reads an
infrastructure failure; the generator's session is released exactly once, also on cancellation,
which then propagates. Infrastructure failures are returned as data, never raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rstar2.agent.calls import GRACE_S, CallRunner, ToolRunner, failure_of
from rstar2.agent.parser import ParsedTurn, answer_of, last_answer, parse_turn
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.engine.base import Generator
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, InvariantError
from rstar2.seeds import derive_seed
from rstar2.types import (
    Failure,
    Finish,
    Generation,
    Problem,
    Sampling,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

__all__ = [
    "Event",
    "Observer",
    "Returned",
    "RolloutSpec",
    "Sampled",
    "ToolRunner",
    "run_trajectory",
]

log = logging.getLogger(__name__)

RELEASE_DEADLINE_S = 10.0


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model finished a turn."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A tool call came back; `text` is what the model reads of it."""

    turn: int
    call: ToolCall
    result: ToolResult
    text: str


Event = Sampled | Returned
Observer = Callable[[Event], None]


def reporter(
    observer: Observer | None, shown: Callable[[ToolResult], str]
) -> Callable[[int, ToolCall, ToolResult], None] | None:
    """What tells an observer of a tool result, as the model will read it."""
    if observer is None:
        return None
    return lambda turn, call, result: observer(Returned(turn, call, result, shown(result)))


# --------------------------------------------------------------------------- the loop


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
    """Roll one problem out. `prompt_ids` replaces the problem's own prompt (chat follow-ups)."""
    start = tuple(template.prompt_ids(problem) if prompt_ids is None else prompt_ids)
    calls = CallRunner(tools, agent, reporter(observer, template.tool_text))
    rollout = _Rollout(id, seed, start, generator, calls, template, agent, spec, observer)
    started_at, clock = time.time(), time.perf_counter()
    try:
        stop = await rollout.run()
    finally:
        await _release(generator, id)
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
class _Rollout:
    """The growing state of one trajectory."""

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
        self._note(index, text, parsed)
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
        _check(generation, sampling)
        return generation

    def _note(self, index: int, text: str, parsed: ParsedTurn) -> None:
        """Keep what people and the reward will want to know of a turn's text."""
        self.text.append(text)
        self.answer_tags += parsed.answer_tags
        if last_answer(text) is not None:
            self.answer = answer_of(text)
        if self.observer is not None:
            self.observer(Sampled(index, text))

    def _stop_before_tools(
        self, index: int, generation: Generation, parsed: ParsedTurn
    ) -> StopReason | None:
        if generation.finish is Finish.CANCELLED:
            self.failure = Failure("cancelled", "the engine gave the request up")
            return StopReason.CANCELLED
        if generation.finish is Finish.LENGTH:
            return StopReason.MAX_LENGTH
        if not parsed.calls:
            return StopReason.ANSWERED if parsed.answered else StopReason.NO_ANSWER
        if index + 1 >= self.spec.max_turns:
            return StopReason.MAX_TURNS
        return None

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


def _check(generation: Generation, sampling: Sampling) -> None:
    """Refuse an answer that lacks what training needs (Invariant 2): the engine is at fault."""
    count = len(generation.token_ids)
    if generation.finish is not Finish.CANCELLED and count == 0:
        raise EngineError("the engine sampled nothing")
    if count > sampling.max_new_tokens:
        raise EngineError(f"the engine sampled {count} tokens, asked {sampling.max_new_tokens}")
    if len(generation.logprobs) != count or sum(n for _, n in generation.versions) != count:
        raise EngineError("the engine must give one logprob and one weight version per token")
    if not all(math.isfinite(value) for value in generation.logprobs):
        raise EngineError("the engine gave a logprob that is not finite")
    if generation.entropies is not None and len(generation.entropies) != count:
        raise EngineError("the engine must give one entropy per token or none")


async def _release(generator: Generator, session: str) -> None:
    """Let the engine free the session's cache, whatever happens to this task meanwhile."""
    task = asyncio.ensure_future(_release_in_time(generator, session))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def _release_in_time(generator: Generator, session: str) -> None:
    try:
        async with asyncio.timeout(RELEASE_DEADLINE_S):
            await generator.release(session)
    except (InfrastructureError, OSError, TimeoutError) as error:  # nothing is left to be freed
        log.warning("session %s could not be released: %r", session, error)

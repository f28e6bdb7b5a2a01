"""A scripted generator and a scripted tool runner, with failures where a test needs them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rstar2.agent.template import Template
from rstar2.codeenv.protocol import RunRequest, SessionInfo, VerifyRequest, VerifyResult
from rstar2.environments.python_math import PythonMath
from rstar2.environments.python_tool import python_spec
from rstar2.errors import DeadlineError
from rstar2.types import Finish, Generation, Outcome, Problem, Sampling, ToolResult, spans

TOOLS = (python_spec(),)


def prompt_of(template: Template, problem: Problem) -> tuple[int, ...]:
    """The prompt of a problem of python-math."""
    environment = PythonMath(template.config)
    return tuple(template.prompt_ids(environment.messages(problem), TOOLS))


@dataclass
class ScriptedGenerator:
    """Generates its lines in order, tokenised by `spell`; records its requests."""

    template: Template
    lines: Sequence[str]
    spell: Callable[[str], tuple[int, ...]] | None = None
    fail_at: int | None = None
    error: BaseException | None = None
    hang_at: int | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        turn = len(self.prompts)
        self.open.add(session)
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        if turn == self.hang_at:
            await asyncio.sleep(deadline_s)
            raise DeadlineError(f"no turn within {deadline_s:g} s")
        if turn == self.fail_at:
            assert self.error is not None
            raise self.error
        ids = (self.spell or self.template.encode_turn)(self.lines[turn])
        finish = Finish.STOP
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], Finish.LENGTH
        rng = random.Random(turn)
        return Generation(
            token_ids=ids,
            logprobs=tuple(-rng.random() for _ in ids),
            versions=spans(turn + (i > len(ids) // 2) for i in range(len(ids))),
            finish=finish,
            engine="scripted",
        )

    async def release(self, session: str) -> None:
        await asyncio.sleep(0)
        self.open.discard(session)
        self.released.append(session)


@dataclass
class ScriptedTools:
    """Answers every call with `reply`; fails or hangs at the configured call."""

    reply: Callable[[RunRequest], ToolResult] | None = None
    fail_at: int | None = None
    error: BaseException | None = None
    hang_at: int | None = None
    requests: list[RunRequest] = field(default_factory=list)

    async def run(self, request: RunRequest) -> ToolResult:
        index = len(self.requests)
        self.requests.append(request)
        await asyncio.sleep(0)
        if index == self.hang_at:
            await asyncio.Event().wait()
        if index == self.fail_at:
            assert self.error is not None
            raise self.error
        if self.reply is not None:
            return self.reply(request)
        return ToolResult(request.id, Outcome.OK, stdout=f"ran {request.code}\n")

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        raise AssertionError("nothing is graded here")

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        raise AssertionError("python-math has no sessions")

    async def close_session(self, session: str) -> None:
        raise AssertionError("python-math has no sessions")

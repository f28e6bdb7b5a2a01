"""Families of the real reasoning-gym: splits, demonstrations, and scores in the real jail."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest, SessionInfo, VerifyRequest, VerifyResult
from rstar2.config import CodeEnvConfig
from rstar2.environments.reasoning_gym import ReasoningGym, Scorer, create_dataset, split_of
from rstar2.errors import DataError, UserError
from rstar2.types import Failure, Outcome, Problem, Reward, ToolResult

FAMILIES = ["gcd", "lcm", "binary_matrix"]
DEADLINE_S = 300.0


def test_splits_are_disjoint_whatever_the_seed_and_problems_repeat() -> None:
    environment = ReasoningGym(FAMILIES)
    train = environment.problems("train", 60, 1)
    assert train == environment.problems("train", 60, 1)
    assert train != environment.problems("train", 60, 2)
    assert {p.kind for p in train} == set(FAMILIES)
    assert len({p.prompt for p in train}) == 60
    heldout = environment.problems("heldout", 30, 5)
    assert not {p.prompt for p in train} & {p.prompt for p in heldout}
    assert {split_of(p.kind, p.meta["question"]) for p in train} == {"train"}
    assert {split_of(p.kind, p.meta["question"]) for p in heldout} == {"heldout"}


def test_a_family_with_too_few_questions_says_how_many() -> None:
    small = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    environment = ReasoningGym(small)
    with pytest.raises(DataError, match="distinct questions in the split heldout"):
        environment.problems("heldout", 500, 0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["gdc"], "has no family 'gdc'; did you mean gcd"),
        ({"gcd": {"colour": 1}}, "environment.args.tasks.gcd"),
        ([], "give a list of families"),
        ("gcd", "give a list of families"),
    ],
)
def test_a_wrong_family_is_the_users_error(tasks: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReasoningGym(tasks)


def test_demonstrations_have_the_format_and_seldom_the_answer() -> None:
    environment = ReasoningGym({"gcd": {"max_value": 99}}, tools=["python"], right_share=0.25)
    shown = list(environment.demonstrations(200, 0))
    assert shown == list(environment.demonstrations(200, 0))
    right = 0
    answers = {p.prompt: p.answer for p in environment.problems("train", None, 0)}
    for conversation in shown:
        assert [m.role for m in conversation.messages] == [
            *("system", "user", "assistant", "tool", "assistant")
        ]
        _, question, call, output, answer = (m.content for m in conversation.messages)
        assert call.startswith("<tool_call>\n")
        assert answer == f"<answer>{output}</answer>"
        right += output == answers[question]
    assert 25 < right < 100
    plain = ReasoningGym(["lcm"], right_share=1.0)
    problem = plain.problems("train", 1, 0)[0]
    assert plain._demonstration(problem, random.Random(0)) == [f"<answer>{problem.answer}</answer>"]


# --------------------------------------------------------------------------- scores


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[CodeEnvClient]:
    client = await CodeEnvClient.start(CodeEnvConfig(warm_up="never"))
    yield client
    await client.close()


EVIL = "[[print('0123456789abcdef', 1.0), open('/tmp/x', 'w'), exec('json = None')]]"


def matrix() -> Problem:
    environment = ReasoningGym(["binary_matrix"])
    return environment.problems("train", 1, 0)[0]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_scored_by_the_family_in_the_jail(sandbox: CodeEnvClient) -> None:
    environment = ReasoningGym(FAMILIES)
    scorer = environment.scorer
    for problem in environment.problems("train", 6, 3):
        right = await scorer.score(sandbox, problem, problem.answer, DEADLINE_S)
        assert isinstance(right, Reward), right
        assert right.value == 1.0
        own = create_dataset(problem.kind, {}, problem.meta["seed"])
        entry = own[problem.meta["index"]]
        wrong = await scorer.score(sandbox, problem, "77777", DEADLINE_S)
        assert isinstance(wrong, Reward), wrong
        assert wrong.value == own.score_answer("77777", entry) < 1.0
    assert await scorer.score(sandbox, problem, None, DEADLINE_S) == Reward(
        0.0, None, "reasoning-gym"
    )
    await environment.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_code_changes_no_other_score(sandbox: CodeEnvClient) -> None:
    """The scorer of binary_matrix evaluates the answer as Python."""
    problem = matrix()
    scorer = Scorer({"binary_matrix": {}})
    before = await scorer.score(sandbox, problem, problem.answer, DEADLINE_S)
    assert isinstance(before, Reward), before
    evil = await scorer.score(sandbox, problem, EVIL, DEADLINE_S)
    assert not isinstance(evil, Reward) or evil.value < 1.0
    after = await scorer.score(sandbox, problem, problem.answer, DEADLINE_S)
    assert isinstance(after, Reward), after
    assert after.value == before.value == 1.0
    await scorer.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_lost_session_is_opened_again(sandbox: CodeEnvClient) -> None:
    problem = matrix()
    scorer = Scorer({"binary_matrix": {}})
    await scorer.score(sandbox, problem, problem.answer, DEADLINE_S)
    (session,) = scorer.sessions
    assert session.id is not None
    await sandbox.close_session(session.id)
    again = await scorer.score(sandbox, problem, problem.answer, DEADLINE_S)
    assert isinstance(again, Reward), again
    other = Problem("x", "q", "a", kind="binary_matrix", meta={**problem.meta, "question": "?"})
    strange = await scorer.score(sandbox, other, "a", DEADLINE_S)
    assert isinstance(strange, Failure)
    assert "does not generate the same question" in strange.message
    await scorer.close()


# --------------------------------------------------------------------------- the queue


@dataclass
class OneSlowAnswer:
    """A code environment in which the answer `slow` takes until `release` is set."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    async def open_session(
        self, session: str | None = None, ttl_s: float | None = None
    ) -> SessionInfo:
        self.opened.append(f"s{len(self.opened)}")
        return SessionInfo(self.opened[-1], 60.0)

    async def close_session(self, session: str) -> None:
        self.closed.append(session)

    async def run(self, request: RunRequest) -> ToolResult:
        given = json.loads(request.stdin or "{}")
        if given.get("answer") == "slow":
            self.started.set()
            await self.release.wait()
        return ToolResult(request.id, Outcome.OK, stdout=f"{given.get('nonce')} 1.0\n")

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        raise AssertionError("reasoning-gym has its own scorers")


PROBLEM = Problem("p", "q", "a", kind="gcd", meta={"seed": 1, "index": 2, "question": "q"})


@pytest.mark.asyncio
async def test_a_slow_answer_does_not_use_up_the_deadline_of_others() -> None:
    sandbox, scorer = OneSlowAnswer(), Scorer({"gcd": {}})
    slow = asyncio.ensure_future(scorer.score(sandbox, PROBLEM, "slow", DEADLINE_S))
    await sandbox.started.wait()
    quick = [await scorer.score(sandbox, PROBLEM, "quick", DEADLINE_S) for _ in range(3)]
    assert quick == [Reward(1.0, "quick", "reasoning-gym")] * 3
    assert not slow.done()
    sandbox.release.set()
    assert await slow == Reward(1.0, "slow", "reasoning-gym")
    await scorer.close()
    assert sandbox.closed == sandbox.opened == ["s0", "s1"]


@pytest.mark.asyncio
async def test_a_deadline_that_passes_in_the_queue_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2.environments.reasoning_gym.MAX_SESSIONS", 1)
    sandbox, scorer = OneSlowAnswer(), Scorer({"gcd": {}})
    slow = asyncio.ensure_future(scorer.score(sandbox, PROBLEM, "slow", DEADLINE_S))
    await sandbox.started.wait()
    late = await scorer.score(sandbox, PROBLEM, "quick", 0.01)
    assert late == Failure(
        "deadline", "p: no score within 0.01 s: 1 answers were before it in the queue"
    )
    sandbox.release.set()
    assert isinstance(await slow, Reward)

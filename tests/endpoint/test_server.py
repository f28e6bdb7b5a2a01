"""The endpoint over HTTP with OpenAI's own client, and programs as rollouts.

The generator here is scripted; `test_exact.py` uses a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.endpoint.program import Command, ProgramReward, check_program, run_program
from rstar2.endpoint.server import EndpointServer, RolloutEndpoint
from rstar2.errors import EngineError, InfrastructureError, UserError
from rstar2.types import Finish, Generation, Problem, Sampling, StopReason, Trajectory

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROBLEM = Problem("p", "What is 6 times 7?", "42")
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>'


@dataclass
class Script:
    """Gives these texts, one after another; an exception is raised, None waits for ever."""

    template: Template
    texts: list[str | Exception | None]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        self.asked.set()
        text = self.texts.pop(0)
        if text is None:
            await asyncio.Event().wait()
        if isinstance(text, Exception):
            raise text
        assert text is not None
        ids = (*self.template.encode(text), self.template.encode("<|im_end|>")[0])
        cut = ids[: sampling.max_new_tokens]
        finish = Finish.STOP if cut == ids else Finish.LENGTH
        return Generation(cut, (-0.1,) * len(cut), ((0, len(cut)),), finish)

    async def release(self, session: str) -> None:
        self.released.append(session)


MakeRollout = Callable[..., RolloutEndpoint]


@pytest.fixture
def make(template: Template) -> MakeRollout:
    def make_rollout(
        *texts: str | Exception | None, max_length: int = 400, max_turns: int = 8
    ) -> RolloutEndpoint:
        spec = RolloutSpec(SamplingConfig(temperature=0.7), max_length, max_turns)
        return RolloutEndpoint("g/0", 1, Script(template, list(texts)), template, spec, 60)

    return make_rollout


def client_of(rollout: RolloutEndpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=rollout.base_url, api_key="any", max_retries=2)


def script(rollout: RolloutEndpoint) -> Script:
    assert isinstance(rollout.generator, Script)
    return rollout.generator


# --------------------------------------------------------------------------- requests


async def test_the_official_client_chats_and_calls_tools(
    server: EndpointServer, make: MakeRollout, template: Template
) -> None:
    rollout = make(CALL, "It is 42.")
    async with server.rollout(rollout), client_of(rollout) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        first = await client.chat.completions.create(
            model="policy", messages=HI, tools=[TOOL], temperature=0.0, max_tokens=100
        )
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.content == "I add."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 6}')
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        second = await client.chat.completions.create(
            model="policy",
            messages=[*HI, message, result],  # type: ignore[list-item]
            tools=[TOOL],
        )
        assert second.choices[0].message.content == "It is 42."
        assert second.choices[0].finish_reason == "stop"
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(script(rollout).prompts[1])
    (segment,) = rollout.tokens.segments
    assert CALL in template.decode(segment.token_ids)
    assert "<tool_response>\n42\n</tool_response>" in template.decode(segment.token_ids)
    assert script(rollout).samplings[0].temperature == 0.7, "the recipe decides how to sample"
    assert script(rollout).released == ["g/0"]


async def test_a_stream_carries_the_same_reply(server: EndpointServer, make: MakeRollout) -> None:
    rollout = make(CALL)
    async with server.rollout(rollout), client_of(rollout) as client:
        stream = await client.chat.completions.create(
            model="policy",
            messages=HI,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    delta = chunks[0].choices[0].delta
    assert delta.content == "I add."
    assert delta.tool_calls is not None
    assert delta.tool_calls[0].index == 0
    assert delta.tool_calls[0].function is not None
    assert delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None


async def test_several_choices_are_several_segments(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make("one", "two")
    async with server.rollout(rollout), client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=HI, n=2)
    assert [choice.message.content for choice in reply.choices] == ["one", "two"]
    assert len(rollout.tokens.segments) == 2
    assert sorted(script(rollout).released) == ["g/0", "g/0#1"]


async def test_a_refusal_is_a_bad_request_that_leaves_no_trace(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make("fine")
    async with server.rollout(rollout), client_of(rollout) as client:
        with pytest.raises(openai.BadRequestError, match="logprobs: not supported"):
            await client.chat.completions.create(model="policy", messages=HI, logprobs=True)
        await client.chat.completions.create(model="policy", messages=HI)
    assert len(rollout.tokens.segments) == 1
    assert rollout.stop is None
    assert rollout.refused.startswith("logprobs")


async def test_limits_of_the_rollout_are_refusals_that_end_it(
    server: EndpointServer, make: MakeRollout
) -> None:
    long = make(max_length=9)
    async with server.rollout(long), client_of(long) as client:
        with pytest.raises(openai.BadRequestError, match="leaves no room for a reply") as refusal:
            await client.chat.completions.create(model="policy", messages=HI)
    assert refusal.value.code == "context_length_exceeded"
    assert long.stop is StopReason.MAX_LENGTH
    many = make("one", max_turns=1)
    async with server.rollout(many), client_of(many) as client:
        await client.chat.completions.create(model="policy", messages=HI)
        with pytest.raises(openai.BadRequestError, match="limit of 1 turns"):
            await client.chat.completions.create(model="policy", messages=HI)
    assert many.stop is StopReason.MAX_TURNS


async def test_a_reply_has_no_more_tokens_than_asked(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make("What is the product of 12 and 34?")
    async with server.rollout(rollout), client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=HI, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert len(rollout.tokens.segments[0].turns[0].sampled_ids) == 2


async def test_a_failed_engine_is_not_asked_again(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make(EngineError("no engine is left"))
    async with server.rollout(rollout), client_of(rollout) as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="no engine is left"):
                await client.chat.completions.create(model="policy", messages=HI)
    assert rollout.failure is not None
    assert rollout.failure.name == "engine"
    assert len(script(rollout).prompts) == 1, "the client must not retry"


async def test_a_url_ends_with_its_rollout_and_cannot_be_guessed(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make()
    async with server.rollout(rollout):
        base = rollout.base_url
        guess = base.rsplit("/", 2)[0] + "/guess/v1"
        async with httpx.AsyncClient(timeout=120) as http:
            assert (await http.get(f"{guess}/models")).status_code == 404
            assert (await http.get(f"{base}/models")).status_code == 200
    async with AsyncOpenAI(base_url=base, api_key="any") as client:
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await client.chat.completions.create(model="policy", messages=HI)


async def test_a_client_that_disconnects_leaves_no_trace(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make(None, "again")
    async with server.rollout(rollout), client_of(rollout) as client:
        lost = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=HI))
        await script(rollout).asked.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        reply = await client.chat.completions.create(model="policy", messages=HI)
    assert reply.choices[0].message.content == "again"
    assert len(rollout.tokens.segments) == 1
    assert rollout.failure is None


async def test_a_request_still_running_is_cancelled_with_its_rollout(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make(None)
    async with client_of(rollout):
        async with server.rollout(rollout):
            client = client_of(rollout)
            lost = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=HI)
            )
            await script(rollout).asked.wait()
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await lost
        await client.close()
    assert rollout.tokens.segments == ()


# --------------------------------------------------------------------------- environments


class KeepsUrls(ProgramEnvironment):
    reuses_urls = True


async def urls_of(
    environment: ProgramEnvironment, template: Template, *texts: str | Exception
) -> list[Trajectory]:
    """One rollout per text; the URL is what the program returned."""
    spec = RolloutSpec(SamplingConfig(), 400, 4)
    return [
        await environment.rollout(
            PROBLEM,
            id=f"g/{number}",
            group_id="g",
            seed=1,
            generator=Script(template, [text]),
            template=template,
            agent=AgentConfig(),
            spec=spec,
        )
        for number, text in enumerate(texts)
    ]


async def test_the_url_of_a_failed_rollout_is_never_used_again(template: Template) -> None:
    """A late request of an abandoned program must not reach the rollout that comes after it."""
    urls: list[str] = []

    async def program(base_url: str, api_key: str, problem: Problem) -> float:
        urls.append(base_url)
        await answer(base_url, api_key, problem)
        return 1.0

    environment = KeepsUrls(program, [PROBLEM])
    rollouts = await urls_of(environment, template, "a", "b", EngineError("gone"), "c", "d")
    await environment.close()
    assert [r.failure is None for r in rollouts] == [True, True, False, True, True]
    assert urls[0] == urls[1] == urls[2]
    assert urls[3] != urls[2]
    assert urls[4] == urls[3]


async def test_an_endpoint_that_cannot_start_loses_the_rollout_not_the_run(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> socket.socket:
        raise OSError("too many open files")

    environment = ProgramEnvironment(answer, [PROBLEM], reward=lambda episode: 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("rstar2.endpoint.server.socket.create_server", refuse)
        (lost,) = await urls_of(environment, template, "a")
    (again,) = await urls_of(environment, template, "a")
    await environment.close()
    assert lost.reward is None
    assert lost.stop is StopReason.ENVIRONMENT_FAILED
    assert lost.failure is not None
    assert (lost.failure.name, lost.failure.message) == ("connection", "too many open files")
    assert again.failure is None


# --------------------------------------------------------------------------- programs

Run = Callable[..., Awaitable[Trajectory]]


@pytest.fixture
def run(server: EndpointServer, template: Template) -> Run:
    async def run_one(
        program: Any,
        *texts: str | Exception | None,
        reward: ProgramReward | None = None,
        max_turns: int = 4,
        deadline_s: float = 120,
        reward_deadline_s: float = 120,
    ) -> Trajectory:
        return await run_program(
            program,
            PROBLEM,
            id="g/0",
            group_id="g",
            seed=1,
            server=server,
            generator=Script(template, list(texts)),
            template=template,
            spec=RolloutSpec(SamplingConfig(), 400, max_turns),
            generate_deadline_s=60,
            program_deadline_s=deadline_s,
            reward_deadline_s=reward_deadline_s,
            reward=reward,
        )

    return run_one


async def answer(base_url: str, api_key: str, problem: Problem) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = [{"role": "user", "content": problem.prompt}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return reply.choices[0].message.content or ""


async def test_a_program_is_a_rollout_with_a_reward(run: Run) -> None:
    graded = await run(
        answer, "42", reward=lambda episode: float(episode.result == episode.problem.answer)
    )
    assert graded.reward is not None
    assert (graded.reward.value, graded.reward.answer) == (1.0, "42")
    assert graded.stop is StopReason.ANSWERED
    assert graded.text == "42<|im_end|>"


async def test_a_command_line_is_a_program(run: Run, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, sys, urllib.request\n"
        "problem = json.loads(sys.stdin.readline())\n"
        "body = {'messages': [{'role': 'user', 'content': problem['prompt']}]}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "reply = json.load(urllib.request.urlopen(url, json.dumps(body).encode()))\n"
        "text = reply['choices'][0]['message']['content']\n"
        "print('thinking')\n"
        "print(float(text == problem['answer']))\n"
    )
    good = await run(Command((sys.executable, str(agent))), "42")
    assert good.failure is None
    assert good.reward is not None
    assert good.reward.value == 1.0
    agent.write_text("import sys\nsys.exit('no such thing')\n")
    bad = await run(Command((sys.executable, str(agent))), "42")
    assert bad.failure is not None
    assert bad.failure.name == "program"
    assert "ended with code 1" in bad.failure.message
    assert "no such thing" in bad.failure.message


async def raising(base_url: str, api_key: str, problem: Problem) -> float:
    await answer(base_url, api_key, problem)
    raise ValueError("a bug in the agent")


async def silent(base_url: str, api_key: str, problem: Problem) -> float:
    return 1.0


async def hanging(base_url: str, api_key: str, problem: Problem) -> float:
    await asyncio.Event().wait()
    return 1.0


async def timing_out(base_url: str, api_key: str, problem: Problem) -> float:
    raise TimeoutError("its own")


@pytest.mark.parametrize(
    ("program", "texts", "name", "message"),
    [
        (raising, ["x"], "program", "ValueError: a bug in the agent"),
        (silent, [], "program", "without a reply of the model"),
        (timing_out, [], "program", "TimeoutError: its own"),
        (answer, [EngineError("gone")], "engine", "gone"),
        (answer, ["x"], "reward", "returned 'x': expected a finite number"),
    ],
)
async def test_what_is_not_the_models_fault_is_a_named_failure(
    run: Run, program: Any, texts: list[Any], name: str, message: str
) -> None:
    trajectory = await run(program, *texts)
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.name == name
    assert message in trajectory.failure.message


async def test_a_program_that_hangs_is_cancelled(run: Run) -> None:
    trajectory = await run(hanging, deadline_s=0.05)
    assert trajectory.failure is not None
    assert trajectory.failure.name == "deadline"


def failing_reward(episode: object) -> float:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda episode: math.nan, "the reward is nan, not a finite number"),
        (lambda episode: 10**400, "the reward is an integer of 401 digits"),
        (lambda episode: None, "the reward must be a number, got None"),
        (failing_reward, "reward raised KeyError: 'x'"),
    ],
)
async def test_a_reward_that_is_no_number_is_a_failure(
    run: Run, reward: ProgramReward, message: str
) -> None:
    trajectory = await run(answer, "42", reward=reward)
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.name == "reward"
    assert message in trajectory.failure.message


async def test_a_plain_reward_function_runs_in_a_thread_with_a_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def reward(episode: object) -> float:
        release.wait(60)
        return 1.0

    monkeypatch.setattr("rstar2.agent.episodes.GRACE_S", 0.0)
    late = await run(answer, "42", reward=reward, reward_deadline_s=0.05)
    release.set()
    assert late.reward is None
    assert late.failure is not None
    assert late.failure.name == "deadline"


async def test_a_users_error_in_a_reward_ends_the_run_as_in_other_environments(run: Run) -> None:
    def reward(episode: object) -> float:
        raise UserError("the judge needs a key")

    with pytest.raises(UserError, match="needs a key"):
        await run(answer, "42", reward=reward)


async def insisting(base_url: str, api_key: str, problem: Problem) -> float:
    while True:
        await answer(base_url, api_key, problem)


async def test_a_program_stopped_by_a_limit_has_no_reward_but_its_tokens(run: Run) -> None:
    trajectory = await run(insisting, "a", "b", max_turns=2)
    assert trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.reward is not None
    assert trajectory.reward.value == 0.0
    assert len(trajectory.segments) == 2


def after_the_limit(error: Exception) -> Any:
    """A program that reaches its limit of turns, and then fails for another reason."""

    async def program(base_url: str, api_key: str, problem: Problem) -> float:
        with contextlib.suppress(openai.BadRequestError):
            await insisting(base_url, api_key, problem)
        raise error

    return program


async def unreachable_judge(base_url: str, api_key: str, problem: Problem) -> float:
    with contextlib.suppress(openai.BadRequestError):
        await insisting(base_url, api_key, problem)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as judge:
        await judge.chat.completions.create(model="judge", messages=HI)
    return 1.0


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (after_the_limit(InfrastructureError("the judge is down")), "infrastructure"),
        (after_the_limit(ConnectionResetError("the judge is gone")), "connection"),
        (after_the_limit(TimeoutError("the judge is slow")), "connection"),
        (unreachable_judge, "connection"),
    ],
)
async def test_an_infrastructure_error_after_a_limit_is_no_reward(
    run: Run, program: Any, name: str
) -> None:
    trajectory = await run(program, "a", "b", max_turns=2)
    assert trajectory.reward is None
    assert trajectory.stop is StopReason.ENVIRONMENT_FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.name == name


async def test_a_command_that_is_killed_after_a_limit_has_no_reward(
    run: Run, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, signal, urllib.error, urllib.request\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
        "try:\n"
        "    while True:\n"
        "        urllib.request.urlopen(url, body)\n"
        "except urllib.error.HTTPError:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = await run(Command((sys.executable, str(agent))), "a", max_turns=1)
    assert killed.reward is None
    assert killed.failure is not None
    assert killed.failure.name == "infrastructure"
    assert "SIGKILL" in killed.failure.message


@pytest.mark.parametrize("program", ["python agent.py", [], [1], 3])
async def test_a_program_must_be_callable_or_a_list_of_words(program: object) -> None:
    with pytest.raises(UserError, match="program"):
        check_program(program)

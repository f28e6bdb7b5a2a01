"""Programs as rollouts: rewards, failures by name, and the URLs of an environment.

The generator here is scripted; `test_exact.py` uses a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.endpoint.program import Command, ProgramReward, check_program, run_program
from rstar2.endpoint.server import EndpointServer
from rstar2.errors import EngineError, InfrastructureError, UserError
from rstar2.types import Problem, StopReason, Trajectory
from tests.endpoint.scripted import Script

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROBLEM = Problem("p", "What is 6 times 7?", "42")
HI: Any = [{"role": "user", "content": "hi"}]


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
    from openai import AsyncOpenAI

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
        import openai

        with contextlib.suppress(openai.BadRequestError):
            await insisting(base_url, api_key, problem)
        raise error

    return program


async def unreachable_judge(base_url: str, api_key: str, problem: Problem) -> float:
    import openai

    with contextlib.suppress(openai.BadRequestError):
        await insisting(base_url, api_key, problem)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as judge:
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

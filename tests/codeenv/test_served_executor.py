"""Client, HTTP, call table, workers and jail together, with sessions and compatible APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import httpx
import pytest

from rstar2.codeenv.client.bench import PROGRAMS
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest, VerifyRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

pytestmark = pytest.mark.slow
LONG = Limits(wall_s=60.0, cpu_s=60.0)
"""Limits of programs that end by themselves."""


@pytest.fixture
async def client(served_url: str) -> AsyncIterator[CodeEnvClient]:
    async with await CodeEnvClient.start(CodeEnvConfig(urls=(served_url,))) as client:
        yield client


@pytest.fixture
def run(client: CodeEnvClient, request: pytest.FixtureRequest) -> Any:
    numbers = iter(range(1000))

    async def call(code: str, **more: Any) -> ToolResult:
        call_id = f"{request.node.name}-{next(numbers)}"
        given: dict[str, Any] = {"deadline_s": 200.0, "limits": LONG, **more}
        return await client.run(RunRequest(call_id, code, **given))

    return call


async def test_outcomes_arrive_as_they_are(run: Any) -> None:
    quick = Limits(wall_s=60.0, cpu_s=0.5)
    programs = {
        "print(input())": Outcome.OK,
        "x = 1": Outcome.NO_OUTPUT,
        "1/0": Outcome.EXCEPTION,
        "print(": Outcome.SYNTAX_ERROR,
        "while True: pass": Outcome.TIMEOUT,
    }
    results = await asyncio.gather(
        *(run(code, stdin="ü\n", limits=quick) for code in programs)
    )  # fmt: skip
    assert [r.outcome for r in results] == list(programs.values())
    assert results[0].stdout == "ü\n"
    assert all(r.isolation in ("strict", "portable") and r.server for r in results)


async def test_many_calls_get_their_own_results(run: Any) -> None:
    results = await asyncio.gather(*(run(f"print({i} ** 3)") for i in range(150)))
    assert [r.stdout for r in results] == [f"{i**3}\n" for i in range(150)]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
async def test_the_benchmarks_programs_run(run: Any, name: str) -> None:
    result = await run(PROGRAMS[name])
    expected = Outcome.EXCEPTION if name == "exception" else Outcome.OK
    assert result.outcome is expected, result


async def test_verify_checks_answers(client: CodeEnvClient) -> None:
    verdict = await client.verify(
        VerifyRequest("v1", "math", {"answer": "1/2", "truth": "0.5"}, deadline_s=60.0)
    )
    assert (verdict.value, verdict.error) == (True, None)
    unknown = await client.verify(VerifyRequest("v2", "no such", {}, deadline_s=60.0))
    assert unknown.error == "unknown_function"
    assert not unknown.infrastructure


async def test_a_session_keeps_state_rolls_back_and_branches(
    client: CodeEnvClient, run: Any
) -> None:
    session = (await client.open_session(ttl_s=60.0)).id
    assert (await run("x = 40", session=session)).outcome is Outcome.NO_OUTPUT
    assert (await run("x = 0; 1/0", session=session)).outcome is Outcome.EXCEPTION
    branch = (await client.branch_session(session)).id
    assert (await run("x += 2; print(x)", session=session)).stdout == "42\n"
    assert (await run("print(x)", session=branch)).stdout == "40\n"
    await client.close_session(session)
    await client.close_session(branch)


async def test_sandbox_fusions_client_runs_programs(served_url: str) -> None:
    sandbox_fusion = import_module("sandbox_fusion")

    def ask(code: str, **more: Any) -> Any:
        request = sandbox_fusion.RunCodeRequest(code=code, language="python", **more)
        return sandbox_fusion.run_code(
            request, endpoint=served_url, max_attempts=1, client_timeout=120
        )

    done = await asyncio.to_thread(ask, "print(input()[::-1])", stdin="abc", run_timeout=10)
    assert (done.status, done.run_result.stdout, done.run_result.return_code) == (
        "Success", "cba\n", 0,
    )  # fmt: skip
    failed = await asyncio.to_thread(ask, "raise SystemExit(3)", run_timeout=10)
    assert (failed.status, failed.run_result.return_code) == ("Failed", 3)
    raised = await asyncio.to_thread(ask, "int('x')", run_timeout=10)
    assert raised.status == "Failed"
    assert "ValueError" in raised.run_result.stderr
    late = await asyncio.to_thread(ask, "while True: pass", run_timeout=0.5)
    assert late.run_result.status == "TimeLimitExceeded"


async def test_code_judges_batch_runs_programs(served_url: str) -> None:
    programs = [("print(int(input()) * 2)", "21", "42"), ("print(1)", "", "2"), ("1/0", "", None)]
    submissions = [
        {"type": "python", "solution": code, "input": given, "expected_output": expected}
        for code, given, expected in programs
    ]
    async with httpx.AsyncClient(timeout=120) as http:
        body = {"type": "batch", "submissions": submissions}
        results = (await http.post(served_url + "/run/long-batch", json=body)).json()["results"]
    assert [r["run_success"] for r in results] == [True, True, False]
    assert [r["success"] for r in results] == [True, False, False]
    assert "ZeroDivisionError" in results[2]["stderr"]


async def test_metrics_count_what_was_run(served_url: str, run: Any) -> None:
    await run("print(1)")
    async with httpx.AsyncClient(timeout=120) as http:
        text = (await http.get(served_url + "/metrics")).text
    assert 'rstar2_codeenv_calls_total{kind="run",outcome="ok"}' in text
    assert "rstar2_codeenv_slots 2" in text

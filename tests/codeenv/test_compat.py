"""The compatible APIs: code-judge by its field names, SandboxFusion by its real client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from importlib import import_module
from typing import Any

import httpx
import pytest

from rstar2.codeenv import wire
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import compat
from rstar2.types import Outcome, ToolResult


class Scripted:
    """Answers every program with one result and remembers what was asked."""

    def __init__(self, executor: Any, result: ToolResult) -> None:
        self.asked: list[RunRequest] = []
        self._result = result
        executor.run = self.run

    async def run(self, request: RunRequest, deadline: float) -> ToolResult:
        self.asked.append(request)
        return dataclasses.replace(self._result, call_id=request.id)


OK = ToolResult("", Outcome.OK, stdout="9\n", exit_code=0, wall_s=0.25)
RAISED = ToolResult(
    "", Outcome.EXCEPTION, stdout="a\n", stderr="w", traceback="Traceback: ...", exit_code=1
)
TIMEOUT = ToolResult("", Outcome.TIMEOUT, message="5 s were not enough", signal=9)
LOST = ToolResult("", Outcome.INFRASTRUCTURE, message="a worker died")
KILLED = ToolResult("", Outcome.KILLED, message="killed by signal 11", signal=11)


async def ask(server: Any, path: str, body: Any) -> Any:
    async with httpx.AsyncClient(timeout=120) as http:
        response = await http.post(server.url + path, json=body)
        return response.status_code, response.json()


def submission(**more: Any) -> dict[str, Any]:
    return {"type": "python", "solution": "print(input())", "input": "9", **more}


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch"])
async def test_code_judge_batches_keep_order_and_ids(serve: Any, path: str) -> None:
    async with serve() as server:
        subs = [submission(solution=f"echo {i}", sub_id=f"s{i}") for i in range(5)]
        status, body = await ask(
            server, path, {"type": "batch", "submissions": subs, "sub_id": "b"}
        )
        assert status == 200
        assert body["sub_id"] == "b"
        assert [r["sub_id"] for r in body["results"]] == [f"s{i}" for i in range(5)]
        assert [r["stdout"] for r in body["results"]] == [str(i) for i in range(5)]
        fields = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}
        assert set(body["results"][0]) == fields


async def test_code_judge_ids_may_repeat_or_miss(serve: Any) -> None:
    async with serve() as server:
        subs = [submission(sub_id="x"), submission(sub_id="x"), submission()]
        _, body = await ask(server, "/run/batch", {"submissions": subs})
        assert [bool(r["sub_id"]) for r in body["results"]] == [True] * 3
        assert server.executor.executed.total() == 3


@pytest.mark.parametrize(
    ("result", "success", "reason", "part"),
    [
        (OK, True, "", ""),
        (RAISED, False, "", "Traceback"),
        (TIMEOUT, False, "worker_timeout", "5 s"),
        (LOST, False, "internal_error", "worker died"),
    ],
)
async def test_code_judge_results(
    serve: Any, result: ToolResult, success: bool, reason: str, part: str
) -> None:
    async with serve() as server:
        Scripted(server.executor, result)
        _, body = await ask(server, "/run/batch", {"submissions": [submission()]})
        (got,) = body["results"]
        assert (got["success"], got["run_success"], got["reason"]) == (success, success, reason)
        assert got["cost"] == result.wall_s
        assert part in got["stderr"]


@pytest.mark.parametrize(("expected", "success"), [("9", True), (" 9 \n", True), ("8", False)])
async def test_code_judge_compares_expected_output(
    serve: Any, expected: str, success: bool
) -> None:
    async with serve() as server:
        Scripted(server.executor, OK)
        _, got = await ask(server, "/judge", submission(expected_output=expected))
        assert (got["success"], got["run_success"]) == (success, True)
        assert "stdout" not in got


async def test_code_judge_stdin_is_passed(serve: Any) -> None:
    async with serve() as server:
        scripted = Scripted(server.executor, OK)
        await ask(server, "/run", submission(input=None))
        await ask(server, "/run", submission(input="7\n"))
        assert [request.stdin for request in scripted.asked] == ["", "7\n"]


async def test_code_judge_full_queue_asks_to_try_again(serve: Any) -> None:
    async with serve(slots=1, queue=1) as server:
        subs = [submission(solution="sleep 0.05") for _ in range(4)]
        _, body = await ask(server, "/run/batch", {"submissions": subs})
        reasons = [r["reason"] for r in body["results"]]
        assert reasons.count("queue_timeout") == 2
        assert reasons.count("") == 2


@pytest.mark.parametrize("path", ["/run/batch", "/judge/batch"])
async def test_code_judge_answers_a_refused_item_in_its_place(serve: Any, path: str) -> None:
    subs = [
        submission(solution="echo 1"),
        submission(type="cpp", sub_id="c"),
        {"type": "python"},
        submission(solution="x" * 2_000_000),
        7,
        submission(solution="echo 2"),
    ]
    async with serve() as server:
        status, body = await ask(server, path, {"submissions": subs})
        assert status == 200
        reasons = [got["reason"] for got in body["results"]]
        assert reasons == ["", *["invalid_input"] * 4, ""]
        assert [got["run_success"] for got in body["results"]] == [True, *[False] * 4, True]
        assert body["results"][1]["sub_id"] == "c"
        if path == "/run/batch":
            texts = [got["stderr"] for got in body["results"]]
            for text, part in zip(texts[1:5], ("cpp", "solution", "above", "int"), strict=True):
                assert part in text
            assert "submissions[1].type" in texts[1]


@pytest.mark.parametrize(
    "bad",
    [
        rb"echo \ud800",
        rb"echo \uDFFFx",
        rb"echo \ude00\ud83d",
        rb"echo \\\uD800",
        b"echo \xff",
        b"echo \xed\xa0\x80",
    ],
)
async def test_code_judge_refuses_only_the_item_that_is_no_text(serve: Any, bad: bytes) -> None:
    good = rb'{"type": "python", "solution": "echo \\ud800 \ud83d\ude00"}'
    item = rb'{"type": "python", "sub_id": "b", "solution": "' + bad + b'"}'
    body = b'{"submissions": [' + b", ".join((good, item, good)) + b"]}"
    async with serve() as server, httpx.AsyncClient() as http:
        response = await http.post(server.url + "/run/batch", content=body)
        assert response.status_code == 200, response.text
        first, second, third = response.json()["results"]
        assert (first["stdout"], third["stdout"]) == ("\\ud800 \U0001f600",) * 2
        assert second["reason"] == "invalid_input"
        assert "submissions[1]: " in second["stderr"]


async def test_code_judge_batch_that_is_no_json_is_refused(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient() as http:
        for body in (
            b"{",
            rb'{"submissions": ["\ud800"',
            rb'{"sub_id": "\ud800", "submissions": [7]}',
        ):
            response = await http.post(server.url + "/run/batch", content=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_json")


async def test_code_judge_batches_of_thousands_are_answered_in_order(serve: Any) -> None:
    subs = [submission(solution=f"echo {number}") for number in range(2000)]
    async with serve() as server:
        status, body = await ask(server, "/run/long-batch", {"submissions": subs})
        assert status == 200
        assert [result["stdout"] for result in body["results"]] == [str(n) for n in range(2000)]


async def test_code_judge_batches_are_bounded(serve: Any) -> None:
    most = compat.MAX_SUBMISSIONS
    async with serve() as server:
        status, body = await ask(server, "/run/batch", {"submissions": [{}] * (most + 1)})
        assert (status, body["error"]["code"]) == (413, "too_large")
        assert f"{most + 1} programs; send at most {most}" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/run/batch", "/run", "/v1/batch", "/run_code"])
async def test_body_of_very_many_values_is_refused_before_it_is_decoded(
    serve: Any, path: str
) -> None:
    """64 MB of empty submissions stopped the server for eleven seconds.

    The body ends where only a decoder would notice it.
    """
    body = b'{"submissions":[' + b"{}," * wire.MAX_VALUES
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        response = await http.post(server.url + path, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "too_large")
    assert f"over {wire.MAX_VALUES} values; send smaller batches" in error["message"]


async def test_commas_in_programs_are_no_values(serve: Any) -> None:
    code = 'print(1)\n"""\\' + ', "' * wire.MAX_VALUES
    async with serve() as server:
        status, body = await ask(server, "/run/batch", {"submissions": [submission(solution=code)]})
    assert (status, len(body["results"])) == (200, 1)


async def test_others_are_served_while_a_large_batch_is_read(serve: Any) -> None:
    """A third of a megabyte of empty submissions stopped the server for seconds."""
    passes = 0

    async def others() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    parts = 8
    body = {"submissions": [*[{}] * (parts * compat.SUBMISSIONS_AT_ONCE), submission()]}
    async with serve() as server:
        busy = asyncio.create_task(others())
        answer = await compat.Compat(server.table)._batch(
            json.dumps(body).encode(), 60.0, judge=True
        )
        busy.cancel()
    assert [result.reason for result in answer.results] == ["invalid_input"] * (
        parts * compat.SUBMISSIONS_AT_ONCE
    ) + [""]
    assert passes >= parts


async def test_code_judge_allows_ten_seconds_or_the_cap(serve: Any) -> None:
    low = {"cap": {"wall_s": 4.0, "cpu_s": 3.0}}
    settings: Any
    for settings, wall_s, cpu_s in (({}, 10.0, 10.0), (low, 4.0, 3.0)):
        async with serve(**settings) as server:
            scripted = Scripted(server.executor, OK)
            await ask(server, "/run/batch", {"submissions": [submission()]})
            await ask(server, "/run", submission())
            assert [request.limits.wall_s for request in scripted.asked] == [wall_s] * 2
            assert [request.limits.cpu_s for request in scripted.asked] == [cpu_s] * 2


VERL_REWARD = {
    "compile_timeout": 10, "run_timeout": 10, "code": "print(9)", "stdin": None,
    "memory_limit_MB": 1024, "language": "python", "files": {}, "fetch_files": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "request_body", [{"code": "print(9)"}, VERL_REWARD], ids=["tool", "reward"]
)
async def test_the_requests_of_verl(serve: Any, request_body: dict[str, Any]) -> None:
    """Its example tool posts only the code, its sandbox reward every field."""
    async with serve() as server:
        Scripted(server.executor, OK)
        status, body = await ask(server, "/run_code", request_body)
        assert (status, body["run_result"]["stdout"]) == (200, "9\n")


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/run/batch", {"submissions": []}, "submissions"),
        ("/run/batch", {"submissions": [submission(type="cpp")]}, "submissions[0].type"),
        ("/run/batch", {"submissions": [{"type": "python"}]}, "solution"),
        ("/run_code", {"code": "1", "language": "rust"}, "language"),
        ("/run_code", {"code": "1", "language": "python", "files": {"a": "b"}}, "files"),
        ("/run_code", {"code": "1", "files": {"../a": "YQ=="}}, "files"),
        ("/run_code", {"code": "1", "language": "python", "run_timeout": 1e6}, "wall_s"),
        ("/run_code", {"language": "python"}, "code"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    serve: Any, path: str, body: Any, part: str
) -> None:
    async with serve() as server:
        status, answer = await ask(server, path, body)
        assert status == 422
        assert part in answer["error"]["message"]
        assert not server.executor.executed


async def test_ping_and_status(serve: Any) -> None:
    async with serve() as server, httpx.AsyncClient(timeout=120) as http:
        assert (await http.get(server.url + "/ping")).json() == "pong"
        assert (await http.get(server.url + "/status")).json() == {"queue": 0, "num_workers": 4}


# --------------------------------------------------------------------------- SandboxFusion


def fusion(server: Any, **more: Any) -> Any:
    """One request through the published client, in a thread as it is synchronous."""
    sandbox_fusion = import_module("sandbox_fusion")
    request = sandbox_fusion.RunCodeRequest(
        **{"code": "print(1)", "language": "python", "run_timeout": 7, **more}
    )
    return asyncio.to_thread(
        sandbox_fusion.run_code, request, endpoint=server.url, max_attempts=1, client_timeout=120
    )


@pytest.mark.parametrize(
    ("result", "status", "run_status", "code"),
    [
        (OK, "Success", "Finished", 0),
        (RAISED, "Failed", "Finished", 1),
        (TIMEOUT, "Failed", "TimeLimitExceeded", None),
        (KILLED, "Failed", "Finished", -11),
    ],
)
async def test_sandbox_fusion_client_reads_results(
    serve: Any, result: ToolResult, status: str, run_status: str, code: int | None
) -> None:
    async with serve() as server:
        scripted = Scripted(server.executor, result)
        got = await fusion(server, stdin="in")
        assert got.status == status
        assert got.run_result.status == run_status
        assert got.run_result.return_code == code
        assert got.run_result.stdout == result.stdout
        assert result.traceback in got.run_result.stderr
        (asked,) = scripted.asked
        assert (asked.stdin, asked.limits.wall_s, asked.limits.cpu_s) == ("in", 7.0, 7.0)


async def test_sandbox_fusion_client_sees_our_failure_as_its_sandbox_error(serve: Any) -> None:
    async with serve() as server:
        Scripted(server.executor, LOST)
        with pytest.raises(Exception, match="Sandbox responded with error: a worker died"):
            await fusion(server)


async def test_sandbox_fusion_client_can_carry_the_token_in_its_url(serve: Any) -> None:
    async with serve(token="secret") as server:
        Scripted(server.executor, OK)
        server.url = server.url.replace("http://", "http://token:secret@")
        assert (await fusion(server)).status == "Success"


async def test_sandbox_fusion_files_go_in_and_come_back(serve: Any) -> None:
    async with serve() as server:
        wrote = dataclasses.replace(OK, files={"out.txt": b"new", "other": b"?"})
        scripted = Scripted(server.executor, wrote)
        got = await fusion(
            server,
            files={"./data.csv": "YSxi", "empty": None},
            fetch_files=["./out.txt", "./data.csv", "missing"],
        )
        (asked,) = scripted.asked
        assert (dict(asked.files), asked.collect) == ({"data.csv": b"a,b"}, True)
        assert got.files == {"./out.txt": "bmV3", "./data.csv": "YSxi"}


async def test_memory_limit_is_passed_and_minus_one_means_default(serve: Any) -> None:
    async with serve() as server:
        scripted = Scripted(server.executor, OK)
        for limit in (-1, 256):
            body = {"code": "1", "language": "python", "memory_limit_MB": limit}
            await ask(server, "/run_code", body)
        assert [request.limits.memory_mb for request in scripted.asked] == [None, 256]

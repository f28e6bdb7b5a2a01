"""`rstar2 route` as a command: its arguments, and the whole router with servers that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rstar2.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpu1:8000"], "URL: 'gpu1:8000' is not a URL like http://host:8000"),
        (["http://a:1", "http://a:1/v1"], "URL: a:1 is given twice"),
        (["http://a:1", "--policy", "fastest"], "--policy 'fastest': choose from reserve"),
        (["http://token:k@a:1", "--host", "0.0.0.0"], "set a key for the router"),
        (["http://a:1", "--key-file", "missing"], "--key-file missing: it cannot be read"),
        (["http://a:1", "--host", "192.0.2.1"], "--port: cannot listen on 192.0.2.1:8090"),
    ],
)
def test_bad_arguments_get_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["route", *words])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert "Traceback" not in message


@contextmanager
def engine(tmp_path: Path, name: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """One scripted engine in a process of its own, and its port."""
    script = {
        "engines": 1, "turns": [[7, 8, 9]], "marker": 0, "first_prompt": 0, "per_turn": 1,
    }  # fmt: skip
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(script))
    command = [sys.executable, str(ROOT / "benchmarks" / "http_engines.py"), str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())[0]
        finally:
            process.kill()


@pytest.mark.slow
def test_a_request_that_waits_is_refused_when_the_router_stops() -> None:
    command = [sys.executable, "-m", "rstar2", "route", "--port", "0", "http://127.0.0.1:9"]
    with (
        subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as router,
        ThreadPoolExecutor() as threads,
    ):
        try:
            assert router.stdout is not None
            assert router.stderr is not None
            url = router.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=60) as client:
                body = {"token_ids": [1], "sampling_params": {"max_tokens": 8}}
                page = client.get("/health", headers={"origin": "https://evil.example"})
                assert (page.status_code, page.json()["error"]["code"]) == (403, "forbidden")
                answer = threads.submit(client.post, "/inference/v1/generate", json=body)
                while "rstar2_router_waiting 1" not in httpx.get(f"{url}/metrics").text:
                    pass
                router.terminate()
                said = router.stderr.read()
                refused = answer.result(60)
            assert refused.status_code == 502
            assert refused.json()["error"]["message"] == "the router is stopping"
            assert router.wait(60) == 0, said
            assert "Traceback" not in said
        finally:
            router.kill()


@pytest.mark.slow
def test_rollouts_survive_the_death_of_an_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rstar2", "route", "--port", "0"]
    with engine(tmp_path, "a") as (first, one), engine(tmp_path, "b") as (_, two):
        urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
        with subprocess.Popen(
            [*command, *urls], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as router:
            try:
                assert router.stdout is not None
                assert router.stderr is not None
                url = router.stdout.readline().strip()
                with httpx.Client(base_url=url, timeout=60) as client:
                    for turn in range(3):
                        if turn == 1:
                            first.kill()
                            first.wait()
                        for rollout in range(4):
                            answer = client.post(
                                "/inference/v1/generate",
                                json={"token_ids": [1], "sampling_params": {"max_tokens": 8}},
                                headers={"x-session-id": f"g/{rollout}"},
                            )
                            assert answer.status_code == 200, answer.text
                            assert answer.json()["choices"][0]["token_ids"] == [7, 8, 9]
                    states = client.get("/health").json()["servers"]
                    assert states[f"127.0.0.1:{two}"] == "serves"
                    assert states[f"127.0.0.1:{one}"] != "serves"
                router.terminate()
                said = router.stderr.read()
                assert router.wait(60) == 0, said
                assert "routing to 2 of 2 servers with the policy reserve" in said
                assert f"127.0.0.1:{one} is lost" in said
            finally:
                router.kill()

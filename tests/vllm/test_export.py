"""An export answers the same through the agent loop, plain transformers and vLLM's OpenAI API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rstar2 import Sandbox
from rstar2.paper_format import TOOL
from rstar2.record import read_groups
from rstar2.report.model_card import TOOL_PARSER
from rstar2.tool_text import tool_text
from rstar2.types import Trajectory

pytestmark = pytest.mark.timeout(900)

Complete = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""A chat completion: the messages so far -> the assistant's message."""
START_S = 300.0
MAX_TOKENS, MAX_TURNS = 128, 3


@pytest.fixture(scope="module")
def recorded(stage: Path) -> list[tuple[str, Trajectory]]:
    """Questions, and what the agent loop answered to them at temperature 0."""
    lines = read_groups(stage.parents[1], "eval-sft-greedy")
    return [(line.group.problem.prompt, line.group.trajectories[0]) for line in lines]


@pytest.fixture(scope="module")
def served(stage: Path) -> Iterator[httpx.Client]:
    """The server of `vllm serve` with the options of the model card, on a Unix socket.

    The command itself does not start from the CPU packages, which have another name than vllm.
    """
    with tempfile.TemporaryDirectory(prefix="rstar2-serve-") as directory:
        socket, log = Path(directory) / "http", Path(directory) / "log"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(stage)),
            *("--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER),
            *("--served-model-name", "tiny", "--uds", str(socket), "--dtype", "float32"),
            *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"),
            *("--num-gpu-blocks-override", "64", "--block-size", "32"),
        ]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as output:
            server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        transport = httpx.HTTPTransport(uds=str(socket))
        try:
            with httpx.Client(transport=transport, base_url="http://vllm", timeout=120) as client:
                _wait_until_ready(client, socket, server, log)
                yield client
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(30)


def _wait_until_ready(
    client: httpx.Client, socket: Path, server: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        if socket.exists() and "Application startup complete" in log.read_text():
            assert client.get("/health").status_code == 200
            return
        time.sleep(0.2)


def converse(complete: Complete, question: str, box: Sandbox) -> list[str]:
    """Ask, run every call, and return what the model said in each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    said: list[str] = []
    for _ in range(MAX_TURNS):
        message = complete(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        said.append((message.get("content") or "") + "".join(map(_call_text, calls)))
        if not calls:
            break
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            result = box.run(arguments["code"], stdin=arguments["input"])
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": tool_text(result)}
            )
    return said


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    body = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def agent_said(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns]


def comparable(recorded: list[tuple[str, Trajectory]]) -> list[tuple[str, Trajectory]]:
    """Rollouts whose calls are all valid: the OpenAI format cannot express a call that is not."""
    return [
        (question, trajectory)
        for question, trajectory in recorded
        if all(call.error is None for turn in trajectory.turns for call in turn.calls)
        and trajectory.stop.value != "max_length"
    ]


def hermes(text: str) -> dict[str, Any]:
    """A turn as a message with its calls."""
    content, *calls = text.split("<tool_call>")
    values = [json.loads(call.replace("</tool_call>", "")) for call in calls]
    tool_calls = [
        {
            "id": str(number),
            "type": "function",
            "function": {"name": value["name"], "arguments": json.dumps(value["arguments"])},
        }
        for number, value in enumerate(values)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": tool_calls}


def test_transformers_answers_as_the_agent_loop(
    stage: Path, recorded: list[tuple[str, Trajectory]]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(stage)
    model: Any = AutoModelForCausalLM.from_pretrained(stage)

    def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        sampled = output[0, prompt["input_ids"].shape[1] :]
        return hermes(tokenizer.decode(sampled, skip_special_tokens=True))

    compared = comparable(recorded)
    assert len(compared) >= 4
    with Sandbox() as box:
        for question, trajectory in compared:
            assert converse(complete, question, box) == agent_said(trajectory)


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "no tools"])
def test_the_openai_api_of_vllm_answers_as_the_agent_loop(
    tools: list[dict[str, Any]] | None,
    served: httpx.Client,
    recorded: list[tuple[str, Trajectory]],
) -> None:
    def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if tools is not None:
            request["tools"] = tools
        reply = served.post("/v1/chat/completions", json=request)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        if tools is None:  # without tools the calls stay in the text
            return hermes(message["content"])
        return {key: message[key] for key in ("role", "content", "tool_calls") if key in message}

    compared = comparable(recorded)
    assert any(turn.calls for _, trajectory in compared for turn in trajectory.turns)
    with Sandbox() as box:
        for question, trajectory in compared:
            assert converse(complete, question, box) == agent_said(trajectory)

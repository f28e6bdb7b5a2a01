"""A model directory behind plain transformers and behind vLLM's OpenAI API, and talking to both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from rstar2 import Sandbox
from rstar2.report.model_card import TOOL_PARSER
from rstar2.tool_text import tool_text

Complete = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""A chat completion: the messages so far -> the assistant's message."""
START_S = 300.0
MAX_TOKENS, MAX_TURNS = 128, 3


@contextmanager
def serving(stage: Path, start_s: float = START_S) -> Iterator[httpx.Client]:
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
                _wait_until_ready(client, socket, server, log, start_s)
                yield client
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(30)


def _wait_until_ready(
    client: httpx.Client,
    socket: Path,
    server: subprocess.Popen[bytes],
    log: Path,
    start_s: float,
) -> None:
    deadline = time.monotonic() + start_s
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


def with_transformers(stage: Path) -> Complete:
    """Greedy completions by transformers alone."""
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

    return complete


def with_openai(client: httpx.Client, tools: list[dict[str, Any]] | None) -> Complete:
    """Greedy completions by the OpenAI API of a server."""

    def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if tools is not None:
            request["tools"] = tools
        reply = client.post("/v1/chat/completions", json=request)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        if tools is None:  # without tools the calls stay in the text
            return hermes(message["content"])
        return {key: message[key] for key in ("role", "content", "tool_calls") if key in message}

    return complete

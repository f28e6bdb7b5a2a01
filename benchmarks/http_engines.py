"""Scripted vLLM servers over real HTTP, in processes of their own; for benchmarks of the driver.

They speak the part of vLLM's interface that `VllmEngine` uses, hold every request for a while, and
answer with tokens from a script. Nothing is computed, so that one process can serve many engines.

    python benchmarks/http_engines.py SCRIPT.json     prints one port per engine, then serves

A request is answered in the time that an engine would need for its tokens. At most `sequences`
requests of an engine run at once; the others wait, as in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

BLOCK = 16


@dataclass(frozen=True)
class Script:
    """What all engines of a process say, and how fast."""

    engines: int
    turns: list[list[int]]
    """Tokens of a rollout's turns: all but the last call a tool."""
    marker: int
    """A token that every turn and its response add `per_turn` times to the prompt."""
    first_prompt: int
    """How often the first prompt has it."""
    per_turn: int
    sequences: int = 256
    max_length: int = 1024
    base_s: float = 0.0
    token_s: float = 0.0
    filler: int = -1
    """A token to repeat before a turn, to reach a length that is drawn."""
    lengths: list[int] = field(default_factory=list)
    """Lengths to draw from at random; empty: turns as they are."""
    tool_share: float = -1.0
    """Probability of a tool call; below 0: as the script has them."""
    seed: int = 0
    by_request: bool = False
    """Draw from the seed of a request instead of `seed`: an answer then does not depend on the
    engine, on its order of requests, or on whether another engine failed."""
    ports: list[int] = field(default_factory=list)
    """Where to listen, one port per engine; empty: any."""


class Asked(msgspec.Struct):
    """The fields of a request that decide its answer."""

    token_ids: list[int]
    sampling_params: dict[str, Any]


class ScriptedServer:
    """One engine: its queue and its counters."""

    def __init__(self, script: Script, index: int) -> None:
        self.script = script
        self.rng = random.Random(f"{script.seed}/{index}")
        self.version = "-1"
        self.running = self.decoded = self.peak = self.served = self.held = 0
        self.busy_s, self.busy_since = 0.0, 0.0
        self.waiting: deque[Callable[[], None]] = deque()

    # ------------------------------------------------------------------ generation

    def tokens(self, asked: Asked) -> tuple[list[int], str]:
        script = self.script
        rng = random.Random(asked.sampling_params["seed"]) if script.by_request else self.rng
        done = asked.token_ids.count(script.marker) - script.first_prompt
        index = min(done // script.per_turn, len(script.turns) - 1)
        if script.tool_share >= 0:
            index = 0 if rng.random() < script.tool_share else len(script.turns) - 1
        ids = script.turns[index]
        if script.lengths:
            length = rng.choice(script.lengths)
            ids = [script.filler] * max(0, length - len(ids)) + ids
        most = int(asked.sampling_params["max_tokens"])
        return (ids, "stop") if len(ids) <= most else (ids[:most], "length")

    def admit(self, start: Callable[[], None]) -> None:
        if self.running < self.script.sequences:
            if not self.running:
                self.busy_since = time.monotonic()
            self.running += 1
            self.peak = max(self.peak, self.running)
            start()
        else:
            self.waiting.append(start)

    def leave(self) -> None:
        if self.waiting:
            self.waiting.popleft()()
        else:
            self.running -= 1
            if not self.running:
                self.busy_s += time.monotonic() - self.busy_since

    @property
    def steps(self) -> int:
        """Steps of an engine that takes `token_s` for each; else one per answer."""
        if not self.script.token_s:
            return self.served
        now_s = time.monotonic() - self.busy_since if self.running else 0.0
        return int((self.busy_s + now_s) / self.script.token_s)

    def answer(self, ids: list[int], finish: str) -> bytes:
        self.decoded += len(ids)
        self.served += 1
        logprobs = [{"token_id": i, "logprob": -0.5 - i / 7919} for i in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": finish,
            "logprobs": {"content": logprobs},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return msgspec.json.encode({"choices": [choice], "usage": usage})

    # ------------------------------------------------------------------ control

    def control(self, method: str, path: str, body: bytes) -> bytes:
        match path.partition("?")[0]:
            case "/metrics":
                return self.metrics()
            case "/v1/models":
                model = {"id": "scripted", "max_model_len": self.script.max_length}
                return msgspec.json.encode({"data": [model]})
            case "/weight_info":
                return msgspec.json.encode({"weight_version": self.version})
            case "/update_weight_version":
                self.version = msgspec.json.decode(body)["new_version"]
            case "/is_paused":
                return b'{"is_paused":false}'
            case "/peak":
                return msgspec.json.encode({"peak": self.peak, "served": self.served})
        return b'{"success":true}'

    def metrics(self) -> bytes:
        tokens = self.script.sequences * self.script.max_length
        blocks = tokens // BLOCK + 1
        label = '{engine="0"}'
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": min(1.0, self.held / tokens),
            "num_preemptions_total": 0,
            "iteration_tokens_total_count": self.steps,
            "generation_tokens_total": self.decoded,
            "prompt_tokens_total": 0,
            "prompt_tokens_cached_total": 0,
        }
        lines = [f"vllm:{name}{label} {float(value)}" for name, value in values.items()]
        lines.append(
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{blocks}"}} 1.0'
        )
        return "\n".join([*lines, ""]).encode()


class ScriptedConnection(asyncio.Protocol):
    """One connection; a request that its client abandons leaves the queue."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None
        self.held = 0
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.ended()

    def ended(self) -> None:
        """The request no longer runs."""
        self.server.held -= self.held
        self.held = 0
        self.server.leave()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.decode("latin-1").split("\r\n")
        length = next(
            (int(x.partition(":")[2]) for x in lines if x.lower().startswith("content-length:")), 0
        )
        if len(rest) < length:
            return
        body, self.buffer = rest[:length], rest[length:]
        method, path, _ = lines[0].split(" ")
        if path == "/inference/v1/generate":
            self.generate(msgspec.json.decode(body, type=Asked))
        else:
            self.reply(self.server.control(method, path, body))

    def generate(self, asked: Asked) -> None:
        server = self.server
        if "prompt_logprobs" in asked.sampling_params:
            scores = [{str(i): {"logprob": 0.0}} for i in asked.token_ids]
            empty: dict[str, Any] = {"token_ids": [], "finish_reason": "stop"}
            answer = {"choices": [empty], "prompt_logprobs": scores}
            self.reply(msgspec.json.encode(answer))
            return

        def start() -> None:
            if self.gone:
                server.leave()
                return
            ids, finish = server.tokens(asked)
            self.held = len(asked.token_ids) + len(ids) // 2
            server.held += self.held
            wait_s = server.script.base_s + server.script.token_s * len(ids)
            self.timer = asyncio.get_running_loop().call_later(wait_s, end, ids, finish)

        def end(ids: list[int], finish: str) -> None:
            self.timer = None
            self.ended()
            self.reply(server.answer(ids, finish))

        server.admit(start)

    def reply(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(head.encode() + b"\r\n\r\n" + body)


async def serve(script: Script) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    ports = []
    for index in range(script.engines):
        state = ScriptedServer(script, index)
        server = await loop.create_server(
            partial(ScriptedConnection, state),
            "127.0.0.1",
            script.ports[index] if script.ports else 0,
            backlog=4096,
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the benchmark ends


class ScriptedServers:
    """One process with many engines; a context manager. Ends with this process."""

    def __init__(self, script: Script) -> None:
        self.script = script
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            self.file = Path(file.name)
        self.start()

    def start(self) -> None:
        """Start the process; again on the same ports after it has ended."""
        self.file.write_text(json.dumps(asdict(self.script)))
        command = [sys.executable, __file__, str(self.file)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.script = replace(self.script, ports=ports)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]

    def __enter__(self) -> ScriptedServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self.file.unlink(missing_ok=True)


def main(words: Sequence[str]) -> None:
    asyncio.run(serve(Script(**json.loads(Path(words[0]).read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])

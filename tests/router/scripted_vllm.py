"""A scripted vLLM server over real HTTP: it answers, waits, fails or dies on command."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

BLOCK = 16


@dataclass(frozen=True)
class Seen:
    """One request as the server got it."""

    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedVllm:
    """Serves the routes that the router uses, on its own port."""

    def __init__(self, *, blocks: int = 64, tokens: int = 3) -> None:
        self.blocks, self.tokens = blocks, tokens
        self.port = 0
        self.turns: list[Seen] = []
        self.gate = asyncio.Event()
        """Answers wait for it; streams after their first event."""
        self.gate.set()
        self.status = 200
        self.healthy = True
        self.silent = False
        """Accepts requests and answers none."""
        self.breaks: str = ""
        """`first`: breaks the connection of a turn at once; `middle`: after the first event."""
        self.running = self.peak = self.cancelled = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: break all connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                await self._request(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.silent:
            await asyncio.Event().wait()
        if method == "GET":
            well = self.healthy or path != "/health"
            self._reply(writer, 200 if well else 503, self._control(path))
            return
        self.turns.append(Seen(path, headers, body))
        self.running += 1
        self.peak = max(self.peak, self.running)
        leaving = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(self._turn(path, body, writer))
        try:
            await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.cancelled += 1
                raise ConnectionError("the client left")
            answer.result()
        finally:
            self.running -= 1
            answer.cancel()
            leaving.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    async def _turn(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(body)
        if self.breaks == "first":
            raise ConnectionError("scripted")
        if asked.get("stream"):
            await self._stream(writer)
            return
        await self.gate.wait()
        if self.status != 200:
            self._reply(writer, self.status, b'{"error":{"message":"scripted"}}')
        else:
            self._reply(writer, 200, self.answer(path))

    def answer(self, path: str) -> bytes:
        """What it answers to a turn."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if "chat" in path:
            choice["message"] = {"role": "assistant", "content": f"from {self.port}"}
        elif "generate" in path:
            choice["token_ids"] = list(range(self.tokens))
        else:
            choice["text"] = f"from {self.port}"
        reply: dict[str, Any] = {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
        }  # fmt: skip
        if "generate" not in path:
            reply["usage"] = {
                "prompt_tokens": 20,
                "completion_tokens": self.tokens,
                "total_tokens": 20 + self.tokens,
            }
        return json.dumps(reply).encode()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for number in range(self.tokens):
            choice = {"index": 0, "delta": {"content": f"t{number}"}, "finish_reason": None}
            event = {
                "id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m",
                "choices": [choice],
            }  # fmt: skip
            self._chunk(writer, f"data: {json.dumps(event)}\n\n".encode())
            if self.breaks == "middle":
                await writer.drain()
                raise ConnectionError("scripted")
            await self.gate.wait()
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _control(self, path: str) -> bytes:
        if path == "/v1/models":
            model = {"id": "m", "object": "model", "created": 0, "owned_by": "vllm"}
            data = [model | {"max_model_len": self.blocks * BLOCK}]
            return json.dumps({"object": "list", "data": data}).encode()
        if path != "/metrics":
            return b"{}"
        values = (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "num_preemptions_total", "iteration_tokens_total_count", "generation_tokens_total",
            "prompt_tokens_total", "prompt_tokens_cached_total",
        )  # fmt: skip
        lines = [f'vllm:{name}{{engine="0"}} 0.0' for name in values]
        lines.append(
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.blocks + 1}"}} 1.0'
        )
        return "\n".join([*lines, ""]).encode()

    def _reply(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

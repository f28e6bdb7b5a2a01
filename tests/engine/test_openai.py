"""The chat client against a real HTTP server that imitates an OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rstar2.engine.openai import OpenAIChat
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.types import Finish, Message
from tests.chat_server import chat_server

HELLO = [Message("system", "s"), Message("user", "Hello")]


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> str:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n"


GOOD = [
    ": a comment\n\n", chunk(), chunk("Grü"), chunk("ße"), chunk(finish="stop"),
    'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n',
    "data: [DONE]\n\n",
]  # fmt: skip


class Server:
    """Streams the given lines, or answers with a status; records its requests."""

    def __init__(self) -> None:
        self.stream: list[str] = GOOD
        self.status = 200
        self.models = ["m"]
        self.hang = False
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def list(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in self.models]})

    async def complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        if self.status != 200:
            return JSONResponse({"error": "no such thing"}, self.status)

        async def lines() -> AsyncIterator[str]:
            for line in self.stream:
                yield line
            if self.hang:
                await asyncio.sleep(600)

        return StreamingResponse(lines(), media_type="text/event-stream")

    def serve(self) -> AbstractAsyncContextManager[str]:
        return chat_server(self.list, self.complete)


async def ask(chat: OpenAIChat, deadline_s: float = 120.0, **more: Any) -> Any:
    return await chat.complete(HELLO, max_tokens=64, temperature=0.5, deadline_s=deadline_s, **more)


async def test_an_answer_is_streamed_and_counted() -> None:
    server = Server()
    pieces: list[str] = []
    async with server.serve() as url, OpenAIChat(url, api_key="k") as chat:
        reply = await ask(chat, seed=2**40, on_text=pieces.append)
    assert pieces == ["Grü", "ße"]
    assert (reply.text, reply.finish) == ("Grüße", Finish.STOP)
    assert (reply.prompt_tokens, reply.completion_tokens) == (9, 2)
    (body,) = server.bodies
    assert body["model"] == "m"
    assert body["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Hello"},
    ]
    assert 0 <= body["seed"] < 2**31
    assert server.keys == ["Bearer k"]


async def test_a_truncated_answer_is_marked() -> None:
    server = Server()
    server.stream = [chunk("a"), chunk(finish="length"), "data: [DONE]\n\n"]
    async with server.serve() as url, OpenAIChat(url) as chat:
        assert (await ask(chat)).finish is Finish.LENGTH


@pytest.mark.parametrize(
    "stream",
    [
        [chunk("a")],
        ["data: {nonsense\n\n"],
        [chunk("a"), 'data: {"error": {"message": "out of memory"}}\n\n'],
    ],
)
async def test_a_broken_stream_is_an_engine_error(stream: list[str]) -> None:
    server = Server()
    server.stream = stream
    async with server.serve() as url, OpenAIChat(url) as chat:
        with pytest.raises(EngineError):
            await ask(chat)


@pytest.mark.parametrize(
    ("status", "error"), [(401, UserError), (404, UserError), (503, EngineError)]
)
async def test_statuses_become_errors_that_quote_the_server(
    status: int, error: type[Exception]
) -> None:
    server = Server()
    server.status = status
    async with server.serve() as url, OpenAIChat(url) as chat:
        with pytest.raises(error, match="no such thing"):
            await ask(chat)


async def test_a_silent_server_runs_into_the_deadline() -> None:
    server = Server()
    server.stream, server.hang = [chunk("a")], True
    async with server.serve() as url, OpenAIChat(url) as chat:
        with pytest.raises(DeadlineError):
            await ask(chat, deadline_s=0.3)


async def test_several_models_must_be_chosen_from() -> None:
    server = Server()
    server.models = ["a", "b"]
    async with server.serve() as url:
        with pytest.raises(UserError, match="a, b"):
            async with OpenAIChat(url):
                pass
        async with OpenAIChat(url, model="b") as chat:
            await ask(chat)
    assert server.bodies[0]["model"] == "b"


async def test_a_dead_server_is_named() -> None:
    with pytest.raises(EngineError, match="does not answer"):
        async with OpenAIChat("http://127.0.0.1:9/v1"):
            pass
    with pytest.raises(UserError, match="http://host:port"):
        OpenAIChat("localhost:8000")

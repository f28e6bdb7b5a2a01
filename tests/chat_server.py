"""An HTTP server with the two routes of an OpenAI-compatible endpoint, for fakes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


@asynccontextmanager
async def chat_server(models: Handler, complete: Handler) -> AsyncIterator[str]:
    """Serve /v1/models and /v1/chat/completions on a free port; yields the URL."""
    routes = [
        Route("/v1/models", models),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task

"""An OpenAI-compatible chat endpoint, for chat and evaluation only.

It exchanges text, so it is not a `Generator`: there are no token ids, logprobs or weight versions
to train on. Answers are streamed, and every wait has a deadline. A server that is down or fails
raises EngineError with the server's message; a wrong URL or key raises UserError.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.types import Finish, Message

CONNECT_DEADLINE_S = 10.0
IDLE_S = 2.0
"""Idle connections are closed earlier than servers do it (uvicorn: 5 s)."""
OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One assistant message. Token counts are the server's; 0 if it reports none."""

    text: str
    finish: Finish
    prompt_tokens: int = 0
    completion_tokens: int = 0


class OpenAIChat:
    """A client of `{url}/chat/completions`; use as an async context manager."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"--url {url!r}: expected http://host:port/v1 or https://...")
        if not self.url.endswith("/v1"):
            self.url += "/v1"
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_DEADLINE_S)  # reads: see `complete`
        limits = httpx.Limits(keepalive_expiry=IDLE_S)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    async def __aenter__(self) -> Self:
        try:
            await self._find_model()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int | None = None,
        deadline_s: float,
        on_text: OnText | None = None,
    ) -> ChatReply:
        """Request one assistant message; `on_text` receives its pieces as they arrive."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if seed is not None:
            body["seed"] = seed % 2**31
        try:
            async with asyncio.timeout(deadline_s):
                return await self._stream(body, on_text or (lambda _text: None))
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}: no answer within {deadline_s:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}: {type(error).__name__}: {error}") from error

    async def _stream(self, body: Mapping[str, Any], on_text: OnText) -> ChatReply:
        pieces: list[str] = []
        finish: str | None = None
        usage: Mapping[str, Any] = {}
        url = f"{self.url}/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            await self._raise_for_status(response)
            async for chunk in _events(response):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", [])[:1]:
                    finish = choice.get("finish_reason") or finish
                    if piece := (choice.get("delta") or {}).get("content"):
                        pieces.append(piece)
                        on_text(piece)
        if finish is None:
            raise EngineError(f"{self.url}: the stream ended before the message was complete")
        return ChatReply(
            "".join(pieces),
            Finish.LENGTH if finish == "length" else Finish.STOP,
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )

    async def _find_model(self) -> None:
        """Use the server's only model, unless one was named."""
        if self.model is not None:
            return
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                response = await self._http.get(f"{self.url}/models")
        except (TimeoutError, httpx.HTTPError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"{self.url} does not answer: {reason}") from error
        await self._raise_for_status(response)
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.url}/models: not an OpenAI-compatible response") from error
        if len(names) != 1:
            raise UserError(f"--served-model is required: {self.url} serves {', '.join(names)}")
        self.model = names[0]

    async def _raise_for_status(self, response: httpx.Response) -> None:
        """Raise UserError or EngineError for an error status, with the server's message."""
        if response.is_success:
            return
        detail = (await response.aread()).decode("utf-8", "replace")[:500]
        message = f"{response.request.url} answered {response.status_code}: {detail}"
        if response.status_code in (400, 401, 403, 404, 422):
            raise UserError(message)
        raise EngineError(message)


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise EngineError(f"the stream contains invalid JSON: {data[:200]}") from error
        if "error" in chunk:
            raise EngineError(f"the server failed during the response: {chunk['error']}")
        yield chunk

"""One vLLM server behind the router: its size, its load, and requests that pass through.

A server that refuses or breaks the connection, or does not accept one in time, raises EngineError.
A request on a connection that the server had closed while it was idle is sent again on another one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rstar2.engine.http import CONNECT_S, IDLE_S
from rstar2.engine.vllm_client import VllmClient
from rstar2.errors import EngineError, UserError
from rstar2.http_client import Address, Connections, HttpResponse
from rstar2.types import EngineCapacity, EngineLoad

CONTROL_S = 10.0
"""Deadline of a request for health, size or load."""


class Backend:
    """One server; `close` closes its connections."""

    def __init__(self, url: str, max_sequences: int) -> None:
        url = url.rstrip("/").removesuffix("/v1")
        self.address = Address.parse(url, None, "URL")
        self.name = f"{self.address.name}{self.address.prefix}"
        self.max_sequences = max_sequences
        self.life = 0
        """Counts how often it joined: an error of an earlier life says nothing about this one."""
        self.kv_tokens = 0
        self.trouble = "it was not asked yet"
        """Why it does not serve; empty while it does."""
        self._client = VllmClient(self.name, url=url)
        self._connections = Connections(
            self.address, EngineError, idle_s=IDLE_S, connect_s=CONNECT_S
        )

    async def capacity(self) -> EngineCapacity:
        """The size of its KV cache and its longest sequence, if it is well."""
        await self.health()
        try:
            models = await self._client.models(CONTROL_S)
        except UserError as error:
            raise UserError(
                f"{error}; if it wants a key, give it as http://token:KEY@{self.name}"
            ) from error
        gauges = await self._client.gauges(CONTROL_S)
        self.kv_tokens = gauges.blocks * gauges.block_tokens
        longest = max((model.max_model_len or 0 for model in models), default=0)
        return EngineCapacity(
            self.kv_tokens, self.max_sequences, longest or self.kv_tokens, gauges.block_tokens
        )

    async def load(self) -> EngineLoad:
        """Its current load."""
        gauges = await self._client.gauges(CONTROL_S)
        return gauges.load(self.kv_tokens, 0)

    async def health(self) -> None:
        """Raises EngineError or DeadlineError if it is not well."""
        await self._client.health(CONTROL_S)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpResponse]:
        """Send a request; yields its response, whose body is read inside. Leaving early cancels the
        request on the server."""
        if self.address.authorization:
            headers = {k: v for k, v in headers.items() if k != "authorization"}
        while True:
            async with self._connections.lease() as connection:
                try:
                    response = await connection.request(method, path, body, headers)
                except EngineError:
                    if connection.used == 1 or connection.closed:
                        raise
                    continue  # the server had closed an idle connection
                yield response
                return

    def disconnect(self) -> None:
        """Break all connections: every pending request fails with EngineError."""
        self._connections.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.aclose()
        await self._client.close()

"""Connection limits of engine clients: unlimited concurrency, short keep-alive.

A server closes a connection that has been idle for its keep-alive time (uvicorn, and so vLLM: 5 s).
A request sent at that moment gets no response, and the engine would look dead. So the client
closes idle connections earlier than the server.
"""

from __future__ import annotations

import httpx

IDLE_S = 2.0


def connections() -> httpx.Limits:
    """Connection limits without a cap on concurrent requests: the scheduler sets that."""
    return httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
    )

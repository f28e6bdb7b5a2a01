"""Connection limits of clients of engines: any number at once, closed soon after use.

A server closes a connection that has been idle for its keep-alive time (uvicorn, and so vLLM: 5 s).
A request sent at that moment is lost without an answer, and the engine would look dead. So the
client closes idle connections first.
"""

from __future__ import annotations

import httpx

IDLE_S = 2.0


def connections() -> httpx.Limits:
    """No bound on how many requests run at once: that is the scheduler's to decide."""
    return httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
    )

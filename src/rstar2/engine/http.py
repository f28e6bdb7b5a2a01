"""How our clients keep connections to engines: as many as there are turns, and none for long.

A server closes a connection that has been idle for its keep-alive time (uvicorn, and so vLLM: 5 s).
A request sent at that very moment is lost without an answer, and its engine would pass for dead. So
we let go first.
"""

from __future__ import annotations

import httpx

IDLE_S = 2.0


def connections() -> httpx.Limits:
    """No bound on how many requests run at once: that is the scheduler's to decide."""
    return httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
    )

"""Measure a code environment through its client: calls per second and latency."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.types import Limits, Outcome

PROGRAMS: Mapping[str, str] = {
    "print": "print(1+1)",
    "sympy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))",
    "numpy": "import numpy as np\nm = np.cos(np.outer(np.arange(1, 21), np.arange(20)))\n"
    "print(np.linalg.norm(np.linalg.inv(m.T @ m + np.eye(20))), np.linalg.svd(m)[1][:3])",
    "exception": "1/0",
}
"""None of them is part of the zygote's warm-up; a test checks it."""


def quantile(values: list[float], q: float) -> float:
    """The q-quantile of unsorted values by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def measure(
    client: CodeEnvClient, code: str, seconds: float, concurrency: int
) -> dict[str, float]:
    """Keep `concurrency` calls in flight for a while; figures of the calls that ended."""
    loop = asyncio.get_running_loop()
    numbers = itertools.count()
    run_id = secrets.token_hex(4)
    latencies: list[float] = []
    lost = 0
    end = loop.time() + seconds

    async def caller() -> None:
        nonlocal lost
        while (start := loop.time()) < end:
            call_id = f"bench-{run_id}-{next(numbers)}"
            result = await client.run(
                RunRequest(call_id, code, limits=Limits(wall_s=10.0, cpu_s=10.0), deadline_s=60.0)
            )
            latencies.append(loop.time() - start)
            lost += result.outcome is Outcome.INFRASTRUCTURE

    started = loop.time()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    elapsed = loop.time() - started
    return {
        "calls_per_s": len(latencies) / elapsed,
        "p50_ms": 1000 * quantile(latencies, 0.5),
        "p99_ms": 1000 * quantile(latencies, 0.99),
        "calls": len(latencies),
        "infrastructure": lost,
    }

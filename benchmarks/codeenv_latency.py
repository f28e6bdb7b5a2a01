"""Latency of calls that arrive as in a training step, at 50, 80 and 95% of the measured capacity.

    python benchmarks/codeenv_latency.py [--seconds 30] [--quick] [--json]

Rollouts of one engine step end their turns together, so calls arrive in bursts: here a burst of
`--burst` calls at a time, at exponentially distributed intervals. Most programs are small, a tenth
use NumPy, a tenth SymPy, a few fail. Capacity is measured first, with callers that never pause. The
latency of a call counts from its submission, also while it waits in the client. The paper reports a
mean of 0.3 s at up to 45,000 calls per step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time

from common import Row, arguments, finish, say
from rstar2.codeenv.client.bench import PROGRAMS, quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.jail import warmup
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome

PAPER_MEAN_S = 0.3
SHARES = {"print": 0.7, "numpy": 0.1, "sympy": 0.1, "exception": 0.1}
LOADS = (0.5, 0.8, 0.95)
WARM_S = 180.0


class Load:
    """Sends programs of the mix and keeps their latencies."""

    def __init__(self, client: CodeEnvClient, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.latencies: list[float] = []

    async def call(self) -> None:
        """One call; one that is lost to infrastructure ends the benchmark."""
        (name,) = self.random.choices(list(SHARES), weights=list(SHARES.values()))
        start = time.perf_counter()
        request = RunRequest(
            f"latency-{next(self.numbers)}",
            PROGRAMS[name],
            limits=Limits(wall_s=30.0, cpu_s=30.0),
            deadline_s=600.0,
        )
        result = await self.client.run(request)
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise SystemExit(f"a call was lost: {result.message}")
        self.latencies.append(time.perf_counter() - start)

    async def capacity(self, seconds: float) -> float:
        """Calls per second with 64 callers that never pause."""
        end = time.perf_counter() + seconds
        before = len(self.latencies)

        async def caller() -> None:
            while time.perf_counter() < end:
                await self.call()

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(64)))
        return (len(self.latencies) - before) / (time.perf_counter() - start)

    async def replay(self, rate: float, burst: int, seconds: float) -> list[float]:
        """Latencies of bursts that arrive at this rate of calls per second, on average."""
        self.latencies.clear()
        calls = []
        clock = start = time.perf_counter()
        while clock < start + seconds:
            calls += [asyncio.create_task(self.call()) for _ in range(burst)]
            clock += self.random.expovariate(rate / burst)
            await asyncio.sleep(max(0.0, clock - time.perf_counter()))
        await asyncio.gather(*calls)
        return list(self.latencies)


async def measure(args: argparse.Namespace) -> int:
    async with await CodeEnvClient.start(CodeEnvConfig(slots=args.slots)) as client:
        deadline = time.monotonic() + WARM_S
        while set(client.endpoints[0].health.warm) != set(warmup.FLAVOURS):
            if time.monotonic() > deadline:
                raise SystemExit(f"the code environment was not warm in {WARM_S:.0f} s")
            await asyncio.sleep(0.2)
        load = Load(client, args.seed)
        await load.capacity(min(3.0, args.seconds))  # workers are made on first use
        capacity = await load.capacity(args.seconds / 2)
        say(f"  capacity {capacity:.0f} calls/s")
        rows = [Row("capacity", capacity, unit="calls/s")]
        for share in LOADS:
            latencies = await load.replay(share * capacity, args.burst, args.seconds)
            say(f"  {share:.0%}: {len(latencies)} calls")
            mean = sum(latencies) / len(latencies)
            target = "< 1" if share < 0.9 else None
            name = f"{share:.0%} of capacity"
            rows.append(Row(f"{name}, mean", mean, PAPER_MEAN_S, target, "s", "paper's mean"))
            rows.append(Row(f"{name}, p99", quantile(latencies, 0.99), unit="s"))
        notes = {"isolation": client.isolation, "burst": args.burst}
    return finish("code environment, latency of a step's arrivals", rows, args, notes)


def main() -> int:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="Duration of each load.")
    parser.add_argument("--burst", type=int, default=16, help="Calls that arrive together.")
    parser.add_argument(
        "--slots", type=int, default=0, help="Slots of the server; 0 means one per core, plus one."
    )
    args = parser.parse_args()
    if args.quick:
        args.seconds = min(args.seconds, 6.0)
    return asyncio.run(measure(args))


if __name__ == "__main__":
    sys.exit(main())

"""45,000 calls submitted at once by one client: all answered, memory bounded on both sides.

    python benchmarks/codeenv_flood.py [--calls 45000] [--quick] [--json]

One training step of the paper makes up to 45,000 tool calls. Here all of them are submitted in one
go; the client keeps a bounded number in flight, so the server's queue and both memories stay small.
Latency counts from submission, so its mean is about half of the whole time by construction; the
mean time on the server (queue and execution) is shown beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path

from common import Row, arguments, finish, say
from rstar2.codeenv.client.bench import quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Outcome, ToolResult


def rss_mb(pid: int | str = "self") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


async def flood(args: argparse.Namespace) -> int:
    client = await CodeEnvClient.start(CodeEnvConfig(slots=args.slots))
    owned = client.endpoints[0].owned
    assert isinstance(owned, LocalServer)
    assert owned.pid is not None
    server = owned.pid
    before, server_before = rss_mb(), rss_mb(server)
    latencies: list[float] = []
    on_server: list[float] = []
    bad: list[ToolResult] = []
    peak = deepest = 0.0

    async def one(number: int) -> None:
        start = time.perf_counter()
        request = RunRequest(f"flood-{number}", f"print({number} * 7)", deadline_s=args.deadline)
        result = await client.run(request)
        latencies.append(time.perf_counter() - start)
        on_server.append(result.queue_s + result.wall_s)
        if result.outcome is not Outcome.OK or result.stdout != f"{number * 7}\n":
            bad.append(result)

    async def watch() -> None:
        nonlocal peak, deepest
        while True:
            peak = max(peak, rss_mb(server))
            deepest = max(deepest, client.endpoints[0].outstanding)
            say(f"  {len(latencies)}/{args.calls} answered, server {peak:.0f} MB")
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    start = time.perf_counter()
    try:
        await asyncio.gather(*(one(number) for number in range(args.calls)))
        elapsed = time.perf_counter() - start
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()
    for result in bad[:5]:
        say(f"  {result}")
    client_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [
        Row("answered rightly", args.calls - len(bad), args.calls, ">= 1", "calls"),
        Row("rate", args.calls / elapsed, unit="calls/s"),
        Row("latency, mean", sum(latencies) / len(latencies), unit="s"),
        Row("latency, p99", quantile(latencies, 0.99), unit="s"),
        Row("on the server, mean", 1000 * sum(on_server) / len(on_server), unit="ms"),
        Row("on the server, p99", 1000 * quantile(on_server, 0.99), unit="ms"),
        Row("in flight at most", deepest, None, "<= 4096", "calls"),
        Row("client memory per call", 1024 * (client_peak - before) / args.calls, None, "< 16",
            "KB"),
        Row("server memory growth", peak - server_before, None, "< 100", "MB"),
    ]  # fmt: skip
    notes = {"isolation": client.isolation, "client_mb": round(client_peak)}
    return finish("code environment, flood", rows, args, notes)


def main() -> int:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=45_000)
    parser.add_argument(
        "--slots", type=int, default=0, help="Slots of the server; 0 means one per core, plus one."
    )
    parser.add_argument(
        "--deadline", type=float, default=3600.0, help="Deadline of each call, in seconds."
    )
    args = parser.parse_args()
    if args.quick:
        args.calls = min(args.calls, 3000)
    return asyncio.run(flood(args))


if __name__ == "__main__":
    sys.exit(main())

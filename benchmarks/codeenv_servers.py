"""Several servers behind one client, each pinned to its share of the cores: how rates add up.

    python benchmarks/codeenv_servers.py [--servers 2] [--seconds 10] [--quick] [--json]

Measures 1, 2, ... servers, one core each; the client has no core of its own here, as on a node
whose cores all serve. Prints calls per second, the rate relative to one server, and the CPU time
that the client itself needs per call. From the last two follows what 45,000 calls per second take:
that many servers, and that many cores for clients (one client is one process on one core).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

from common import Row, arguments, finish, say
from rstar2.codeenv.client.bench import PROGRAMS
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.jail import warmup
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome

PLANNED = 45_000
WARM_S = 180.0


class PinnedServer:
    """A server process on one core."""

    def __init__(self, core: int) -> None:
        command = [
            sys.executable, "-c", "from rstar2.cli import main; main()",
            "codeenv", "serve", "--port", "0", "--json",
        ]  # fmt: skip
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})  # inherited by the server and all its processes
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        finally:
            os.sched_setaffinity(0, allowed)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a server could not start; its message is above")
        self.url: str = json.loads(line)["url"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


async def rate(urls: list[str], seconds: float) -> tuple[float, float]:
    """Calls per second, and milliseconds of the client's CPU time per call."""
    numbers = itertools.count()
    async with await CodeEnvClient.start(CodeEnvConfig(urls=tuple(urls))) as client:
        deadline = time.monotonic() + WARM_S
        while any(
            set(endpoint.health.warm) != set(warmup.FLAVOURS) for endpoint in client.endpoints
        ):
            if time.monotonic() > deadline:
                raise SystemExit(f"the servers were not warm in {WARM_S:.0f} s")
            await asyncio.sleep(0.2)
        done = 0
        end = 0.0

        async def caller() -> None:
            nonlocal done
            while time.perf_counter() < end:
                result = await client.run(
                    RunRequest(
                        f"s{next(numbers)}",
                        PROGRAMS["print"],
                        limits=Limits(wall_s=10.0),
                        deadline_s=600.0,
                    )
                )
                if result.outcome is Outcome.INFRASTRUCTURE:
                    raise SystemExit(f"a call was lost: {result.message}")
                done += 1

        for length in (min(2.0, seconds), seconds):  # workers are made on first use
            done, start, cpu = 0, time.perf_counter(), time.process_time()
            end = start + length
            await asyncio.gather(*(caller() for _ in range(48 * len(urls))))
        return done / (time.perf_counter() - start), 1000 * (time.process_time() - cpu) / done


def main() -> int:
    cores = sorted(os.sched_getaffinity(0))
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--servers", type=int, default=min(4, len(cores)), help="At most.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Duration of each measurement.")
    args: argparse.Namespace = parser.parse_args()
    if args.servers > len(cores):
        raise SystemExit(f"--servers {args.servers}: this process may use {len(cores)} cores")
    if args.quick:
        args.seconds = min(args.seconds, 4.0)
    rows: list[Row] = []
    with ExitStack() as stack:
        servers = []
        for core in cores[: args.servers]:
            server = PinnedServer(core)
            stack.callback(server.close)
            servers.append(server)
        single = client_ms = 0.0
        for count in range(1, len(servers) + 1):
            urls = [server.url for server in servers[:count]]
            calls, client_ms = asyncio.run(rate(urls, args.seconds))
            say(f"  {count}: {calls:.0f} calls/s")
            single = single or calls
            name = f"{count} server{'s' if count > 1 else ''}"
            rows.append(Row(name, calls, single, None, "calls/s", "1 server"))
            rows.append(Row(f"{name}, client's CPU per call", client_ms, None, "< 1", "ms"))
    rows.append(Row(f"servers of one core for {PLANNED} calls/s", PLANNED / single))
    rows.append(Row(f"cores of clients for {PLANNED} calls/s", PLANNED * client_ms / 1000))
    return finish("code environment, several servers", rows, args)


if __name__ == "__main__":
    sys.exit(main())

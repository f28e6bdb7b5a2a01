"""Many sessions on one server, and branches of one: time, memory, and every answer checked.

    python benchmarks/codeenv_sessions.py [--sessions 1000] [--branches 20] [--isolation strict]
                                          [--quick] [--json]

Sessions are opened one after another through the client; then each gets two calls. Memory is the
proportional set size (PSS) of all processes of the server, before and after: a page that n
processes share counts 1/n for each. Kernel memory (page tables, namespaces, control groups) is not
part of PSS, so the change of the machine's available memory is shown as well; run nothing else. The
peer is a Python process per session that has imported NumPy and SymPy, as the sessions have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from common import Row, arguments, finish, say
from rstar2.codeenv.client.bench import quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.client.session import CodeSession
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits

PATIENT = Limits(wall_s=60.0, cpu_s=60.0)
PEER = "import numpy, sympy, sys; print(1, flush=True); sys.stdin.read()"


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    pids, todo = [], [pid]
    while todo:
        pids.append(todo.pop())
        todo += parents.get(pids[-1], [])
    return pids


def pss_mb(pids: list[int]) -> float | None:
    """PSS of processes; None if this user may not read that of every one."""
    total_kb = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            return None
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/meminfo has no MemAvailable")


async def timed(times_s: list[float], work: Awaitable[object]) -> object:
    start = time.perf_counter()
    result = await work
    times_s.append(time.perf_counter() - start)
    return result


def peers(count: int) -> tuple[float, float | None]:
    """Seconds to start a Python process with the same imports, and its PSS in MB."""
    start = time.perf_counter()
    processes = []
    for _ in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        processes.append(process)
    start_s = (time.perf_counter() - start) / count
    memory = pss_mb([process.pid for process in processes])
    for process in processes:
        process.communicate(b"", timeout=60)
    return start_s, None if memory is None else memory / count


class SessionBench:
    """Opens the sessions and collects what is measured."""

    def __init__(self, client: CodeEnvClient, server: int, args: argparse.Namespace) -> None:
        self.client, self.server, self.args = client, server, args
        self.wrong: list[str] = []
        self.rows: list[Row] = []

    def add(self, case: str, times_s: list[float], peer_s: float | None = None) -> None:
        mean_ms = 1e3 * sum(times_s) / len(times_s)
        peer = None if peer_s is None else 1e3 * peer_s
        self.rows.append(Row(f"{case}: mean", mean_ms, peer, unit="ms", against="process"))
        self.rows.append(Row(f"{case}: p99", 1e3 * quantile(times_s, 0.99), unit="ms"))

    async def check(self, session: CodeSession, code: str, expected: str | None) -> None:
        result = await session.run(code, limits=PATIENT)
        if not result.outcome.succeeded or result.value != expected:
            self.wrong.append(f"{code!r}: {result.outcome} {result.value!r} {result.message}")

    async def each(self, name: str, many: list[CodeSession], code: Callable[[int], str],
                   value: Callable[[int], str | None]) -> None:  # fmt: skip
        times_s: list[float] = []
        for number, session in enumerate(many):
            await timed(times_s, self.check(session, code(number), value(number)))
        self.add(name, times_s)

    async def run(self) -> None:
        args = self.args
        peer_s, peer_mb = peers(2 if args.quick else 8)
        say("opening sessions")
        before_mb, before_available_mb = pss_mb(tree(self.server)), available_mb()
        sessions: list[CodeSession] = []
        times_s: list[float] = []
        for _ in range(args.sessions):
            session = await timed(times_s, self.client.open(ttl_s=args.ttl_s))
            assert isinstance(session, CodeSession)
            sessions.append(session)
        self.add(f"open one of {args.sessions}", times_s, peer_s)
        self.memory("open", before_mb, before_available_mb, peer_mb)
        await self.each("first call", sessions, lambda n: f"x = {n}", lambda n: None)
        await self.each("second call", sessions, lambda n: "x", str)
        self.memory("after two calls", before_mb, before_available_mb, peer_mb)
        say("branching")
        await self.check(sessions[0], "y = list(range(100_000))\nopen('f', 'w').write('z')\n", "1")
        times_s, branches = [], []
        for _ in range(args.branches):
            branch = await timed(times_s, sessions[0].branch())
            assert isinstance(branch, CodeSession)
            branches.append(branch)
        self.add(f"branch one of {args.branches}", times_s)
        await self.each(
            "call in a branch", branches,
            lambda n: f"x += {n}; open('f').read() + str(x + len(y))",
            lambda n: f"'z{100_000 + n}'",
        )  # fmt: skip
        await self.check(sessions[0], "x", "0")
        say("closing")
        times_s = []
        for session in (*branches, *sessions):
            await timed(times_s, session.close())
        self.add("close", times_s)

    def memory(
        self, name: str, before_mb: float | None, available_before_mb: float, peer: float | None
    ) -> None:
        after_mb, count = pss_mb(tree(self.server)), self.args.sessions
        if before_mb is not None and after_mb is not None:
            each = (after_mb - before_mb) / count
            self.rows.append(
                Row(f"PSS per session, {name}", each, peer, unit="MB", against="process")
            )
        taken = (available_before_mb - available_mb()) / count
        self.rows.append(Row(f"machine memory per session, {name}", taken, unit="MB"))


async def main(args: argparse.Namespace) -> int:
    config = CodeEnvConfig(
        isolation=args.isolation, slots=1, sessions=args.sessions + args.branches,
        session_ttl_s=args.ttl_s,
    )  # fmt: skip
    async with await CodeEnvClient.start(config) as client:
        owned = client.endpoints[0].owned
        assert isinstance(owned, LocalServer)
        assert owned.pid is not None
        while len(client.endpoints[0].health.warm) < 2:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.2)
        bench = SessionBench(client, owned.pid, args)
        await bench.run()
        isolation = client.isolation
    for text in bench.wrong[:5]:
        say(f"wrong: {text}")
    bench.rows.append(Row("wrong answers", len(bench.wrong), target="== 0"))
    return finish("codeenv sessions", bench.rows, args, {"isolation": isolation})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--branches", type=int, default=20)
    parser.add_argument("--isolation", default="auto", choices=("auto", "strict", "portable"))
    parser.add_argument("--ttl-s", type=float, default=3600.0)
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.branches = min(options.sessions, 50), min(options.branches, 5)
    sys.exit(asyncio.run(main(options)))

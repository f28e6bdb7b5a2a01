"""A long mixed load while processes are killed: no call lost, swapped or executed twice.

    python benchmarks/codeenv_soak.py --calls 50000 [--quick] [--json] [--no-bombs]
    python benchmarks/codeenv_soak.py --isolation portable --user 65534
    python tests/attacks/cell.py user benchmarks/codeenv_soak.py --isolation strict

5% of the calls never end, 2% allocate too much memory, 1% are fork bombs; every other call has a
result that only its own id can give. During the load, random workers and zygotes are killed with
-9, and once, in the middle, the server itself (the client that owns it restarts it). At the end
the server is closed, and the benchmark looks for processes and files that it left.

`--user` starts everything as an ordinary user, who has no control groups. That user must be able to
read the interpreter; where it is installed in root's home directory, the third command runs the
soak as an ordinary user in a disposable cell.

Fork bombs run inside the jail only. `--no-bombs` omits them where the jail is not trusted yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import Row, arguments, finish, say
from rstar2.codeenv.client.bench import quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

ENDLESS, MEMORY, BOMB, NORMAL = "endless", "memory", "fork bomb", "normal"
SHARES = {ENDLESS: 0.05, MEMORY: 0.02, BOMB: 0.01}
PROGRAMS = {
    ENDLESS: "n = {n}\nwhile True: n += 1",
    MEMORY: "n = {n}\nblocks = []\nwhile True: blocks.append(bytearray(1 << 24))",
    BOMB: "import os\nn = {n}\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}
FITTING = {
    NORMAL: {Outcome.OK},
    ENDLESS: {Outcome.TIMEOUT},
    MEMORY: {Outcome.MEMORY, Outcome.EXCEPTION, Outcome.KILLED},
    BOMB: {Outcome.TIMEOUT, Outcome.MEMORY, Outcome.KILLED, Outcome.EXCEPTION},
}
LIMITS = Limits(wall_s=0.5, cpu_s=0.5, memory_mb=256)
PATIENT = Limits(wall_s=60.0, cpu_s=60.0, memory_mb=256)
"""For calls that must end by another limit than time, on a busy machine too."""
CONCURRENCY = 128


@dataclass
class Tally:
    """The results of the calls."""

    answers: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unfitting: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    attempts: int = 0

    def add(self, number: int, kind: str, result: ToolResult, latency_s: float) -> None:
        self.answers[number] += 1
        self.outcomes[f"{kind}: {result.outcome}"] += 1
        self.latencies.append(latency_s)
        self.attempts += result.attempts
        if result.outcome is Outcome.INFRASTRUCTURE:
            self.lost.append(f"{number}: {result.message}")
        elif result.call_id != f"soak-{number}":
            self.wrong.append(f"{number} got {result.call_id}")
        elif result.outcome not in FITTING[kind]:
            self.unfitting.append(f"{number} ({kind}): {result.outcome} {result.message}")
        elif kind == NORMAL and result.stdout != expected(number):
            self.wrong.append(f"{number} printed {result.stdout!r}")


def expected(number: int) -> str:
    return f"{number} {number * number % 9973}\n"


def program(number: int, kind: str) -> str:
    if kind == NORMAL:
        return f"print({number}, {number} * {number} % 9973)"
    return PROGRAMS[kind].format(n=number)


def kinds(calls: int, bombs: bool, rng: random.Random) -> list[str]:
    """Exactly the stated shares, shuffled."""
    wanted = {kind: round(calls * share) for kind, share in SHARES.items()}
    if not bombs:
        wanted[BOMB] = 0
    mix = [kind for kind, count in wanted.items() for _ in range(count)]
    mix += [NORMAL] * (calls - len(mix))
    rng.shuffle(mix)
    return mix


# --------------------------------------------------------------------------- processes


def children(pid: int) -> list[int]:
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)]]


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def family(pid: int) -> set[tuple[int, str]]:
    """A process and its descendants, each with its start time."""
    processes, todo = set(), [pid]
    while todo:
        one = todo.pop()
        stat = _stat(one)
        if stat and stat[0] != "Z":
            processes.add((one, stat[19]))
        todo += children(one)
    return processes


def alive(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    living = {(pid, s[19]) for pid, _ in processes if (s := _stat(pid)) and s[0] != "Z"}
    return living & processes


def memory_mb(pids: list[int]) -> float:
    """Proportional memory of processes: pages that forks share are counted once."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def traces(pids: set[int]) -> list[Path]:
    """Runtime directories and control groups of these servers."""
    roots = (Path(tempfile.gettempdir()), Path("/sys/fs/cgroup"))
    paths = [p for root in roots for glob in ("rstar2-codeenv-*", "*/rstar2-codeenv-*")
             for p in root.glob(glob)]  # fmt: skip
    return [p for p in paths if any(p.name.startswith(f"rstar2-codeenv-{pid}-") for pid in pids)]


# --------------------------------------------------------------------------- the soak


class Soak:
    """The load, the killer and the watcher, side by side."""

    def __init__(self, client: CodeEnvClient, mix: list[str], rng: random.Random) -> None:
        self.client = client
        self.mix = mix
        self.rng = rng
        self.tally = Tally()
        self.killed: Counter[str] = Counter()
        self.servers: set[int] = set()
        self.seen: set[tuple[int, str]] = set()
        self.memory: list[tuple[int, float, float]] = []
        """(server's pid, its memory, memory of it and its zygotes), in MB, over time."""

    def server(self) -> int | None:
        owned = self.client.endpoints[0].owned
        assert isinstance(owned, LocalServer)
        return owned.pid if owned.running and self.client.endpoints[0].healthy else None

    async def load(self) -> None:
        todo = iter(enumerate(self.mix))

        async def caller() -> None:
            for number, kind in todo:
                limits = LIMITS if kind in (ENDLESS, BOMB) else PATIENT
                request = RunRequest(
                    f"soak-{number}", program(number, kind), limits=limits, deadline_s=600.0
                )
                start = time.perf_counter()
                result = await self.client.run(request)
                self.tally.add(number, kind, result, time.perf_counter() - start)

        await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))

    async def kill(self, every: int) -> None:
        """kill -9 a random worker every `every` calls, each tenth time a zygote, once the server.

        By calls and not by time, so that a slow machine is not killed faster than it can start.
        """
        due = every
        while True:
            await asyncio.sleep(0.02)
            done, server = len(self.tally.latencies), self.server()
            if server is None or done < due:
                continue
            zygotes = children(server)
            workers = [worker for zygote in zygotes for worker in children(zygote)]
            if not self.killed["server"] and done > len(self.mix) // 2:
                hit = self._kill("server", server)
            elif sum(self.killed.values()) % 10 == 1:
                hit = bool(zygotes) and self._kill("zygote", self.rng.choice(zygotes))
            else:
                hit = bool(workers) and self._kill("worker", self.rng.choice(workers))
            due = done + every if hit else due

    def _kill(self, name: str, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[name] += 1
        return True

    async def watch(self) -> None:
        """Memory and process ids of the server, every second; progress on stderr."""
        started = time.perf_counter()
        while True:
            server = self.server()
            if server is not None:
                self.servers.add(server)
                self.seen |= await asyncio.to_thread(family, server)
                own = await asyncio.to_thread(memory_mb, [server])
                zygotes = await asyncio.to_thread(memory_mb, children(server))
                self.memory.append((server, own, own + zygotes))
            done, elapsed = len(self.tally.latencies), time.perf_counter() - started
            shown = f"{self.memory[-1][2]:.0f} MB" if self.memory else ""
            say(f"  {done}/{len(self.mix)} calls, {done / max(elapsed, 0.1):.0f}/s, {shown}, "
                f"killed {dict(self.killed)}")  # fmt: skip
            await asyncio.sleep(1.0 if done < 1000 else 3.0)

    def growth_mb(self, column: int) -> float:
        """Memory growth of the last server from its warm-up to its end."""
        last = [sample[column] for sample in self.memory if sample[0] == self.memory[-1][0]]
        warm, end = last[len(last) // 4 : len(last) // 2], last[-max(1, len(last) // 4) :]
        if not warm:
            return 0.0
        return max(end) - max(warm)  # a zygote that was just killed is missing from some samples


async def soak(args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    mounts_before = mounts()
    config = CodeEnvConfig(slots=args.slots, isolation=args.isolation)
    client = await CodeEnvClient.start(config)
    run = Soak(client, kinds(args.calls, args.bombs, rng), rng)
    started = time.perf_counter()
    helpers = [asyncio.create_task(run.watch()), asyncio.create_task(run.kill(args.kill_every))]
    try:
        await run.load()
    finally:
        for helper in helpers:
            helper.cancel()
        ended = await asyncio.gather(*helpers, return_exceptions=True)
        await client.close()
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            raise RuntimeError("a helper of the soak failed") from error
    elapsed = time.perf_counter() - started
    left = await _left(run.seen)
    for text in (*run.tally.lost[:5], *run.tally.wrong[:5], *run.tally.unfitting[:5], *left):
        say(f"  {text}")
    return finish("code environment, soak", _rows(run, args, elapsed, left, mounts_before), args, {
        "isolation": client.isolation, "uid": os.geteuid(), "outcomes": dict(run.tally.outcomes),
        "killed": dict(run.killed), "retries": dict(client.stats.retries),
    })  # fmt: skip


async def _left(seen: set[tuple[int, str]]) -> list[str]:
    """Processes of the server that still run half a minute after its end."""
    for _ in range(300):
        if not alive(seen):
            return []
        await asyncio.sleep(0.1)
    return [f"process {pid} is left" for pid, _ in alive(seen)]


def _rows(
    run: Soak, args: argparse.Namespace, elapsed: float, left: list[str], mounts_before: int
) -> list[Row]:
    tally = run.tally
    answered = sum(1 for count in tally.answers.values() if count >= 1)
    return [
        Row("calls", args.calls, unit="calls"),
        Row("rate", args.calls / elapsed, unit="calls/s"),
        Row("lost", args.calls - answered + len(tally.lost), target="== 0"),
        Row("mixed up", len(tally.wrong), target="== 0"),
        Row("duplicated", sum(count - 1 for count in tally.answers.values()), target="== 0"),
        Row("wrongly judged", len(tally.unfitting), target="== 0"),
        Row("attempts a call", tally.attempts / args.calls),
        Row("workers killed", run.killed["worker"], target="> 0"),
        Row("zygotes killed", run.killed["zygote"], target="> 0"),
        Row("servers killed", run.killed["server"], target="== 1"),
        Row("memory growth, server", run.growth_mb(1), target="< 32", unit="MB"),
        # In a short run the second server's zygotes are still warming up.
        Row("memory growth, with zygotes", run.growth_mb(2),
            target="< 64" if args.calls >= 10_000 else None, unit="MB"),
        Row("latency p50", 1000 * quantile(tally.latencies, 0.5), unit="ms"),
        Row("latency p99", 1000 * quantile(tally.latencies, 0.99), unit="ms"),
        Row("processes left", len(left), target="== 0"),
        Row("mounts left", mounts() - mounts_before, target="<= 0"),
        Row("files and control groups left", len(traces(run.servers)), target="== 0"),
    ]  # fmt: skip


def become(uid: int) -> None:
    """Give up root for an ordinary user who can read the interpreter."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if not os.access(sys.executable, os.X_OK):
        sys.exit(f"--user {uid}: this user cannot execute {sys.executable}; use a cell (see above)")


def main() -> int:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument(
        "--slots", type=int, default=0, help="Slots of the server; 0 means one per core, plus one."
    )
    parser.add_argument(
        "--kill-every", type=int, default=100, help="Number of calls between two kills."
    )
    parser.add_argument("--no-bombs", dest="bombs", action="store_false")
    parser.add_argument(
        "--isolation",
        choices=("auto", "strict", "portable"),
        default="auto",
        help="Isolation level of the server.",
    )
    parser.add_argument(
        "--user", type=int, metavar="UID", help="Run as this ordinary user; needs root."
    )
    args = parser.parse_args()
    if args.user is not None:
        become(args.user)
    if args.quick:
        args.calls = min(args.calls, 2000)
    return asyncio.run(soak(args))


if __name__ == "__main__":
    sys.exit(main())

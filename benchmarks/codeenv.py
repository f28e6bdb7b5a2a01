"""Calls per second on one pinned core: this server, a process per call, and a bare fork.

    python benchmarks/codeenv.py [--quick] [--json] [--core N] [--as-release]
        [--code-judge URL] [--sandbox-fusion URL]

Everything runs on the one core: the benchmark, the batching client, the HTTP server, the workers
and the jailed programs. `subprocess` starts `python -c` per call. The floor is the lowest cost
of any design on this machine: os.fork of an interpreter with NumPy and SymPy imported, exec of the
program, _exit, waitpid; no jail, no limits, no HTTP. The server's warm-up has not seen the
programs measured here (checked below), and of the functions in "sympy, other" it has called none.
Rates are those of a busy server: every measurement of each variant starts with a few calls that are
not timed.

--as-release sends every program, to all variants, as the paper's client does. A peer is a running
server on the same core; see codeenv_peers.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from codeenv_peers import CodeJudge, SandboxFusion, as_release
from common import Row, arguments, finish, interleave, median, say
from rstar2.codeenv.client.bench import PROGRAMS as BENCH_PROGRAMS
from rstar2.codeenv.client.bench import quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.jail import warmup
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome

PROGRAMS = {
    **BENCH_PROGRAMS,
    "sympy, other": "import sympy\nx = sympy.symbols('x')\n"
    "print(sympy.decompose(x**4 + 2*x**2 + 5), sympy.sturm(x**3 - 3*x + 1))\n"
    "print(sympy.intervals(x**2 - 3), sympy.Poly(x**5 - x - 1).shift(2))",
}
ENDLESS = "while True: pass"
LIMITS = Limits(wall_s=1.0, cpu_s=1.0)
WARM_S = 120.0
SLOTS = 2
"""One per core, plus one."""
TARGETS = {"print": ">= 5", "sympy": ">= 30", "numpy": ">= 20"}
PEER_TARGETS = {"print": ">= 12", "sympy": ">= 30", "sympy, other": ">= 20", "numpy": ">= 30"}
"""Times code-judge."""
COUNTS = {
    "print": 400, "sympy": 80, "sympy, other": 80, "numpy": 160, "exception": 300,
    "5% endless": 120,
}  # fmt: skip
SUBPROCESS_COUNTS = {
    "print": 24, "sympy": 2, "sympy, other": 2, "numpy": 4, "exception": 16, "5% endless": 20,
}  # fmt: skip
PEER_COUNTS = {"print": 40, "sympy": 4, "sympy, other": 4, "numpy": 10}
FLOOR_COUNTS = {"print": 300, "sympy": 60, "sympy, other": 60, "numpy": 120, "exception": 200}


def programs(case: str, count: int, seed: int) -> list[str]:
    """The programs of one measurement; the mix has exactly 5% endless loops, shuffled."""
    if case != "5% endless":
        return [PROGRAMS[case]] * count
    mix = [ENDLESS] * max(1, count // 20)
    mix += [PROGRAMS["print"]] * (count - len(mix))
    random.Random(seed).shuffle(mix)
    return mix


class Ours:
    """The server through its client, as a trainer uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.numbers = itertools.count()
        self.latencies: dict[str, list[float]] = {}
        self.client = loop.run_until_complete(CodeEnvClient.start(CodeEnvConfig(slots=SLOTS)))
        self.wait_until_warm()

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())

    def wait_until_warm(self) -> None:
        """Wait until no interpreter is being warmed up in the background."""
        deadline = time.monotonic() + WARM_S
        while set(self.client.endpoints[0].health.warm) != set(warmup.FLAVOURS):
            if time.monotonic() > deadline:
                raise SystemExit(f"the code environment was not warm in {WARM_S:.0f} s")
            self.loop.run_until_complete(asyncio.sleep(0.2))

    async def call(self, code: str) -> float:
        """One call; its latency in seconds. A call lost to infrastructure ends the benchmark."""
        start = time.perf_counter()
        result = await self.client.run(
            RunRequest(f"b{next(self.numbers)}", code, limits=LIMITS, deadline_s=120.0)
        )
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise SystemExit(f"a call was lost: {result.message}")
        return time.perf_counter() - start

    def rate(self, case: str, seed: int) -> float:
        """Calls per second with 32 callers that never pause."""

        async def main() -> float:
            await asyncio.gather(*(self.call(PROGRAMS.get(case, "1")) for _ in range(32)))
            todo = iter(programs(case, COUNTS[case], seed))
            latencies = self.latencies.setdefault(case, [])

            async def caller() -> None:
                for code in todo:
                    latencies.append(await self.call(code))

            start = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(32)))
            return COUNTS[case] / (time.perf_counter() - start)

        return self.loop.run_until_complete(main())

    def unloaded(self, case: str, count: int) -> list[float]:
        """Latencies of calls made one after the other."""

        async def main() -> list[float]:
            return [await self.call(PROGRAMS[case]) for _ in range(count)]

        return self.loop.run_until_complete(main())

    def beside_endless(self) -> float:
        """The longest latency of small calls while an endless loop occupies a slot, in seconds."""

        async def main() -> float:
            endless = asyncio.create_task(self.call(ENDLESS))
            await asyncio.sleep(0.05)
            worst = 0.0
            while not endless.done():
                worst = max(worst, await self.call(PROGRAMS["print"]))
            return worst

        return self.loop.run_until_complete(main())


def subprocess_rate(case: str, seed: int) -> float:
    """Calls per second with a new Python process per call, four at a time."""

    def run(code: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMITS.wall_s)

    def unlimited(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], capture_output=True)

    todo = programs(case, SUBPROCESS_COUNTS[case], seed)
    unlimited(PROGRAMS.get(case, "1"))
    start = time.perf_counter()
    # A process that imports SymPy needs longer than the limit of the mix on a busy core.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run if case == "5% endless" else unlimited, todo))
    return len(todo) / (time.perf_counter() - start)


FLOOR = """
import gc, os, sys, time
import numpy, sympy
code, count = sys.argv[1], int(sys.argv[2])
gc.collect(); gc.freeze()
def one():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1); os.dup2(writer, 2)
        try:
            exec(compile(code, "p", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException as error:
            print(error); status = 1
        sys.stdout.flush()
        os._exit(status)
    os.close(writer)
    while os.read(reader, 65536):
        pass
    os.close(reader)
    os.waitpid(pid, 0)
for _ in range(3):
    one()
start = time.perf_counter()
for _ in range(count):
    one()
print(count / (time.perf_counter() - start))
"""


def floor_rate(case: str) -> float:
    """Calls per second of a bare fork from a warm interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", FLOOR, PROGRAMS[case], str(FLOOR_COUNTS[case])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def warm_up_is_blind() -> bool:
    """True if no program measured here is part of the server's warm-up."""
    seen = {
        line
        for flavour in warmup.FLAVOURS
        for text in warmup.programs(flavour)
        for line in text.split("\n")
    }
    ours = {line for text in PROGRAMS.values() for line in text.split("\n")}
    return not {line for line in ours & seen if not line.startswith("import ")}


def measure_all(
    ours: Ours, peers: list[CodeJudge | SandboxFusion], repetitions: int, seed: int
) -> dict[str, list[float]]:
    measures: dict[str, Callable[[], float]] = {}
    for case in COUNTS:
        measures[f"ours {case}"] = partial(ours.rate, case, seed)
        measures[f"subprocess {case}"] = partial(subprocess_rate, case, seed)
        if case in FLOOR_COUNTS:
            measures[f"floor {case}"] = partial(floor_rate, case)
        for peer in peers:
            if case in PEER_COUNTS:
                todo = programs(case, PEER_COUNTS[case], seed)
                measures[f"{peer.name} {case}"] = partial(peer.rate, todo)
    measures["beside"] = ours.beside_endless
    return interleave(measures, repetitions, lambda name: say(f"  {name}"))


def rows_of(values: dict[str, list[float]], ours: Ours) -> list[Row]:
    rows = []
    for case in COUNTS:
        rate = median(values[f"ours {case}"])
        peer = median(values[f"subprocess {case}"])
        rows.append(Row(case, rate, peer, TARGETS.get(case), "calls/s", "subprocess"))
    for name in (CodeJudge.name, SandboxFusion.name):
        for case in PEER_COUNTS:
            if f"{name} {case}" in values:
                target = PEER_TARGETS[case] if name == CodeJudge.name else None
                rate, peer = median(values[f"ours {case}"]), median(values[f"{name} {case}"])
                rows.append(Row(f"{case}, {name}", rate, peer, target, "calls/s", name))
    for case in FLOOR_COUNTS:
        rate, floor = median(values[f"ours {case}"]), median(values[f"floor {case}"])
        target = ">= 0.333" if case == "print" else None
        rows.append(Row(f"{case}, floor", rate, floor, target, "calls/s", "bare fork"))
    for case in PROGRAMS:
        saturated = ours.latencies[case]
        p50, p99 = (1000 * quantile(saturated, q) for q in (0.5, 0.99))
        rows.append(Row(f"{case}, saturated p99", p99, p50, "< 10", "ms", "p50"))
        single = ours.unloaded(case, 200)
        p50, p99 = (1000 * quantile(single, q) for q in (0.5, 0.99))
        rows.append(Row(f"{case}, unloaded p99", p99, p50, None, "ms", "p50"))
    worst, limit = 1000 * max(values["beside"]), 1000 * (LIMITS.wall_s or 0)
    rows.append(Row("longest call beside an endless loop", worst, limit, "< 1", "ms", "its limit"))
    rows.append(Row("warm-up has not seen the programs", warm_up_is_blind(), None, ">= 1"))
    return rows


def main() -> int:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument(
        "--as-release", action="store_true", help="Send programs as the paper's client does."
    )
    parser.add_argument("--code-judge", metavar="URL", help="Measure this code-judge server too.")
    parser.add_argument(
        "--sandbox-fusion", metavar="URL", help="Measure this SandboxFusion server too."
    )
    args: argparse.Namespace = parser.parse_args()
    peers: list[CodeJudge | SandboxFusion] = []
    if args.code_judge:
        peers.append(CodeJudge(args.code_judge))
    if args.sandbox_fusion:
        peers.append(SandboxFusion(args.sandbox_fusion))
    if args.as_release:
        PROGRAMS.update({case: as_release(code) for case, code in PROGRAMS.items()})
    os.sched_setaffinity(0, {args.core})
    loop = asyncio.new_event_loop()
    ours = Ours(loop)
    isolation = ours.client.isolation
    try:
        for case in COUNTS:
            ours.rate(case, args.seed)  # workers are made on first use
        ours.latencies.clear()
        values = measure_all(ours, peers, 1 if args.quick else 5, args.seed)
        rows = rows_of(values, ours)
    finally:
        ours.close()
        loop.close()
    notes = {
        "core": args.core,
        "as_release": args.as_release,
        "slots": SLOTS,
        "isolation": isolation,
    }
    return finish("code environment, one core", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

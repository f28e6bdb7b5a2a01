"""What one engine's failure costs the rollouts of a step: healthy, killed, hung and slow.

    python benchmarks/step_faults.py [--quick] [--json] [--engines 8] [--rollouts 4096]

Scripted vLLM servers, one process each, answer over real HTTP with lengths of the paper's first
stage, a twentieth as long at a twentieth of the speed (`driver_soak`). Agent loops, fleet,
scheduler, watchdog and HTTP client are real. Every rollout has its own seed, which alone decides
the lengths of its turns, so that all cases have the same work (a row checks that). There are
several times as many rollouts as the engines run at once, so that capacity decides the time of a
step and not its longest rollout. Once a quarter of the rollouts has ended, one server is killed or
stopped; it does not come back. In the slow case one engine takes three times as long for a token
from the start. Capacity alone makes a step 1.11 times as long if one of eight engines is lost then.

In the last case the driver's limit of open files is low, and many more turns than that are asked
for at once: they must all finish, and no engine may count as lost.

Left out: the learner, weight updates (`publish_faults`), tool calls that take time, restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from common import Row, arguments, finish, median, say
from driver_soak import make_script
from http_engines import ScriptedServers
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.config import AgentConfig, SamplingConfig, SchedulerConfig
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.vllm import STALE, VllmEngine
from rstar2.environments.python_math import PythonMath
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.watchdog import Watchdog
from rstar2.tasks import together
from rstar2.types import Problem
from scaling import QUESTION, script

LENGTH_SCALE = 0.05
GROUP = 32
HANG_S = 8.0
SLOW = 3.0
CASES = ("healthy", "killed", "stopped", "slow")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
BURST = 1536
"""Turns at once in the case of exhausted descriptors."""
OPEN_FILES = 512
BURST_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Size:
    """How large a step is."""

    engines: int = 8
    rollouts: int = 4096
    sequences: int = 64
    """That one engine runs at once."""
    speed: float = 1.0
    """How many times as fast as usual the engines are."""


@dataclass(frozen=True)
class StepTime:
    """One step."""

    seconds: float
    noticed_s: float
    """From the failure until the fleet has given up the engine; 0 without one."""
    lost: int
    """Rollouts lost."""
    tokens: int
    """Sampled tokens of all rollouts."""
    deaths: int
    """Engines that were given up."""


def start_servers(stack: contextlib.ExitStack, size: Size, case: str) -> list[ScriptedServers]:
    """One process for each engine."""
    how = make_script(LENGTH_SCALE)
    servers = []
    for number in range(size.engines):
        slower = SLOW if case == "slow" and number == 0 else 1.0
        own = replace(
            how,
            engines=1,
            sequences=size.sequences,
            base_s=how.base_s / size.speed,
            token_s=slower * how.token_s / size.speed,
            by_request=True,
        )
        servers.append(stack.enter_context(ScriptedServers(own)))
    return servers


def measure(case: str, size: Size) -> StepTime:
    """One step with engines of its own."""
    with contextlib.ExitStack() as stack:
        servers = start_servers(stack, size, case)
        urls = [url for server in servers for url in server.urls]
        return asyncio.run(run_step(urls, size, case, servers[0]))


async def run_step(
    urls: Sequence[str], size: Size, case: str, victim: ScriptedServers | None = None
) -> StepTime:
    """The rollouts of one step, all asked for at once."""
    raise_descriptor_limit()
    template, _ = script()
    limit = make_script(LENGTH_SCALE).max_length
    agent = AgentConfig(generate_deadline_s=600.0, response_tokens=64)
    made = [
        VllmEngine(f"e{i}", url=url, max_sequences=size.sequences, max_length=limit)
        for i, url in enumerate(urls)
    ]
    await together(engine.start() for engine in made)
    fleet = Fleet(made, Scheduler(SchedulerConfig()))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fleet.close)
        fleet.require(STALE)
        for engine in made:
            fleet.join(engine.name, STALE)
        loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, agent)
        runner = CountingRunner(GroupRunner(loop), limit, size.rollouts)
        watchdog = asyncio.ensure_future(Watchdog(fleet, (1, 2, 3), hang_s=HANG_S).run())
        failing = asyncio.ensure_future(fail(case, victim, fleet, runner))
        started = time.monotonic()
        await together(runner.group(index) for index in range(size.rollouts // GROUP))
        seconds = time.monotonic() - started
        noticed_s = await failing
        watchdog.cancel()
        await asyncio.gather(watchdog, return_exceptions=True)
        deaths = sum(usage.deaths for usage in fleet.take_usage())
    return StepTime(seconds, noticed_s, runner.lost.total(), runner.tokens, deaths)


def measure_burst(size: Size) -> StepTime:
    """A step in a process that may open few files; the servers keep their own limit."""
    with contextlib.ExitStack() as stack:
        servers = start_servers(stack, size, "burst")
        urls = [url for server in servers for url in server.urls]
        command = [sys.executable, __file__, "--burst", json.dumps(urls), json.dumps(asdict(size))]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BURST_DEADLINE_S, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return StepTime(**json.loads(done.stdout))


def burst(urls: str, size: str) -> None:
    """The process of `measure_burst`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    step = asyncio.run(run_step(json.loads(urls), Size(**json.loads(size)), "burst"))
    print(json.dumps(asdict(step)))


class CountingRunner:
    """Runs groups and says when a quarter of the rollouts has ended."""

    def __init__(self, runner: GroupRunner, limit: int, rollouts: int) -> None:
        self.runner, self.rollouts = runner, rollouts
        self.spec = RolloutSpec(SamplingConfig(), limit, 10)
        self.quarter = asyncio.Event()
        self.ended = self.tokens = 0
        self.lost: Counter[str] = Counter()

    async def group(self, index: int) -> None:
        problem = Problem(str(index), QUESTION, "42", grader="integer")

        async def one(number: int) -> None:
            made = await self.runner.rollout(
                problem,
                group_id=f"s/1/{index}",
                index=number,
                seed=GROUP * index + number,
                spec=self.spec,
            )
            self.tokens += sum(len(turn.sampled_ids) for turn in made.turns)
            self.lost.update([] if made.failure is None else [made.failure.name])
            self.ended += 1
            if self.ended >= self.rollouts // 4:
                self.quarter.set()

        await together(one(number) for number in range(GROUP))


async def fail(
    case: str, victim: ScriptedServers | None, fleet: Fleet, runner: CountingRunner
) -> float:
    """Fail an engine after a quarter of the rollouts; returns the seconds until it is noticed."""
    if victim is None or case not in SIGNALS:
        return 0.0
    await runner.quarter.wait()
    victim.process.send_signal(SIGNALS[case])
    failed = time.monotonic()
    while "e0" in fleet.scheduler.engines:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return time.monotonic() - failed


def rows_of(made: dict[str, list[StepTime]], bursts: Sequence[StepTime]) -> list[Row]:
    """Each case against the healthy one."""
    healthy = median([step.seconds for step in made["healthy"]])
    rows = [Row("healthy, step", healthy, unit="s")]
    for case in CASES[1:]:
        seconds = median([step.seconds for step in made[case]])
        target = "<= 1.3" if case == "killed" else None
        rows.append(Row(f"one engine {case}, step", seconds, healthy, target, "s", "s healthy"))
        if case in SIGNALS:
            noticed = median([step.noticed_s for step in made[case]])
            rows.append(Row(f"one engine {case}, noticed after", noticed, unit="s"))
    steps = [step for steps in made.values() for step in steps]
    work = {step.tokens for step in steps}
    rows.append(Row("tokens of a step, largest", max(work), min(work), "== 1", against="smallest"))
    rows.append(Row("rollouts lost, all cases", sum(s.lost for s in steps), None, "== 0"))
    few = f"{BURST} turns at once, {OPEN_FILES} open files"
    rows.append(Row(few, median([step.seconds for step in bursts]), unit="s"))
    rows.append(Row(f"{few}, rollouts lost", sum(s.lost for s in bursts), None, "== 0"))
    rows.append(Row(f"{few}, engines lost", sum(s.deaths for s in bursts), None, "== 0"))
    return rows


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--burst"]:
        burst(*words[1:3])
        return 0
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--engines", type=int, default=Size.engines)
    parser.add_argument("--rollouts", type=int, default=Size.rollouts)
    args = parser.parse_args(words)
    size = Size(args.engines, args.rollouts)
    if args.quick:
        size = replace(size, rollouts=args.rollouts // 8, sequences=8, speed=8.0)
    made: dict[str, list[StepTime]] = {case: [] for case in CASES}
    bursts: list[StepTime] = []
    for _ in range(1 if args.quick else 3):
        for case in CASES:
            say(f"{case}: {size.engines} engines, {size.rollouts} rollouts")
            made[case].append(measure(case, size))
        say(f"{BURST} turns at once, {OPEN_FILES} open files")
        bursts.append(measure_burst(Size(args.engines, BURST, BURST // args.engines, speed=8.0)))
    notes = {**asdict(size), "hang_s": HANG_S, "slow": SLOW}
    return finish("step-faults", rows_of(made, bursts), args, notes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

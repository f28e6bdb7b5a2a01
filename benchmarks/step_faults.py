"""What one engine's failure costs the rollouts of a step: healthy, killed, hung and slow.

    python benchmarks/step_faults.py [--quick] [--json] [--engines 8] [--rollouts 1024]

Scripted vLLM servers, one process each, answer over real HTTP with lengths of the paper's first
stage, a twentieth as long at a twentieth of the speed (`driver_soak`). Everything else is real:
agent loops, fleet, scheduler, watchdog, HTTP client. Once a quarter of the rollouts has ended, one
server is killed or stopped; it does not come back. In the slow case one engine takes three times as
long for a token from the start. Capacity alone makes a step 8/7 times as long without one of eight.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
SEQUENCES = 64
GROUP = 32
HANG_S = 8.0
SLOW = 3.0
CASES = ("healthy", "killed", "stopped", "slow")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True)
class StepTime:
    """One step."""

    seconds: float
    noticed_s: float
    """From the failure until the fleet has given up the engine; 0 without one."""
    lost: int
    """Rollouts lost."""


async def measure(case: str, engines: int, rollouts: int) -> StepTime:
    """The rollouts of one step, all asked for at once."""
    raise_descriptor_limit()
    template, _ = script()
    how = replace(make_script(LENGTH_SCALE), engines=1, sequences=SEQUENCES)
    agent = AgentConfig(generate_deadline_s=600.0, response_tokens=64)
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for number in range(engines):
            speed = SLOW if case == "slow" and number == 0 else 1.0
            own = replace(how, seed=number, token_s=speed * how.token_s)
            servers.append(stack.enter_context(ScriptedServers(own)))
        made = [
            VllmEngine(f"e{i}", url=url, max_sequences=SEQUENCES, max_length=how.max_length)
            for i, url in enumerate(url for server in servers for url in server.urls)
        ]
        await together(engine.start() for engine in made)
        fleet = Fleet(made, Scheduler(SchedulerConfig()))
        stack.push_async_callback(fleet.close)
        fleet.require(STALE)
        for engine in made:
            fleet.join(engine.name, STALE)
        loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, agent)
        runner = CountingRunner(GroupRunner(loop), how.max_length, rollouts)
        watchdog = asyncio.ensure_future(Watchdog(fleet, (1, 2, 3), hang_s=HANG_S).run())
        failing = asyncio.ensure_future(fail(case, servers[0], fleet, runner))
        started = time.monotonic()
        await together(runner.group(index) for index in range(rollouts // GROUP))
        seconds = time.monotonic() - started
        noticed_s = await failing
        watchdog.cancel()
        await asyncio.gather(watchdog, return_exceptions=True)
    return StepTime(seconds, noticed_s, runner.lost.total())


class CountingRunner:
    """Runs groups and says when a quarter of the rollouts has ended."""

    def __init__(self, runner: GroupRunner, limit: int, rollouts: int) -> None:
        self.runner, self.rollouts = runner, rollouts
        self.spec = RolloutSpec(SamplingConfig(), limit, 10)
        self.quarter = asyncio.Event()
        self.ended = 0
        self.lost: Counter[str] = Counter()

    async def group(self, index: int) -> None:
        problem = Problem(str(index), QUESTION, "42", grader="integer")

        async def one(number: int) -> None:
            made = await self.runner.rollout(
                problem, group_id=f"s/1/{index}", index=number, seed=number, spec=self.spec
            )
            self.lost.update([] if made.failure is None else [made.failure.name])
            self.ended += 1
            if self.ended >= self.rollouts // 4:
                self.quarter.set()

        await together(one(number) for number in range(GROUP))


async def fail(case: str, server: ScriptedServers, fleet: Fleet, runner: CountingRunner) -> float:
    """Fail an engine after a quarter of the rollouts; returns the seconds until it is noticed."""
    if case not in SIGNALS:
        return 0.0
    await runner.quarter.wait()
    server.process.send_signal(SIGNALS[case])
    failed = time.monotonic()
    while "e0" in fleet.scheduler.engines:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return time.monotonic() - failed


def rows_of(made: dict[str, list[StepTime]]) -> list[Row]:
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
    lost = sum(step.lost for steps in made.values() for step in steps)
    rows.append(Row("rollouts lost, all cases", lost, None, "== 0"))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=1024)
    args = parser.parse_args(words)
    rollouts = 256 if args.quick else args.rollouts
    made: dict[str, list[StepTime]] = {case: [] for case in CASES}
    for _ in range(1 if args.quick else 3):
        for case in CASES:
            say(f"{case}: {args.engines} engines, {rollouts} rollouts")
            made[case].append(asyncio.run(measure(case, args.engines, rollouts)))
    notes = {"engines": args.engines, "rollouts": rollouts, "hang_s": HANG_S, "slow": SLOW}
    return finish("step-faults", rows_of(made), args, notes)


if __name__ == "__main__":
    sys.exit(main())

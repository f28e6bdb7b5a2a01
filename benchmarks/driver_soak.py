"""The driver at the paper's scale while everything around it is killed: what it loses, and costs.

    python benchmarks/driver_soak.py [--minutes 60] [--rollouts 16384] [--length-scale 1.0] [--json]

64 scripted vLLM servers in 8 processes answer over real HTTP with lengths of the paper's first
stage (`rollout.simulate`, multiplied by --length-scale). Everything else is real: agent loops,
fleet, scheduler, HTTP client, grader, and the code environment, which executes a sample of the
tool calls. At random times a process with 8 engines is killed or stopped for a while, or the code
environment's server is killed. A step ends when all its rollouts have ended, and then its groups
are released, as after learning.

Reported for every minute: rollouts, lost rollouts, turns, the driver's memory and share of a core.
Then come the figures with targets: steps that ended, rollouts lost, memory at the end of the last
step against the first one (while its groups are still held), and the driver's share of a core. A
driver that cannot keep up uses the whole core, so the target is below 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common import Row, arguments, finish, say
from http_engines import Script, ScriptedServers
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig, CodeEnvConfig, SamplingConfig, SchedulerConfig
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.base import Engine
from rstar2.engine.vllm import STALE, VllmEngine
from rstar2.environments.python_math import PythonMath
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.simulate.workload import SHAPES, draw_workload
from rstar2.rollout.watchdog import Watchdog
from rstar2.tasks import together
from rstar2.types import Problem, ToolResult, WeightVersion
from scaling import QUESTION, script

PROCESSES, ENGINES_EACH, GROUP = 8, 8, 32
SEQUENCES = 256
TOKEN_S = 0.02
"""Seconds of a token, as with a 14B model and 256 sequences: the longest rollout takes 160 s."""
KILL_EVERY_S = 20.0
STOPPED_S = 20.0
HANG_S = 60.0
QUICK = 8
"""How many times as fast engines are with --quick."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class SampledSandbox(InstantSandbox):
    """Executes a share of the tool calls in the real code environment."""

    def __init__(self, real: CodeEnvClient, share: float) -> None:
        self.real, self.share, self.executed = real, share, 0
        self.rng = random.Random(0)

    async def run(self, request: RunRequest) -> ToolResult:
        if self.rng.random() >= self.share:
            return await super().run(request)
        self.executed += 1
        return await self.real.run(request)


@dataclass
class Minute:
    """The state at one time; counters since the start."""

    minute: float
    steps: int
    rollouts: int
    lost: int
    turns: int
    executed: int
    kills: int
    deaths: int
    memory_mb: float
    cpu_share: float


@dataclass
class Soak:
    """Counters of the whole run."""

    minutes: list[Minute] = field(default_factory=list)
    steps: int = 0
    rollouts: int = 0
    turns: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    held_mb: list[float] = field(default_factory=list)
    """The driver's memory at the end of each step, before its groups are released."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def make_script(length_scale: float) -> Script:
    """What engines say: turns as long as in the paper's first stage, three of four with a call."""
    shape = SHAPES["stage1"]
    template, turns = script()
    workload = draw_workload(shape, seed=0, scale=0.1)
    lengths = [t.sampled for rollout in workload.rollouts for t in rollout.turns]
    return Script(
        engines=ENGINES_EACH,
        turns=[list(turns[0]), list(turns[-1])],
        marker=turns[0][-1],
        first_prompt=0,
        per_turn=1,
        sequences=SEQUENCES,
        max_length=shape.limit,
        base_s=0.05,
        token_s=TOKEN_S / length_scale,
        filler=template.encode_turn(" ")[0],
        lengths=[max(1, round(length_scale * n)) for n in lengths],
        tool_share=shape.calls / (shape.calls + 1),
    )


async def recover(engine: Engine) -> WeightVersion:
    """Connect again; the fleet repeats it until the engine's process is back."""
    await engine.start()
    return STALE


async def trouble(servers: list[ScriptedServers], tools: CodeEnvClient, soak: Soak) -> None:
    """Kill and stop processes at random until cancelled."""
    rng = random.Random(1)
    while True:
        await asyncio.sleep(rng.expovariate(1 / KILL_EVERY_S))
        victim, how = rng.choice(servers), rng.random()
        if how < 0.5:
            soak.kills["engine process killed"] += 1
            victim.process.kill()
            await asyncio.to_thread(victim.process.wait)
            await asyncio.sleep(2.0)
            await asyncio.to_thread(victim.start)
        elif how < 0.75:
            soak.kills["engine process stopped"] += 1
            victim.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            victim.process.send_signal(signal.SIGCONT)
        else:
            owned = tools.endpoints[0].owned
            pid = getattr(owned, "pid", None)
            if pid is not None:
                soak.kills["code environment killed"] += 1
                os.kill(pid, signal.SIGKILL)


async def report(fleet: Fleet, sandbox: SampledSandbox, soak: Soak, every_s: float) -> None:
    """Print one line a minute until cancelled."""
    started, wall, cpu = time.monotonic(), time.monotonic(), time.process_time()
    while True:
        await asyncio.sleep(every_s)
        now, used = time.monotonic(), time.process_time()
        line = Minute(
            minute=round((now - started) / 60, 1),
            steps=soak.steps,
            rollouts=soak.rollouts,
            lost=soak.lost.total(),
            turns=soak.turns,
            executed=sandbox.executed,
            kills=soak.kills.total(),
            deaths=sum(meter.deaths for meter in fleet._meters.values()),
            memory_mb=round(memory_mb()),
            cpu_share=round((used - cpu) / (now - wall), 2),
        )
        wall, cpu = now, used
        soak.minutes.append(line)
        say(json.dumps(asdict(line)))


async def step(runner: GroupRunner, soak: Soak, rollouts: int, limit: int) -> None:
    """The rollouts of one step, all asked for at once."""
    spec = RolloutSpec(SamplingConfig(), limit, 10)

    async def group(index: int) -> None:
        problem = Problem(str(index), QUESTION, "42", grader="integer")
        name = f"s/{soak.steps}/{index}"
        made = await runner.run(problem, group_id=name, step=1, seeds=range(GROUP), spec=spec)
        soak.rollouts += len(made.trajectories)
        soak.turns += sum(len(t.turns) for t in made.trajectories)
        soak.lost.update(made.dropped)
        kept.append(made)

    kept: list[object] = []
    await together(group(index) for index in range(rollouts // GROUP))
    soak.steps += 1
    soak.held_mb.append(memory_mb())


async def run(args: argparse.Namespace) -> Soak:
    raise_descriptor_limit()
    soak, how = Soak(), make_script(args.length_scale)
    if args.quick:
        how = replace(how, base_s=how.base_s / QUICK, token_s=how.token_s / QUICK)
    template, _ = script()
    agent = AgentConfig(generate_deadline_s=600.0, response_tokens=64, retries=args.retries)
    async with contextlib.AsyncExitStack() as stack:
        servers = [stack.enter_context(ScriptedServers(how)) for _ in range(PROCESSES)]
        urls = [url for server in servers for url in server.urls]
        engines = [
            VllmEngine(f"e{i}", url=url, max_sequences=SEQUENCES, max_length=how.max_length)
            for i, url in enumerate(urls)
        ]
        tools = await CodeEnvClient.start(CodeEnvConfig(slots=1, warm_up="never"))
        stack.push_async_callback(tools.close)
        await together(engine.start() for engine in engines)
        fleet = Fleet(engines, Scheduler(SchedulerConfig()), recover=recover)
        stack.push_async_callback(fleet.close)
        fleet.require(STALE)
        for engine in engines:
            fleet.join(engine.name, STALE)
        sandbox = SampledSandbox(tools, args.tool_share)
        loop = AgentLoop(PythonMath(template.config), fleet, sandbox, template, agent)
        dog = Watchdog(fleet, (1, 2, 3), hang_s=HANG_S)
        background = [
            asyncio.ensure_future(task)
            for task in (
                dog.run(),
                trouble(servers, tools, soak),
                report(fleet, sandbox, soak, args.every_s),
            )
        ]
        wall, cpu = time.monotonic(), time.process_time()
        try:
            async with asyncio.timeout(60 * args.minutes):
                while True:
                    await step(GroupRunner(loop), soak, args.rollouts, how.max_length)
        except TimeoutError:
            say("the time is over")
        finally:
            soak.wall_s, soak.cpu_s = time.monotonic() - wall, time.process_time() - cpu
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    return soak


def rows_of(soak: Soak) -> list[Row]:
    """The figures of the whole run with their targets."""
    rows = [
        Row("steps that ended", soak.steps, None, "> 0"),
        Row("rollouts that ended", soak.rollouts, None, "> 0"),
        Row("rollouts lost", soak.lost.total(), None, "== 0"),
        Row("share of a core", soak.cpu_s / soak.wall_s, None, "< 0.9"),
        Row("CPU per turn", 1e3 * soak.cpu_s / max(1, soak.turns), unit="ms"),
    ]
    if soak.held_mb:
        first, *_, last = (soak.held_mb[0], *soak.held_mb)
        rows.append(Row("memory, last step", last, first, "<= 1.2", "MB", "MB, first step"))
    return rows


def main() -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rollouts", type=int, default=16384, help="Rollouts of a step.")
    parser.add_argument("--length-scale", type=float, default=1.0, help="Shorter turns.")
    parser.add_argument("--tool-share", type=float, default=0.02, help="Calls that are executed.")
    parser.add_argument("--retries", type=int, default=1, help="As agent.retries.")
    parser.add_argument("--every-s", type=float, default=60.0, help="Seconds between two lines.")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.rollouts, args.length_scale, args.every_s = 0.75, 256, 0.05, 10.0
    soak = asyncio.run(run(args))
    notes = {"kills": dict(soak.kills), "lost": dict(soak.lost), "turns": soak.turns}
    return finish("driver-soak", rows_of(soak), args, notes)


if __name__ == "__main__":
    sys.exit(main())

"""CPU cost of the driver as engines and rollouts grow: scheduler, fleet, agent loops, grading.

    python benchmarks/scaling.py [--quick] [--json] [--seed N] [--plot FILE.svg]
    python benchmarks/scaling.py --http [--quick]     the same through real HTTP

Scripted engines answer after a fixed time and tools immediately. Everything in between is real:
GroupRunner, run_trajectory, template, parser, Fleet, Scheduler, the integer grader. Every case runs
in its own process, so that its memory can be measured. A rollout has three turns with two tool
calls. CPU time of that process counts, not the wall clock (which the scripted engines set).

With --http the engines are `VllmEngine`s whose servers are scripted and run in other processes
(`http_engines`). All turns are in flight at once, each with 200 tokens; the servers' own count of
requests that ran at the same time proves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Row, arguments, finish, say, write_chart
from http_engines import Script, ScriptedServers
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import AgentConfig, SamplingConfig, SchedulerConfig, TemplateConfig
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.base import Engine, WeightTransfer, WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.vllm import VllmEngine
from rstar2.environments.python_math import PythonMath
from rstar2.errors import InfrastructureError
from rstar2.http_client import Address, Connections
from rstar2.learner.tiny import make_tokenizer
from rstar2.malloc import rare_collections
from rstar2.paper_format import REASON_OPEN, TOOL_NAME
from rstar2.report.svg import Series, line_chart
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.tasks import together
from rstar2.types import (
    EngineCapacity,
    EngineLoad,
    Finish,
    Generation,
    Group,
    Message,
    Problem,
    Sampling,
)

ENGINES = (1, 4, 16, 64, 256)
ROLLOUTS = (1024, 4096, 16384)
IN_FLIGHT = (256, 1024, 4096, 16384)
IN_FLIGHT_SHARE = 0.9
"""The servers must have held this share of the turns at once: some turns end during the start."""
HTTP_TURNS = 2
HTTP_TOKENS = 200
SERVERS = 4
GROUP = 32
TURNS = 3
TURN_S = 0.02
SEQUENCES = 256
LIMIT = 1024
AGENT = AgentConfig(generate_deadline_s=3600.0, response_tokens=64)
QUESTION = "What is 6 times 7?"
HTTP_SHARE_S = 0.003
"""Seconds of a turn for each turn in flight: the driver must be able to keep up."""
SAID = "Let me compute this and check the result with Python. "


class ScriptedEngine:
    """Gives every rollout the same turns, each after a fixed time."""

    weight_transfer: WeightTransfer = "memory"

    def __init__(self, name: str, turns: Sequence[tuple[int, ...]]) -> None:
        self.name, self._turns = name, turns
        self._next: dict[str, int] = {}
        self.running = 0

    async def start(self) -> None: ...

    def capacity(self) -> EngineCapacity:
        return EngineCapacity(SEQUENCES * LIMIT, SEQUENCES, LIMIT, 16)

    async def load(self) -> EngineLoad:
        return EngineLoad(0, self.running, 0, 0, 0)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        turn = self._next.get(session, 0)
        self._next[session] = turn + 1
        self.running += 1
        await asyncio.sleep(TURN_S)
        self.running -= 1
        ids = self._turns[min(turn, len(self._turns) - 1)]
        return Generation(ids, (-0.5,) * len(ids), ((0, len(ids)),), Finish.STOP)

    async def release(self, session: str) -> None:
        self._next.pop(session, None)

    async def update_weights(self, update: WeightUpdate) -> None: ...

    async def resume(self) -> None: ...

    async def held_weights(self) -> HeldWeights:
        return HeldWeights("float32", {})

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def close(self) -> None: ...

    async def abort(self) -> None: ...


@dataclass(frozen=True)
class Measured:
    """One case: so many rollouts over so many engines."""

    engines: int
    rollouts: int
    cpu_s: float
    wall_s: float
    events: int
    """Submissions, ends of turns and releases that the scheduler decided on."""
    growth_mb: float
    """Peak memory above what the process had before the first rollout."""

    @property
    def per_rollout_ms(self) -> float:
        return self.cpu_s / self.rollouts * 1e3


def script() -> tuple[Template, list[tuple[int, ...]]]:
    """The template, and what engines say: two calls and an answer."""
    template = Template(
        make_tokenizer(), TemplateConfig(system="none", instruction="none"), REASON_OPEN
    )
    body = json.dumps({"name": TOOL_NAME, "arguments": {"code": "print(6 * 7)", "input": ""}})
    call = f"{SAID}</reason>\n<tool_call>\n{body}\n</tool_call>"
    answer = f"{SAID}\n<answer>\\boxed{{42}}</answer>"
    return template, [template.encode_turn(text) for text in [call] * (TURNS - 1) + [answer]]


async def measure(engines: int, rollouts: int) -> Measured:
    """Run one step's rollouts, all of them asked for at once, on engines in this process."""
    template, turns = script()
    made: list[Engine] = [ScriptedEngine(f"e{i}", turns) for i in range(engines)]
    with rare_collections():  # as in a run
        return await run_rollouts(made, template, rollouts, TURNS)


async def measure_http(engines: int, rollouts: int) -> Measured:
    """As `measure`, through real HTTP."""
    raise_descriptor_limit()
    template, turns = script()
    call, answer = (list(t) for t in (turns[0], turns[-1]))
    filler = template.encode_turn(" ")[0]
    longer = [[filler] * (HTTP_TOKENS - len(t)) + t for t in (call, answer)]
    how = Script(
        engines=engines // SERVERS,
        turns=longer,
        marker=call[-1],
        first_prompt=template.prompt_ids([Message("user", QUESTION)]).count(call[-1]),
        per_turn=await _markers(template, turns, call[-1]),
        sequences=max(1, -(-rollouts // engines)),
        base_s=1.0 + rollouts * HTTP_SHARE_S,
    )
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServers(how)) for _ in range(SERVERS)]
        made: list[Engine] = [
            VllmEngine(f"e{i}", url=url, max_sequences=how.sequences, max_length=LIMIT)
            for i, url in enumerate(url for server in servers for url in server.urls)
        ]
        await together(engine.start() for engine in made)
        stack.enter_context(rare_collections())  # as in a run
        measured = await run_rollouts(made, template, rollouts, HTTP_TURNS, version=-1)
        peak = sum([await _peak(url) for server in servers for url in server.urls])
        if peak < IN_FLIGHT_SHARE * rollouts:
            raise SystemExit(f"only {peak} of {rollouts} turns were in flight at once")
        return measured


async def _peak(url: str) -> int:
    """The most requests that a scripted engine ran at the same time."""
    connections = Connections(Address.parse(url), InfrastructureError)
    async with connections.lease() as connection:
        response = await connection.request("GET", "/peak")
        return int(json.loads(await response.body())["peak"])


async def _markers(template: Template, turns: Sequence[tuple[int, ...]], marker: int) -> int:
    """How often a turn with a call and its response have a token."""
    fleet = Fleet([engine := ScriptedEngine("e", turns)], Scheduler(SchedulerConfig()))
    fleet.join(engine.name, 0)
    loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, AGENT)
    problem = Problem("0", QUESTION, "42", grader="integer")
    spec = RolloutSpec(SamplingConfig(), LIMIT, TURNS)
    one = await loop.run(problem, id="g/0", group_id="g", seed=0, spec=spec)
    await fleet.close()
    turn = one.turns[0]
    return turn.sampled_ids.count(marker) + turn.response_ids.count(marker)


async def run_rollouts(
    made: Sequence[Engine], template: Template, rollouts: int, turns: int, version: int = 0
) -> Measured:
    """Run rollouts on started engines, all of them asked for at once."""
    fleet = Fleet(made, Scheduler(SchedulerConfig()))
    fleet.require(version)
    for engine in made:
        fleet.join(engine.name, version)
    loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, AGENT)
    runner = GroupRunner(loop)
    spec = RolloutSpec(SamplingConfig(), LIMIT, turns)

    async def group(index: int) -> Group:
        problem = Problem(str(index), QUESTION, "42", grader="integer")
        return await runner.run(
            problem, group_id=f"s/1/{index}", step=1, seeds=range(GROUP), spec=spec
        )

    await together([group(-1)])  # imports and caches
    before = _peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    groups = await together(group(index) for index in range(rollouts // GROUP))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    right = sum(t.correct for g in groups for t in g.trajectories)
    if right != rollouts:
        raise SystemExit(f"{right} of {rollouts} rollouts came out right")
    await fleet.close()
    events = rollouts * (2 * turns + 1)
    return Measured(len(made), rollouts, cpu, wall, events, _peak_mb() - before)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(engines: int, rollouts: int, *, http: bool = False) -> Measured:
    """One case, measured where nothing else has been."""
    say(f"{engines} engine(s), {rollouts} rollouts")
    case = "--http-case" if http else "--case"
    command = [sys.executable, __file__, case, str(engines), str(rollouts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return Measured(**json.loads(done.stdout))


def rows_of(cases: dict[tuple[int, int], Measured]) -> list[Row]:
    """Cost per rollout by case; the largest against the smallest number of rollouts."""
    counts = sorted({rollouts for _, rollouts in cases})
    rows = []
    for engines in sorted({engines for engines, _ in cases}):
        for rollouts in counts:
            case = cases[engines, rollouts]
            last = rollouts == counts[-1]
            rows.append(
                Row(
                    f"{engines} engines, {rollouts} rollouts, CPU per rollout",
                    case.per_rollout_ms,
                    cases[engines, counts[0]].per_rollout_ms if last else None,
                    "<= 1.5" if last else None,
                    "ms",
                    f"ms at {counts[0]}",
                )
            )
        case = cases[engines, counts[-1]]
        rows.append(Row(f"{engines} engines, events", case.events / case.cpu_s, unit="1/s"))
        memory = case.growth_mb * 1024 / case.rollouts
        rows.append(Row(f"{engines} engines, memory per rollout", memory, unit="KB"))
    return rows


def http_rows(*, quick: bool) -> list[Row]:
    """CPU of the driver for a turn, by the number of turns in flight."""
    rows = []
    for count in IN_FLIGHT[: 2 if quick else None]:
        case = in_own_process(64, count, http=True)
        cost = case.per_rollout_ms / HTTP_TURNS
        target = "<= 1" if count == 4096 else None
        rows.append(Row(f"{count} turns in flight, CPU per turn", cost, None, target, "ms"))
        memory = case.growth_mb * 1024 / count
        rows.append(Row(f"{count} turns in flight, memory per rollout", memory, unit="KB"))
    return rows


def plot(cases: dict[tuple[int, int], Measured], path: Path) -> None:
    """Cost per rollout over the number of rollouts, one line per number of engines."""
    counts = sorted({rollouts for _, rollouts in cases})
    series = [
        Series(
            f"{engines} engines",
            tuple(float(n) for n in counts),
            tuple(cases[engines, n].per_rollout_ms for n in counts),
            colour=colour,
        )
        for colour, engines in enumerate(sorted({engines for engines, _ in cases}))
    ]
    chart = line_chart(
        series,
        title="driver CPU per rollout, ms",
        x_name="rollouts",
        y_range=(0.0, 1.3 * max(case.per_rollout_ms for case in cases.values())),
    )
    write_chart(str(chart), [s.name for s in series], path)


def main() -> int:
    if sys.argv[1:2] in (["--case"], ["--http-case"]):
        engines, rollouts = sys.argv[2:4]
        how = measure if sys.argv[1] == "--case" else measure_http
        case = asyncio.run(how(int(engines), int(rollouts)))
        print(json.dumps({name: getattr(case, name) for name in Measured.__dataclass_fields__}))
        return 0
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--plot", type=Path, help="Write the plot to this file.")
    parser.add_argument("--http", action="store_true", help="Measure through real HTTP.")
    args = parser.parse_args()
    if args.http:
        return finish("scaling-http", http_rows(quick=args.quick), args, {"turns": HTTP_TURNS})
    engine_counts = (1, 16, 256) if args.quick else ENGINES
    rollout_counts = (256, 1024) if args.quick else ROLLOUTS
    cases = {(e, n): in_own_process(e, n) for n in rollout_counts for e in engine_counts}
    if args.plot:
        plot(cases, args.plot)
    notes = {"turns_each": TURNS, "group": GROUP, "wall_s": sum(m.wall_s for m in cases.values())}
    return finish("scaling", rows_of(cases), args, notes)


if __name__ == "__main__":
    sys.exit(main())

"""The agent loop: its own cost, and whether tool calls overlap with generation.

    python benchmarks/agent_loop.py [--quick] [--json] [--seed N] [--rollouts N]

- Overhead: all rollouts run concurrently with an engine that answers immediately. The figure is the
  CPU time of this process per turn (prompt, decode, parse, tool response, bookkeeping), first with
  tools that answer immediately (the loop alone), then with real calls to a local code environment
  (client included; the server and the jailed programs are other processes).
- Overlap: the engine takes as long for all turns as the code environment takes for all calls. The
  peer is lockstep: all rollouts generate, then all tools run. Perfect overlap is a ratio of 0.5.
  Tool calls are real.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import Row, arguments, finish, say
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.parser import CallParser
from rstar2.agent.template import Template
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig, CodeEnvConfig, SamplingConfig, TemplateConfig
from rstar2.environments.base import SandboxClient
from rstar2.environments.python_math import PythonMath, PythonMathEpisode
from rstar2.learner.tiny import make_tokenizer
from rstar2.paper_format import REASON_OPEN, TOOL_NAME
from rstar2.types import (
    Finish,
    Generation,
    Problem,
    Sampling,
    StopReason,
    Trajectory,
)

CALLS = 2
TURNS = CALLS + 1
ENGINE_SEQUENCES = 64
WORDS = "Let me compute this step by step and check the result with Python. " * 4
AGENT = AgentConfig(tool_deadline_s=300.0)


class ScriptedEngine:
    """Generates the same turns for every session; a turn takes `turn_s` in one of its slots."""

    def __init__(self, template: Template, turn_s: float = 0.0) -> None:
        self._turns = [template.encode_turn(line) for line in lines()]
        self._turn_s = turn_s
        self._slots = asyncio.Semaphore(ENGINE_SEQUENCES)
        self._next: dict[str, int] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        turn = self._next.get(session, 0)
        self._next[session] = turn + 1
        if self._turn_s:
            async with self._slots:
                await asyncio.sleep(self._turn_s)
        ids = self._turns[turn]
        return Generation(ids, (-0.5,) * len(ids), ((0, len(ids)),), Finish.STOP)

    async def release(self, session: str) -> None:
        self._next.pop(session, None)


def lines() -> list[str]:
    """The turns of the model: two calls and an answer."""
    body = json.dumps({"name": TOOL_NAME, "arguments": {"code": "print(6 * 7)", "input": ""}})
    call = f"{WORDS}</reason>\n<tool_call>\n{body}\n</tool_call>"
    return [call] * CALLS + [f"{WORDS}\n<answer>\\boxed{{42}}</answer>"]


@dataclass(frozen=True)
class Measured:
    """All rollouts of one run."""

    wall_s: float
    cpu_s: float
    trajectories: list[Trajectory]


async def rollouts(
    count: int, run: str, engine: ScriptedEngine, tools: SandboxClient, template: Template
) -> Measured:
    """Run all rollouts concurrently; stops the benchmark if one does not end with an answer."""
    problem = Problem("p", "What is 6 times 7?", "42")
    loop = AgentLoop(PythonMath(template.config), engine, tools, template, AGENT)
    wall, cpu = time.perf_counter(), time.process_time()
    trajectories = await asyncio.gather(
        *(
            loop.run(
                problem,
                id=f"{run}/{index}",
                group_id=run,
                seed=index,
                spec=RolloutSpec(SamplingConfig(), 4096, TURNS),
                graded=False,
            )
            for index in range(count)
        )
    )
    measured = Measured(time.perf_counter() - wall, time.process_time() - cpu, list(trajectories))
    for trajectory in trajectories:
        if trajectory.stop is not StopReason.ANSWERED or trajectory.failed_calls:
            raise SystemExit(f"{trajectory.id}: {trajectory.stop}, {trajectory.failure}")
    return measured


async def lockstep(
    count: int, run: str, engine: ScriptedEngine, tools: SandboxClient, template: Template
) -> float:
    """The peer: per turn all generations, then all tool calls; returns seconds."""
    start = time.perf_counter()
    sampling = Sampling(max_new_tokens=4096, stop_ids=template.stop_ids)
    parser = CallParser(PythonMathEpisode.tools, max_calls=4)

    async def execute(index: int, ids: Sequence[int], turn: int) -> None:
        text = template.turn_text(ids)
        for call in parser.parse(text, f"{run}/{index}/{turn}"):
            code = call.arguments["code"]
            result = await tools.run(RunRequest(call.id, code, deadline_s=300.0))
            if not result.outcome.succeeded:
                raise SystemExit(f"a call failed: {result.outcome} {result.message}")

    for turn in range(TURNS):
        said = await asyncio.gather(
            *(
                engine.generate((), sampling, session=f"{run}/{index}", deadline_s=300.0)
                for index in range(count)
            )
        )
        await asyncio.gather(*(execute(i, g.token_ids, turn) for i, g in enumerate(said)))
    return time.perf_counter() - start


async def measure(count: int, overlapped: int) -> tuple[list[Row], dict[str, float]]:
    template = Template(
        make_tokenizer(), TemplateConfig(system="none", instruction="none"), REASON_OPEN
    )
    rows: list[Row] = []
    instant = ScriptedEngine(template)
    await rollouts(50, "warm", instant, InstantSandbox(), template)
    say(f"{count} rollouts, instant engine, instant tools")
    alone = await rollouts(count, "alone", instant, InstantSandbox(), template)
    turns = count * TURNS
    rows.append(Row("loop alone, CPU per turn", alone.cpu_s / turns * 1e3, target="< 1", unit="ms"))
    async with await CodeEnvClient.start(CodeEnvConfig()) as tools:
        say(f"{count} rollouts, instant engine, {count * CALLS} real calls")
        real = await rollouts(count, "real", instant, tools, template)
        rows.append(
            Row("loop and client, CPU per turn", real.cpu_s / turns * 1e3, target="< 1", unit="ms")
        )
        rows.append(Row("real calls", count * CALLS / real.wall_s, unit="calls/s"))
        turn_s = real.wall_s * ENGINE_SEQUENCES / turns
        say(f"{overlapped} rollouts, engine as slow as the tools ({turn_s * 1e3:.0f} ms per turn)")
        slow = ScriptedEngine(template, turn_s)
        ours = await rollouts(overlapped, "overlap", slow, tools, template)
        say("the same in lockstep")
        peer = await lockstep(overlapped, "lockstep", slow, tools, template)
        rows.append(
            Row("tools overlap generation, wall", ours.wall_s, peer, "< 0.8", "s", "s lockstep")
        )
    tokens = sum(len(t.token_ids) for t in alone.trajectories) / count
    return rows, {"rollouts": count, "turns_each": TURNS, "tokens_each": tokens}


def main() -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    args = parser.parse_args()
    rows, notes = asyncio.run(measure(args.rollouts, args.rollouts // (8 if args.quick else 1)))
    return finish("agent_loop", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

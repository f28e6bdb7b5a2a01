"""The difficulty filter over many problems, killed in the middle: what is repeated, and memory.

    python benchmarks/driver_filter.py [--problems 50000] [--quick] [--json]

The filter runs in a process of its own with scripted engines that answer at once. Record, agent
loop, fleet, scheduler and grader are real. When half the problems have ended, the process is killed
with -9 and started again; when three quarters have ended, one of four engines dies for good. The
figures: groups that were answered twice, groups without an answer, and the memory of the second
process after an eighth of the problems that it answers and at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Row, arguments, finish, say
from driver_soak import memory_mb
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop
from rstar2.config import Recipe, SchedulerConfig, StageConfig
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError
from rstar2.pipeline.difficulty_filter import hard_problems
from rstar2.pipeline.state import RunState
from rstar2.record import RunDirectory
from rstar2.record.solved import solved_file, unfinished_filters
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Generation, Problem, Sampling
from scaling import AGENT, LIMIT, QUESTION, ScriptedEngine, script

STAGE = StageConfig(name="hard", steps=1, max_length=LIMIT, difficulty={"samples": 1})
RECIPE = Recipe(
    name="filter",
    engine={"count": 4},
    rl={"stages": [STAGE]},
    record={"trajectories": "none"},
)
DEADLINE_S = 3600.0


class MortalEngine(ScriptedEngine):
    """A scripted engine that fails every request once it is dead."""

    dead = False

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        made = await super().generate(prompt_ids, sampling, session=session, deadline_s=deadline_s)
        if self.dead:
            raise EngineError(f"{self.name} is dead")
        return made


async def run_filter(path: Path, count: int) -> None:
    """Run or resume the filter; prints one line with what it did."""
    template, turns = script()
    engines = [MortalEngine(f"e{i}", turns[-1:]) for i in range(4)]
    fleet = Fleet(engines, Scheduler(SchedulerConfig()))
    for engine in engines:
        fleet.join(engine.name, 0)
    loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, AGENT)
    problems = tuple(Problem(str(i), QUESTION, "42", grader="integer") for i in range(count))
    memory: dict[str, float] = {}
    before = _lines(path)

    def progress(done: int, total: int, unit: str) -> None:
        if "first" not in memory and done >= before + (total - before) // 8:
            memory["first"] = memory_mb()
        if done == 3 * total // 4:
            engines[0].dead = True

    async def publish(version: int) -> None: ...

    view = SimpleNamespace(stage=lambda *a: None, progress=progress, note=lambda text: None)
    runtime = SimpleNamespace(problems=problems, runner=GroupRunner(loop))
    with RunDirectory.create_or_resume(path, RECIPE) as run:
        run.rewind("sft", 0, keep=unfinished_filters(path, ["hard"], 3))
        training: Any = SimpleNamespace(
            run=run, recipe=RECIPE, runtime=runtime, view=view, publish=publish
        )
        state = await hard_problems(training, STAGE, RunState(version=3))
    usages = fleet.take_usage()
    await fleet.close()
    done = {
        "before": before,
        "answered": sum(usage.turns for usage in usages),
        "deaths": sum(usage.deaths for usage in usages),
        "ungraded": len(state.kept["hard"]),  # every answer is right
    }
    print(json.dumps({**done, "first_mb": memory["first"], "end_mb": memory_mb()}))


def _lines(path: Path) -> int:
    file = solved_file(path, "hard")
    return file.read_bytes().count(b"\n") if file.exists() else 0


def measure(count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        command = [sys.executable, __file__, "--filter", str(path), str(count)]
        say(f"{count} problems, killed after half of them")
        with subprocess.Popen(command) as first:
            ends = time.monotonic() + DEADLINE_S
            while _lines(path) < count // 2 and first.poll() is None:
                if time.monotonic() > ends:
                    raise SystemExit("the filter did not reach half of its problems")
                time.sleep(0.02)
            os.kill(first.pid, signal.SIGKILL)
        say(f"resumed after {_lines(path)}")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    figures = json.loads(done.stdout)
    repeated = figures["before"] + figures["answered"] - count
    return [
        Row("groups before the kill", figures["before"]),
        Row("groups answered twice", repeated, None, "== 0"),
        Row("groups without an answer", figures["ungraded"], None, "== 0"),
        Row("engines lost", figures["deaths"], None, "== 1"),
        Row("memory after an eighth of the rest", figures["first_mb"], unit="MB"),
        Row("memory at the end", figures["end_mb"], figures["first_mb"], "<= 1.2", "MB", "MB"),
    ]


def main() -> int:
    if sys.argv[1:2] == ["--filter"]:
        asyncio.run(run_filter(Path(sys.argv[2]), int(sys.argv[3])))
        return 0
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--problems", type=int, default=50_000)
    args = parser.parse_args()
    return finish("driver-filter", measure(8000 if args.quick else args.problems), args, {})


if __name__ == "__main__":
    sys.exit(main())

"""The difficulty filter over many problems, killed in the middle: what is repeated, and memory.

    python benchmarks/driver_filter.py [--problems 50000] [--quick] [--json]

The filter runs in a process of its own with scripted engines that answer at once. Record, agent
loop, fleet, scheduler and grader are real. When half the problems have ended, the process is killed
with -9 and started again. The figures: groups that were answered twice, and the process's memory
after an eighth of its problems and at its end.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Row, arguments, finish, say
from driver_soak import memory_mb
from instant import InstantSandbox
from rstar2.agent.loop import AgentLoop
from rstar2.config import Recipe, SchedulerConfig, StageConfig
from rstar2.engine.base import Engine
from rstar2.environments.python_math import PythonMath
from rstar2.pipeline.difficulty_filter import hard_problems
from rstar2.pipeline.state import RunState
from rstar2.record import RunDirectory
from rstar2.record.solved import solved_file, unfinished_filters
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Problem
from scaling import AGENT, LIMIT, QUESTION, ScriptedEngine, script

STAGE = StageConfig(name="hard", steps=1, max_length=LIMIT, difficulty={"samples": 1})
RECIPE = Recipe(
    name="filter",
    engine={"count": 4},
    rl={"stages": [STAGE]},
    record={"trajectories": "none"},
)
DEADLINE_S = 3600.0


async def run_filter(path: Path, count: int) -> None:
    """Run or resume the filter; prints one line with what it did."""
    template, turns = script()
    engines: list[Engine] = [ScriptedEngine(f"e{i}", turns[-1:]) for i in range(4)]
    fleet = Fleet(engines, Scheduler(SchedulerConfig()))
    for engine in engines:
        fleet.join(engine.name, 0)
    loop = AgentLoop(PythonMath(template.config), fleet, InstantSandbox(), template, AGENT)
    problems = tuple(Problem(str(i), QUESTION, "42", grader="integer") for i in range(count))
    memory: dict[str, float] = {}

    def progress(done: int, total: int, unit: str) -> None:
        memory.setdefault("first", 0.0)
        if done >= total // 8 and not memory["first"]:
            memory["first"] = memory_mb()

    async def publish(version: int) -> None: ...

    view = SimpleNamespace(stage=lambda *a: None, progress=progress, note=lambda text: None)
    runtime = SimpleNamespace(problems=problems, runner=GroupRunner(loop))
    with RunDirectory.create_or_resume(path, RECIPE) as run:
        run.rewind("sft", 0, keep=unfinished_filters(path, ["hard"], 3))
        training: Any = SimpleNamespace(
            run=run, recipe=RECIPE, runtime=runtime, view=view, publish=publish
        )
        before = _lines(path)
        state = await hard_problems(training, STAGE, RunState(version=3))
    answered = sum(usage.turns for usage in fleet.take_usage())
    await fleet.close()
    done = {"before": before, "answered": answered, "kept": len(state.kept["hard"])}
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
        Row("memory after an eighth", figures["first_mb"], unit="MB"),
        Row("memory at the end", figures["end_mb"], figures["first_mb"], "<= 1.2", "MB", "MB"),
    ]


def main() -> int:
    if sys.argv[1:2] == ["--filter"]:
        asyncio.run(run_filter(Path(sys.argv[2]), int(sys.argv[3])))
        return 0
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--problems", type=int, default=50_000)
    args = parser.parse_args()
    return finish("driver-filter", measure(2000 if args.quick else args.problems), args, {})


if __name__ == "__main__":
    sys.exit(main())

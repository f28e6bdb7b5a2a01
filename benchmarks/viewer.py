"""The viewer over a run of 100,000 rollouts: time to open, time of requests, memory.

    python benchmarks/viewer.py [--quick] [--json] [--rollouts N] [--tokens N]

RunDirectory writes a run (groups of 16, three turns each, code and tool output). `rstar2 view`
serves it in a separate process, and the benchmark sends the requests of a browser. The peer is the
work of a viewer without an index before it can list anything: decoding every recorded group
(msgspec, one pass).

- open: from starting the command to the answer with the run's curves
- all listed: until every rollout can be filtered
- all listed, no index: the same for a run whose index was removed
- page: the slowest of the requests (filters, sorts, last page, a group, a rollout's tokens)
- text: a text search whose only match is the last one searched
- memory: resident memory of the server after all requests
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from common import Row, arguments, finish, say
from rstar2.config import Recipe, RlConfig, StageConfig
from rstar2.record import RunDirectory, read_groups
from rstar2.types import (
    Choice,
    Group,
    Outcome,
    Problem,
    Reward,
    Selection,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

MEMBERS, GROUPS = 16, 64
"""Rollouts per group, groups per step."""
OPEN_S, LISTED_S, PAGE_S, MEMORY_MB = 2.0, 2.0, 0.5, 300.0
NEEDLE = "the needle of the haystack"
DEADLINE_S = 600.0


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=60, help="Sampled tokens per rollout.")
    asked = parser.parse_args()
    rollouts = 10_000 if asked.quick else asked.rollouts
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write(run, rollouts, asked.tokens, asked.seed)
        size = sum(f.stat().st_size for f in (run / "trajectories").iterdir())
        say(f"{rollouts} rollouts, {size / 1e6:.0f} MB of groups")
        peer = decode_all(run)
        rows = measure(run, peer)
        shutil.rmtree(run / "index")
        rows.append(measure_bare(run, peer))
    return finish("viewer", rows, asked)


# --------------------------------------------------------------------------- the run


def write(path: Path, rollouts: int, tokens: int, seed: int) -> None:
    """Write a run of `rollouts` rollouts, with the needle in its first group."""
    rng = random.Random(seed)
    groups = rollouts // MEMBERS
    steps = -(-groups // GROUPS)
    stage = StageConfig(name="stage1", steps=steps, max_length=8192)
    with RunDirectory.create_or_resume(
        path, Recipe(name="big", rl=RlConfig(stages=(stage,)))
    ) as run:
        for number in range(groups):
            step = number // GROUPS + 1
            group, selection = make_group(f"stage1/{step}/{number}", step, tokens, rng, number == 0)
            run.trajectories("stage1", step, group, selection if number % 5 else None)
            if number % GROUPS == GROUPS - 1 or number == groups - 1:
                figures = {
                    name: rng.random() for name in ("reward", "entropy", "loss", "time/step")
                }
                run.metrics("stage1", step, figures)
        run.event("finished")


def make_group(
    name: str, step: int, tokens: int, rng: random.Random, needle: bool
) -> tuple[Group, Selection]:
    members = [make_rollout(name, m, tokens, rng, needle and m == 0) for m in range(MEMBERS)]
    choices = tuple(
        Choice(t.id, m < MEMBERS // 2, "drawn", float(t.correct), 0.5, 0.0, 1.0)
        for m, t in enumerate(members)
    )
    kind = rng.choice(("sum", "gcd", "lcm", "product"))
    problem = Problem(name, f"What is the {kind} of {rng.randrange(999)} and 18?", "6", kind=kind)
    return Group(name, problem, step, tuple(members)), Selection(name, "roc", choices)


def make_rollout(
    group: str, member: int, tokens: int, rng: random.Random, needle: bool
) -> Trajectory:
    turns = []
    for index in range(3):
        ids = tuple(rng.randrange(50_000) for _ in range(tokens // 3))
        logprobs = tuple(-rng.random() for _ in ids)
        call = ToolCall(
            f"{group}/{member}/{index}", "python", {"code": f"print({member} + {index})"}
        )
        result = ToolResult(call.id, rng.choice((Outcome.OK, Outcome.EXCEPTION)), stdout="6\n")
        last = index == 2
        turns.append(
            Turn(
                ids, logprobs, ((step_of(group), len(ids)),), () if last else (call,),
                () if last else (result,), () if last else ids[:20],
                entropies=tuple(rng.random() for _ in ids), engine=f"engine-{member % 2}",
                generate_s=0.5, tools_s=0.1,
            )
        )  # fmt: skip
    text = NEEDLE if needle else f"I compute it. So it is {member}."
    return Trajectory(
        f"{group}/{member}", group, group, member, tuple(range(40)), tuple(turns),
        StopReason.ANSWERED, 1, 0.0, text, "6", Reward(float(rng.random() < 0.5), "6", "math"),
        started_at=1000.0, wall_s=2.0,
    )  # fmt: skip


def step_of(group: str) -> int:
    return int(group.split("/")[1])


def decode_all(run: Path) -> float:
    """Seconds to decode every group once."""
    started = time.perf_counter()
    count = sum(len(line.group.trajectories) for line in read_groups(run, "stage1"))
    say(f"decoding all {count} rollouts takes {time.perf_counter() - started:.1f} s")
    return time.perf_counter() - started


# --------------------------------------------------------------------------- the viewer


class ViewerProcess:
    """`rstar2 view` over one run."""

    def __init__(self, process: subprocess.Popen[str], url: str, started: float) -> None:
        self.process, self.url, self.started = process, url, started

    def ask(self, path: str) -> Any:
        with urlopen(f"{self.url}api/{path}", timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def timed(self, path: str) -> float:
        before = time.perf_counter()
        self.ask(path)
        return time.perf_counter() - before

    def until_listed(self) -> float:
        """Seconds from the start until every rollout is listed."""
        while time.perf_counter() - self.started < DEADLINE_S:
            if self.ask("run/run")["progress"] >= 1:
                return time.perf_counter() - self.started
            time.sleep(0.02)
        raise SystemExit(f"not listed within {DEADLINE_S:g} s")

    @property
    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def served(run: Path) -> Iterator[ViewerProcess]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "rstar2", "view", "--port", "0", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield ViewerProcess(process, process.stdout.readline().strip(), started)
        finally:
            process.terminate()
            process.wait(30)


def measure(run: Path, peer: float) -> list[Row]:
    with served(run) as viewer:
        viewer.ask("run/run")
        viewer.ask("curves/run")
        opened = time.perf_counter() - viewer.started
        listed = viewer.until_listed()
        total = viewer.ask("rollouts/run?limit=1")["total"]
        requests = [
            "rollouts/run?reward=1&outcome=failed",
            "rollouts/run?sort=longest&kept=yes",
            f"rollouts/run?start={max(0, total - 50)}",
            "step/run?stage=stage1&step=1",
            "group/run?id=stage1/1/0",
            "tokens/run?id=stage1/1/0/3",
            "timeline/run?stage=stage1&step=1",
        ]
        pages = {path: min(viewer.timed(path) for _ in range(3)) for path in requests}
        for path, seconds in pages.items():
            say(f"  {1000 * seconds:7.1f} ms  {path}")
        matches = 0
        start: int | None = 0
        before = time.perf_counter()
        while start is not None and not matches:
            answer = viewer.ask(f"rollouts/run?text={NEEDLE.replace(' ', '+')}&start={start}")
            matches, start = len(answer["rows"]), answer["next"]
        needle = time.perf_counter() - before
        if not matches:
            raise SystemExit("the needle was not found")
        memory = viewer.memory_mb
    return [
        Row("open", opened, target=f"<= {OPEN_S:g}", unit="s"),
        Row("all listed", listed, target=f"<= {LISTED_S:g}", unit="s"),
        Row("all listed against decoding", listed, peer, "<= 1", "s", "s"),
        Row("slowest page", max(pages.values()), target=f"<= {PAGE_S:g}", unit="s"),
        Row("text at the far end", needle, peer, unit="s", against="s"),
        Row("memory", memory, target=f"<= {MEMORY_MB:g}", unit="MB"),
    ]


def measure_bare(run: Path, peer: float) -> Row:
    with served(run) as viewer:
        viewer.ask("run/run")
        opened = time.perf_counter() - viewer.started
        say(f"without an index the page opens after {opened:.2f} s")
        listed = viewer.until_listed()
        return Row("all listed, no index", listed, peer, unit="s", against="s")


if __name__ == "__main__":
    sys.exit(main())

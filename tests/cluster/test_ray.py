"""The tiny recipe on two Ray nodes: the same numbers as on one machine, and every fault survived.

The nodes are real Ray nodes (with their own raylets and workers) on this machine. A run is the
command `rstar2 train` in a separate process; faults are kill -9, SIGSTOP and removed nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rstar2.record import is_finished, read_events, read_groups, read_metrics
from tests.cluster import faults_table
from tests.e2e.driving import timeless

pytestmark = pytest.mark.timeout(3000)

DEADLINE_S = 900.0
STEPS = 3
FAULT_STEPS = 36
HANG_S = float(os.environ.get("RSTAR2_TEST_HANG_S", "20"))
"""An engine on a busy machine may seem to hang: use a longer time there."""


# --------------------------------------------------------------------------- runs


def recipe(directory: Path, **sections: Any) -> Path:
    """Write the tiny recipe, shortened for tests, to a file."""
    values: dict[str, Any] = {
        "extends": "tiny",
        "name": "tiny-short",
        "deterministic": True,
        "engine": {"count": 2, "kv_tokens": 16384, "max_sequences": 64, "hang_s": HANG_S},
        "codeenv": {"slots": 1},
        "learner": {"ranks": 2, "threads": 1, "hang_s": HANG_S},
        "sft": None,
        "rl": {
            "count": 64,
            "prompts_per_step": 4,
            "minibatches": 1,
            "roc": {"drawn": 8, "kept": 4},
            "optimizer": {"warmup_steps": 1},
            "stages": [{"name": "stage1", "steps": STEPS, "max_length": 176, "max_turns": 4}],
        },
        "evaluation": {"count": 4, "samples": 1, "greedy": False},
        "record": {"checkpoint_every": 2},
    }
    values |= sections
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def command(file: Path, run: Path, *words: str) -> list[str]:
    program = "from rstar2.cli import main; main()"
    return [sys.executable, "-c", program, "train", str(file), "--run", str(run), *words]


def start(file: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with run.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command(file, run, *words), env=environment, stdout=log, stderr=log, text=True
        )


def finish(process: subprocess.Popen[str], run: Path) -> None:
    code = process.wait(DEADLINE_S)
    assert code == 0, run.with_suffix(".log").read_text()[-4000:]
    assert is_finished(run)


def steps(run: Path) -> list[dict[str, Any]]:
    if not (run / "metrics.jsonl").exists():
        return []
    return [m for m in read_metrics(run) if m["stage"] == "stage1"]


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after a short SFT, which answers some problems correctly.

    RSTAR2_TEST_POLICY names an existing export to use instead.
    """
    if given := os.environ.get("RSTAR2_TEST_POLICY"):
        return Path(given)
    root = tmp_path_factory.mktemp("sft")
    base = {"data": "arithmetic", "steps": 260, "batch": 24, "max_length": 320}
    optimizer = {"lr": 8e-3, "warmup_steps": 20, "schedule": "cosine", "matrix_optimizer": "muon"}
    file = recipe(
        root,
        sft={**base, "optimizer": optimizer},
        rl={"stages": []},
        learner={"threads": 1},
        evaluation={"count": 1, "samples": 1, "greedy": False},
    )
    finish(start(file, root / "run"), root / "run")
    return root / "run" / "exports" / "sft"


class TwoNodes:
    """The cluster in a separate process, which keeps Ray's global state out of this one."""

    def __init__(self, log: Path) -> None:
        script = Path(__file__).with_name("two_nodes.py")
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.address = self._line()
        assert ":" in self.address, log.read_text()[-3000:]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, command: str) -> None:
        """Remove or add the second node."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def close(self) -> None:
        self._process.communicate("quit\n", timeout=120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """A head node and a second node, each with room for everything."""
    nodes = TwoNodes(tmp_path_factory.mktemp("nodes") / "log")
    yield nodes
    nodes.close()


# --------------------------------------------------------------------------- equal to one machine


def test_two_nodes_train_as_one_machine_does(
    policy: Path, cluster: TwoNodes, tmp_path: Path
) -> None:
    model = {"path": str(policy), "max_length": 512}
    file = recipe(tmp_path, model=model)
    finish(start(file, tmp_path / "alone"), tmp_path / "alone")
    finish(
        start(file, tmp_path / "cluster", "--ray-address", cluster.address), tmp_path / "cluster"
    )
    placed = [e for e in read_events(tmp_path / "cluster") if e["event"] == "placed"]
    assert {e["part"].split("-")[0] for e in placed} == {"engine", "rank", "codeenv"}
    assert sum(e["part"].startswith("codeenv") for e in placed) == 2
    alone, together = steps(tmp_path / "alone"), steps(tmp_path / "cluster")
    assert [m["step"] for m in together] == list(range(1, STEPS + 1))
    for mine, theirs in zip(together, alone, strict=True):
        assert figures_of(mine) == pytest.approx(figures_of(theirs), rel=1e-3, abs=1e-4)
    tokens = [
        [t.token_ids for line in read_groups(run, "stage1") for t in line.group.trajectories]
        for run in (tmp_path / "cluster", tmp_path / "alone")
    ]
    assert tokens[0] == tokens[1], "every rollout is the same, token for token"


def figures_of(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that must not depend on the machine; weight files have a header."""
    assert metrics["stage"] == "stage1"
    return {
        name: value
        for name, value in timeless(metrics).items()
        if name not in ("stage", "weights/megabytes")
    }


# --------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """One line of the table."""

    what: str
    injected: float
    noticed: dict[str, Any]
    recovered: dict[str, Any]
    repeated: str

    def line(self) -> str:
        detect = self.noticed["time"] - self.injected
        recover = self.recovered["time"] - self.injected
        return f"| {self.what} | {detect:.1f} | {recover:.1f} | {self.repeated} |"


class Scene:
    """A running `rstar2 train`, its recorded events, and the faults injected into it."""

    def __init__(self, run: Path, begin: Callable[[], subprocess.Popen[str]]) -> None:
        self.run, self.begin = run, begin
        self.process = begin()
        self.faults: list[Fault] = []

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """Poll a condition until it holds; fails if the run ends before that."""
        ends = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            log = self.run.with_suffix(".log")
            assert self.process.poll() is None, f"{what}: ended\n{log.read_text()[-4000:]}"
            assert time.monotonic() < ends, f"{what}: not seen\n{self.events()[-20:]}"
            time.sleep(0.1)
        return value

    def events(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run) if e["time"] > since]

    def first(self, since: float, event: str, **facts: str) -> dict[str, Any] | None:
        """The first event of this name after a time whose values start with the given facts."""
        for e in self.events(since):
            if e["event"] == event and all(str(e[k]).startswith(v) for k, v in facts.items()):
                return e
        return None

    def pids(self, part: str) -> list[int]:
        """Process ids of a part since its last start."""
        starts = [e for e in self.events() if e["event"] == "placed" and e["part"].startswith(part)]
        return list(starts[-1]["pids"])

    def step(self, more: int) -> int:
        """Wait for `more` further steps; returns the last one done."""
        target = (steps(self.run)[-1]["step"] if steps(self.run) else 0) + more
        self.wait(
            f"step {target}", lambda: steps(self.run) and steps(self.run)[-1]["step"] >= target
        )
        return target

    def survive(
        self, what: str, inject: Callable[[], Any], noticed: Any, recovered: Any, repeated: str
    ) -> None:
        """Inject a fault; the run must notice it, recover and complete another step."""
        injected = time.time()
        inject()
        noticed_event = self.wait(f"{what} is noticed", lambda: noticed(injected))
        recovered_event = self.wait(
            f"{what} is recovered", lambda: recovered(noticed_event["time"])
        )
        self.step(1)
        self.faults.append(Fault(what, injected, noticed_event, recovered_event, repeated))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def inject_faults(scene: Scene, cluster: TwoNodes) -> None:
    """Every fault of a part or a node, one after another."""
    scene.survive(
        "engine, kill -9",
        lambda: kill(*scene.pids("engine-0")),
        lambda t: scene.first(t, "lost", part="engine-0"),
        lambda t: scene.first(t, "back", part="engine-0"),
        "its running turns",
    )
    scene.survive(
        "engine hangs, SIGSTOP",
        lambda: os.kill(scene.pids("engine-1")[-1], signal.SIGSTOP),
        lambda t: scene.first(t, "hung", part="engine-1"),
        lambda t: scene.first(t, "back", part="engine-1"),
        "its running turns",
    )
    scene.survive(
        "code environment, kill -9",
        lambda: kill(*scene.pids("codeenv")),
        lambda t: scene.first(t, "lost", part="codeenv"),
        lambda t: scene.first(t, "placed", part="codeenv"),
        "its running calls",
    )
    scene.survive(
        "learner rank, kill -9",
        lambda: kill(*scene.pids("rank-1")),
        lambda t: scene.first(t, "lost", part="learner"),
        lambda t: scene.first(t, "back", part="learner"),
        "at most 2 steps",
    )
    scene.survive(
        "learner rank hangs, SIGSTOP",
        lambda: os.kill(scene.pids("rank-1")[0], signal.SIGSTOP),
        lambda t: scene.first(t, "lost", part="learner"),
        lambda t: scene.first(t, "back", part="learner"),
        "at most 2 steps",
    )
    scene.survive(
        "node removed",
        lambda: cluster.tell("remove"),
        lambda t: scene.first(t, "node_lost") or scene.first(t, "lost", part="learner"),
        lambda t: scene.first(t, "back", part="learner") or scene.first(t, "back", part="engine"),
        "at most 2 steps, its turns and calls",
    )
    scene.survive(
        "node added",
        lambda: cluster.tell("add"),
        lambda t: scene.first(t, "node_joined"),
        lambda t: scene.first(t, "placed", part="codeenv"),
        "nothing",
    )


def kill_driver(scene: Scene) -> None:
    """Kill the driver; the same command must resume the run."""
    injected = time.time()
    scene.process.kill()
    scene.process.wait()
    scene.process = scene.begin()
    resumed = scene.wait("the driver resumes", lambda: scene.first(injected, "resumed"))
    placed = scene.wait(
        "engines are back", lambda: scene.first(injected, "placed", part="engine-1")
    )
    scene.faults.append(Fault("driver, kill -9", injected, resumed, placed, "at most 2 steps"))


def test_every_fault_is_survived_and_every_step_is_done_once(
    policy: Path, cluster: TwoNodes, tmp_path: Path
) -> None:
    stage = {"name": "stage1", "steps": FAULT_STEPS, "max_length": 176, "max_turns": 4}
    base = yaml.safe_load(recipe(tmp_path).read_text())
    file = recipe(
        tmp_path,
        model={"path": str(policy), "max_length": 512},
        rl=base["rl"] | {"stages": [stage]},
    )
    run = tmp_path / "run"
    scene = Scene(run, lambda: start(file, run, "--ray-address", cluster.address))
    scene.step(1)
    inject_faults(scene, cluster)
    kill_driver(scene)
    finish(scene.process, run)

    assert [m["step"] for m in steps(run)] == list(range(1, FAULT_STEPS + 1))
    groups = [line.group.id for line in read_groups(run, "stage1")]
    assert len(groups) == len(set(groups))
    assert sum(m["rollouts/lost"] for m in steps(run)) == 0
    faults_table.TABLE += [
        "| fault | seconds until noticed | until recovered | work repeated |",
        "|---|---|---|---|",
        *(fault.line() for fault in scene.faults),
    ]

"""`rstar2 eval` of runs in other environments than python-math, before anything starts."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import rstar2
from rstar2.cli import main
from rstar2.cli.eval import own_set
from rstar2.config import CodeEnvConfig, EnvironmentConfig, Recipe
from rstar2.environments.identity import identify_object
from rstar2.environments.open import open_environment
from rstar2.evaluate import answerers
from rstar2.evaluate.answerers import load_task
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.store import EvalDirectory, EvalSettings
from rstar2.record import RunDirectory
from rstar2.rollout.groups import GroupRunner
from rstar2.types import Problem, Reward, StopReason, Trajectory
from tests.tiny import tokenizer

MODULE = """
import rstar2

env = rstar2.Environment(
    [{"prompt": str(n)} for n in range(16)], lambda episode: 1.0, prefill="Hm: ", name="hills"
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the module `hills`; it is forgotten after the test."""
    (tmp_path / "hills.py").write_text(MODULE)
    path = list(sys.path)
    yield tmp_path
    sys.modules.pop("hills", None)
    sys.path[:] = path


def model(path: Path) -> Path:
    """A directory with a tokenizer, and a config.json that no test loads."""
    tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return path


def test_the_template_has_the_prefill_of_the_runs_environment(folder: Path) -> None:
    named = EnvironmentConfig(use="hills:env", folder=str(folder))
    template, environment = load_task(model(folder / "model"), None, named)
    assert environment.name == "hills"
    assert template.prefill == "Hm: "
    paper, _ = load_task(folder / "model", None, EnvironmentConfig())
    assert paper.prefill == "<reason>"


def test_the_problems_are_the_environments_held_out_ones(folder: Path) -> None:
    named = EnvironmentConfig(use="hills:env", folder=str(folder))
    (benchmark,) = own_set(Recipe(name="hills", environment=named), None) or []
    assert (benchmark.name, len(benchmark.problems)) == ("heldout", 2)
    assert own_set(Recipe(name="paper"), None) is None


def test_a_run_of_an_environment_object_says_how_to_evaluate_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0, name="reasoning-gym")
    recipe = Recipe(name="own", environment=EnvironmentConfig(use=env.name))
    identity = identify_object(env, {})
    run = tmp_path / "run"
    RunDirectory.create_or_resume(run, recipe, environment=identity).close()
    model(run / "exports" / "sft")
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(run), "--on", "arithmetic"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"rstar2.evaluate_model({str(run)!r}, environment)" in " ".join(said.split())


def test_rewards_of_an_own_environment_are_not_scored_again_without_their_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = (Problem("1", "?", "", grader=""),)
    settings = EvalSettings(
        "hills", "", "embedded", {"heldout": "0"}, 1, 0.0, 1.0, 0, 64, 2, 0, "", {}, {}, {}
    )
    EvalDirectory.open(tmp_path / "e", settings, [Benchmark("heldout", "", problems)]).close()
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path / "e"), "--rescore"])
    assert ended.value.code == 2
    assert "heldout has rewards of its own environment" in capsys.readouterr().err


# --------------------------------------------------------------------------- opening and closing


@pytest.mark.asyncio
async def test_the_environment_is_closed_before_the_code_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its episodes may have sessions there."""
    closed: list[str] = []

    class Client:
        async def close(self) -> None:
            closed.append("code environment")

    class Hills(rstar2.Environment):
        async def close(self) -> None:
            closed.append("environment")
            raise OSError("a tool server is gone")

    async def start(config: CodeEnvConfig) -> Client:
        return Client()

    monkeypatch.setattr("rstar2.environments.open.CodeEnvClient.start", start)
    environment = Hills([{"prompt": "?"}], lambda episode: 1.0, tools=[rstar2.python()])
    with pytest.raises(OSError, match="a tool server is gone"):
        async with open_environment(environment, CodeEnvConfig()):
            pass
    assert closed == ["environment", "code environment"]


class RecordingRunner:
    """Stands for GroupRunner: every rollout is answered at once."""

    def __init__(self) -> None:
        self.groups: list[str] = []

    async def rollout(self, problem: Problem, *, group_id: str, **how: Any) -> Trajectory:
        self.groups.append(group_id)
        stop = StopReason.ANSWERED
        return Trajectory(group_id, problem.id, group_id, 0, (), (), stop, reward=Reward(1.0))


@pytest.mark.asyncio
async def test_rollouts_of_one_agent_have_ids_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines and tools tell rollouts apart by their id, also two of the same problem."""
    runner = RecordingRunner()

    @asynccontextmanager
    async def fleet(*parts: object) -> AsyncIterator[answerers.FleetAnswerer]:
        yield answerers.FleetAnswerer(cast(GroupRunner, runner))

    monkeypatch.setattr(answerers, "open_fleet", fleet)
    env = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0)
    async with rstar2.Agent(model(tmp_path), env) as agent:
        first, second = [await agent.run("Why?") for _ in range(2)]
    assert first.id != second.id
    assert len(set(runner.groups)) == 2

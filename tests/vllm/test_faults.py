"""Servers that are killed, hang or cannot start: no rollout is lost, and errors give the cause."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import AgentConfig, CodeEnvConfig, SamplingConfig, SchedulerConfig
from rstar2.engine.base import Engine
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_supervisor import members
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError
from rstar2.learner.weights import publish
from rstar2.problems.load import load_problems
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.groups import GroupRunner
from rstar2.rollout.scheduler import Scheduler
from rstar2.tasks import together
from rstar2.types import Group, WeightVersion
from tests.e2e.miniature import miniature
from tests.vllm.reference import learner_of
from tests.vllm.serving import engine_of, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROBE = list(range(20, 84))
VERSION = 7
GROUPS, ROLLOUTS = 6, 8

Engines = tuple[VllmEngine, VllmEngine, VllmEngine]


def server_of(engine: VllmEngine) -> list[psutil.Process]:
    """The API server, its engine core and workers."""
    assert engine.pid is not None
    return list(psutil.Process(engine.pid).children(recursive=True))


async def test_killed_engine_loses_no_rollout_and_comes_back_verified(
    engines: Engines, stage: Path, data: Path
) -> None:
    """kill -9 of a server in the middle of a step: every rollout of every group ends, once."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    learner = learner_of(stage)
    recipe = miniature(data, deterministic=False)
    assert recipe.rl.problems is not None
    problems = load_problems(recipe.rl.problems, "train", count=None, seed=0)
    environment = PythonMath(recipe.template)

    async def recover(engine: Engine) -> WeightVersion:
        await engine.start()
        assert isinstance(engine, VllmEngine)
        assert await engine.client.weight_version(60.0) != VERSION, "it comes back stale"
        await publish(learner, [engine], VERSION, PROBE)
        return VERSION

    fleet = Fleet(engines[:2], Scheduler(SchedulerConfig()), recover=recover)
    await publish(learner, engines[:2], VERSION, PROBE)
    fleet.require(VERSION)
    for engine in engines[:2]:
        fleet.join(engine.name, VERSION)
    async with await CodeEnvClient.start(CodeEnvConfig(slots=2)) as tools:
        tokenizer = AutoTokenizer.from_pretrained(stage)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        template = Template(tokenizer, recipe.template, environment.prefill)
        agent = AgentConfig(generate_deadline_s=300)
        runner = GroupRunner(AgentLoop(environment, fleet, tools, template, agent))

        async def draw(index: int, attempt: int) -> Group:
            return await runner.run(
                problems[index % len(problems)],
                group_id=f"kill{attempt}/{index}",
                step=1,
                seeds=range(ROLLOUTS),
                spec=RolloutSpec(SamplingConfig(), 128, 3),
            )

        work = asyncio.ensure_future(together(draw(i, 0) for i in range(GROUPS)))
        await eventually(lambda: fleet.scheduler.running("vllm-0") > 0, 60)
        for process in server_of(engines[0]):
            process.kill()
        groups = await work
        assert [len(g.trajectories) for g in groups] == [ROLLOUTS] * GROUPS
        assert [dict(g.dropped) for g in groups] == [{}] * GROUPS
        assert {u.name: u.deaths for u in fleet.take_usage()} == {"vllm-0": 1, "vllm-1": 0}
        versions = {
            v for g in groups for t in g.trajectories for u in t.turns for v, _ in u.versions
        }
        assert versions == {VERSION}

        await eventually(lambda: engines[0].name in fleet.scheduler.engines, 300)
        await together(draw(i, 1) for i in range(GROUPS))
        assert all(u.turns > 0 for u in fleet.take_usage()), "the engine that came back serves"
    await fleet.stop()


async def test_a_hung_server_is_replaced_by_start(engines: Engines) -> None:
    """SIGSTOP: alive, but it does not answer."""
    engine = engines[2]
    old = engine.pid
    for process in server_of(engine):
        process.suspend()
    await engine.start()
    assert engine.pid != old
    assert old is not None
    assert members(old) == []
    assert len(await engine.score(PROBE)) == len(PROBE) - 1


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = engine_of("broken", tmp_path)
    with pytest.raises(EngineError, match="its last output"):
        await engine.start()
    assert engine.pid is None

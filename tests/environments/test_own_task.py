"""`examples/own_task.py`: a shortened training run, and one rollout in ten lines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import rstar2
from rstar2.errors import RecipeError
from rstar2.record import read_environment, read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_task.py"
SHORT = (
    *("sft.steps=6", "sft.batch=4", "sft.optimizer.warmup_steps=1", "rl.prompts_per_step=2"),
    *("rl.minibatches=1", "rl.roc.drawn=4", "rl.roc.kept=2", "rl.optimizer.warmup_steps=0"),
    *("evaluation.count=4", "evaluation.samples=1", "engine.count=1"),
)


def environment() -> rstar2.Environment:
    spec = importlib.util.spec_from_file_location("own_task", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env = module.env
    assert isinstance(env, rstar2.Environment)
    return env


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_resume_evaluate_and_one_rollout(tmp_path: Path) -> None:
    env = environment()
    assert not env.needs_sandbox
    run = rstar2.train(env, "tiny", steps=1, settings=SHORT, run=tmp_path / "run")
    assert [(e.stage, e.mode) for e in run.evaluations] == [
        ("sft", "greedy"), ("sft", "sampled"), ("stage1", "greedy"), ("stage1", "sampled")
    ]  # fmt: skip
    assert [line["step"] for line in read_metrics(run.path) if line["stage"] == "stage1"] == [1]
    recorded = read_environment(run.path)["environment"]
    assert recorded["name"] == "own-task"
    assert len(recorded["source"]) == 16

    again = rstar2.train(env, "tiny", steps=1, settings=SHORT, run=tmp_path / "run")
    assert again.evaluations == run.evaluations
    other = rstar2.Environment([{"prompt": "?"}], lambda episode: 1.0, name="own-task")
    with pytest.raises(RecipeError, match="another version of the source of environment"):
        rstar2.train(other, "tiny", steps=1, settings=SHORT, run=tmp_path / "run")

    figures = rstar2.evaluate_model(run.path, env, count=3, max_length=128)
    assert figures.accuracy.count == 3
    one_rollout(run.path, env)


def one_rollout(path: Path, env: rstar2.Environment) -> None:
    import asyncio

    async def main() -> rstar2.Trajectory:
        async with rstar2.Agent(path, env, max_length=128) as agent:
            return await agent.run(env.problems("heldout", 1, 0)[0])

    rollout = asyncio.run(main())
    assert rollout.reward is not None
    assert rollout.turns[0].text

"""`rstar2.Agent`: one rollout in ten lines, with a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rstar2
from rstar2.agent.tokenizer import load_tokenizer


def reward(episode: rstar2.EpisodeView) -> float:
    return 0.5 * len(episode.turns) / (episode.problem.answer == "6")


@pytest.mark.slow
async def test_one_rollout_and_one_that_is_lost(tiny_dir: Path) -> None:
    env = rstar2.Environment([{"prompt": "Twice 3?", "answer": 6}], reward, prefill="Well")
    async with rstar2.Agent(tiny_dir, env, max_length=64) as agent:
        (problem,) = env.problems("heldout", None, 0)
        rollout, same = await agent.run(problem, seed=1), await agent.run(problem, seed=1)
        with pytest.raises(rstar2.RolloutFailure, match="reward raised ZeroDivisionError") as error:
            await agent.run("A question without an answer")
    tokenizer: Any = load_tokenizer(tiny_dir)
    prompt: str = tokenizer.decode(rollout.prompt_ids)
    assert prompt.endswith("<|im_start|>assistant\nWell")  # and nothing of another environment
    assert rollout.reward is not None
    assert rollout.reward.value == 0.5
    assert rollout.turns[0].sampled_ids == same.turns[0].sampled_ids
    assert error.value.failure.name == "reward"


async def test_an_agent_that_is_not_open_says_so(tiny_dir: Path) -> None:
    with pytest.raises(rstar2.UserError, match=r"inside of `async with rstar2.Agent"):
        await rstar2.Agent(tiny_dir).run("Twice 3?")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rstar2.UserError, match=r"no config.json here and no exports/ of a run"):
        rstar2.Agent(tmp_path)

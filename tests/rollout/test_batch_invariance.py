"""The tokens of a rollout do not depend on the other rollouts: the basis of Invariant 8."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rstar2.config import SchedulerConfig
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Generation, Sampling

ROLLOUTS = 40


async def rollout(fleet: Fleet, index: int) -> list[Generation]:
    """Two turns with a pause between them, as an agent takes them; four share a prompt."""
    group = index // 4
    prompt = [(7 * i + group) % 700 + 3 for i in range(5 + 5 * group)]
    first = await fleet.generate(
        prompt,
        Sampling(80 - index % 30, seed=index),
        session=f"g{index // 4}/{index}",
        deadline_s=600,
    )
    await asyncio.sleep(0.01 * (index % 5))
    prompt += [*first.token_ids, 5, 6, 7]
    second = await fleet.generate(
        prompt, Sampling(40, seed=index + 1), session=f"g{index // 4}/{index}", deadline_s=600
    )
    await fleet.release(f"g{index // 4}/{index}")
    return [first, second]


@pytest.mark.slow
async def test_logprobs_are_equal_to_the_bit_in_any_company(tiny_dir: Path) -> None:
    engines = [
        EmbeddedEngine(tiny_dir, kv_tokens=32768, max_sequences=64, max_length=256, name=name)
        for name in ("one", "two")
    ]
    fleet = Fleet(engines, Scheduler(SchedulerConfig()))
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        fleet.join("one", 0)
        together = await asyncio.gather(*(rollout(fleet, i) for i in range(ROLLOUTS)))
        alone = [await rollout(fleet, i) for i in range(4)]
        fleet.join("two", 0)
        order = list(range(ROLLOUTS))
        random.Random(0).shuffle(order)
        scattered = dict(
            zip(
                order,
                await asyncio.gather(*(rollout(fleet, i) for i in order)),
                strict=True,
            )
        )
    finally:
        await fleet.close()
    for index, turns in enumerate(together):
        for mine, other in zip(turns, scattered[index], strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.logprobs == other.logprobs
    for index, turns in enumerate(alone):
        assert [t.logprobs for t in turns] == [t.logprobs for t in together[index]]

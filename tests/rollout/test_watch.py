"""A hung engine answers everything but works at nothing: it is found, cut off and brought back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rstar2.config import SchedulerConfig
from rstar2.engine.base import Engine
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.watch import Watchdog
from rstar2.types import Sampling
from tests.rollout.scripted import ScriptedEngine


class Hanging(ScriptedEngine):
    """Tells its load, and neither generates nor scores while it hangs."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if self.hang:
            await asyncio.Event().wait()
        return await super().score(token_ids)


async def test_turns_of_a_hung_engine_run_elsewhere_and_it_comes_back() -> None:
    engines = [Hanging("a"), Hanging("b")]
    engines[0].hang = True

    async def recover(engine: Engine) -> int:
        engines[0].hang = False
        await engine.start()
        return 0

    fleet = Fleet(engines, Scheduler(SchedulerConfig()), recover=recover)
    for engine in engines:
        fleet.join(engine.name, 0)
    hung: list[str] = []
    dog = asyncio.ensure_future(Watchdog(fleet, (1, 2, 3), hang_s=0.2, on_hang=hung.append).run())
    turns = await asyncio.gather(
        *(fleet.generate((1, 2), Sampling(5), session=f"g/{i}", deadline_s=30.0) for i in range(8))
    )
    assert {turn.engine for turn in turns} == {"b"}
    assert hung == ["a"]
    await asyncio.sleep(0.6)
    assert set(fleet.scheduler.engines) == {"a", "b"}
    assert hung == ["a"], "engines that work are left alone"
    dog.cancel()
    await asyncio.gather(dog, return_exceptions=True)
    await fleet.close()

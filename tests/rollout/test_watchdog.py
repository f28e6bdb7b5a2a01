"""A hung engine reports its load but computes nothing: it is detected, ended and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rstar2.config import SchedulerConfig
from rstar2.engine.base import Engine
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.watchdog import Watchdog
from rstar2.types import Sampling
from tests.rollout.scripted import ScriptedEngine, until


class HangingEngine(ScriptedEngine):
    """Reports its load, but while `stuck` it does not score."""

    stuck = False
    scored = 0

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if self.stuck:
            await asyncio.Event().wait()
        self.scored += 1
        return await super().score(token_ids)


async def test_turns_of_a_hung_engine_run_elsewhere_and_it_comes_back() -> None:
    engines = [HangingEngine("a"), HangingEngine("b")]
    engines[0].hang = engines[0].stuck = True

    async def recover(engine: Engine) -> int:
        engines[0].hang = engines[0].stuck = False
        await engine.start()
        return 0

    fleet = Fleet(engines, Scheduler(SchedulerConfig()), recover=recover)
    for engine in engines:
        fleet.join(engine.name, 0)
    hung: list[str] = []
    dog = asyncio.ensure_future(Watchdog(fleet, (1, 2, 3), hang_s=0.2, on_hang=hung.append).run())
    turns = await asyncio.gather(
        *(fleet.generate((1, 2), Sampling(5), session=f"g/{i}", deadline_s=60.0) for i in range(8))
    )
    assert {turn.engine for turn in turns} == {"b"}
    assert hung == ["a"]
    await until(lambda: set(fleet.scheduler.engines) == {"a", "b"})

    for engine in engines:  # both have a long turn to do, and score
        engine.hang, engine.scored = True, 0
    long_turns = [
        asyncio.ensure_future(
            fleet.generate((1, 2), Sampling(5), session=f"h/{i}", deadline_s=60.0)
        )
        for i in range(8)
    ]
    await until(lambda: all(engine.scored >= 3 for engine in engines))
    assert hung == ["a"], "engines that work are left alone"
    for task in [dog, *long_turns]:
        task.cancel()
    await asyncio.gather(dog, *long_turns, return_exceptions=True)
    await fleet.close()


async def test_a_probe_does_not_count_while_this_process_is_late() -> None:
    engine = HangingEngine("a")
    engine.stuck = True
    fleet = Fleet([engine], Scheduler(SchedulerConfig()))
    dog = Watchdog(fleet, (1, 2, 3), hang_s=0.02)
    assert not await dog._works(engine), "this process was in time: the engine hangs"
    probe = asyncio.ensure_future(dog._works(engine))
    await asyncio.sleep(0)
    dog.late_s += 2.0  # as if the event loop had been blocked for two seconds
    assert await probe
    await fleet.close()

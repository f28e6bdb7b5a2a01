"""The fleet: admission, deaths, deadlines, cancellation, and what it reports."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rstar2.config import SchedulerConfig
from rstar2.engine.base import Engine
from rstar2.errors import DeadlineError, EngineError
from rstar2.rollout.fleet import Fleet, usage_metrics
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import Generation, Sampling, WeightVersion
from tests.rollout.scripted import ScriptedEngine, until


def fleet_of(*engines: ScriptedEngine, recover: bool = False) -> Fleet:
    async def restart(engine: Engine) -> WeightVersion:
        await engine.start()
        return 0

    scheduler = Scheduler(SchedulerConfig(policy="worst_case"))
    fleet = Fleet(engines, scheduler, recover=restart if recover else None)
    for engine in engines:
        fleet.join(engine.name, 0)
    return fleet


async def turn(fleet: Fleet, session: str, *, prompt: int = 10, seed: int = 1) -> Generation:
    sampling = Sampling(max_new_tokens=100 - prompt, seed=seed)
    return await fleet.generate((1,) * prompt, sampling, session=session, deadline_s=60.0)


async def rollout(fleet: Fleet, session: str, turns: int) -> list[Generation]:
    made = []
    for index in range(turns):
        made.append(await turn(fleet, session, prompt=10 + 10 * index))
        await asyncio.sleep(0)
    await fleet.release(session)
    return made


async def test_many_rollouts_on_small_engines_stay_within_capacity() -> None:
    engines = ScriptedEngine("a", kv=250), ScriptedEngine("b", kv=320)
    fleet = fleet_of(*engines)
    results = await asyncio.gather(*(rollout(fleet, f"g{i // 4}/{i}", 3) for i in range(20)))
    assert all(len(turns) == 3 for turns in results)
    assert engines[0].peak_running <= 2
    assert engines[1].peak_running <= 3
    for turns in results:
        assert len({t.engine for t in turns}) == 1, "turns stay with their prefix"
    assert sorted(engines[0].released + engines[1].released) == sorted(
        f"g{i // 4}/{i}" for i in range(20)
    )
    use = usage_metrics(fleet.take_usage())
    assert use["engine/turns"] == 60
    assert 0 < use["engine/kv_share"] <= use["engine/kv_peak"] <= 1
    assert usage_metrics(fleet.take_usage())["engine/turns"] == 0


async def test_turns_of_a_dead_engine_run_on_another() -> None:
    dying, healthy = ScriptedEngine("dying"), ScriptedEngine("healthy")
    dying.hang = True
    fleet = fleet_of(dying, healthy)
    tasks = [asyncio.ensure_future(turn(fleet, f"g/{i}", seed=i)) for i in range(8)]
    await until(lambda: bool(dying.running))
    dying.kill()
    results = await asyncio.gather(*tasks)
    assert [r.token_ids[0] for r in results] == list(range(8)), "each got its own seed's answer"
    assert {r.engine for r in results} == {"healthy"}
    assert fleet.scheduler.engines == ("healthy",)
    assert {u.name: u.deaths for u in fleet.take_usage()} == {"dying": 1, "healthy": 0}


async def test_dead_engine_is_brought_back_and_serves_the_waiting() -> None:
    engine = ScriptedEngine("only")
    engine.hang = True
    fleet = fleet_of(engine, recover=True)
    tasks = [asyncio.ensure_future(turn(fleet, f"g/{i}")) for i in range(3)]
    await until(lambda: len(engine.running) >= 3)
    engine.hang = False
    engine.kill()
    assert len(await asyncio.gather(*tasks)) == 3
    assert engine.starts == 1
    await fleet.close()


async def test_last_engine_dead_for_good_fails_every_turn_by_name() -> None:
    engine = ScriptedEngine("only", kv=150)
    engine.hang = True
    fleet = fleet_of(engine)
    tasks = [asyncio.ensure_future(turn(fleet, f"g/{i}")) for i in range(3)]
    await until(lambda: bool(engine.running))
    engine.kill()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineError) for r in results)
    with pytest.raises(EngineError, match="no engine is alive"):
        await turn(fleet, "g/9")


async def test_waiting_longer_than_the_deadline_is_named() -> None:
    engine = ScriptedEngine("only", kv=150)
    engine.hang = True
    fleet = fleet_of(engine)
    first = asyncio.ensure_future(turn(fleet, "g/0"))
    await until(lambda: bool(engine.running))
    with pytest.raises(DeadlineError, match="not placed"):
        await fleet.generate((1,), Sampling(99), session="g/1", deadline_s=0.01)
    await fleet.release("g/1")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await fleet.release("g/0")
    assert fleet.scheduler.budget("only").reserved == 0


async def test_cancelled_turn_makes_room_for_the_next() -> None:
    engine = ScriptedEngine("only", kv=150)
    engine.hang = True
    fleet = fleet_of(engine)
    first = asyncio.ensure_future(turn(fleet, "g/0"))
    second = asyncio.ensure_future(turn(fleet, "g/1"))
    await until(lambda: bool(engine.running))
    engine.hang = False
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await fleet.release("g/0")
    assert (await second).engine == "only"
    assert engine.served == ["g/1"]


async def test_engine_with_old_weights_gets_nothing() -> None:
    old, new = ScriptedEngine("old"), ScriptedEngine("new")
    fleet = fleet_of(old, new)
    fleet.require(1)
    fleet.join("new", 1)
    results = await asyncio.gather(*(turn(fleet, f"g/{i}") for i in range(6)))
    assert {r.engine for r in results} == {"new"}


@pytest.mark.parametrize("seed", range(12))
async def test_deaths_cancellations_and_short_kv_lose_nothing(seed: int) -> None:
    """Invariants 3 and 5 on the real mechanism: every rollout ends once, every token is freed."""
    rng = random.Random(seed)
    engines = [ScriptedEngine(f"e{i}", kv=rng.randint(100, 350)) for i in range(3)]
    fleet = fleet_of(*engines, recover=True)
    ended: Counter[str] = Counter()

    async def one(name: str) -> None:
        try:
            await rollout(fleet, name, rng.randint(1, 4))
            ended[name] += 1
        except EngineError:
            ended[name] += 1
        finally:
            await fleet.release(name)

    async def trouble() -> None:
        for _ in range(4):
            await asyncio.sleep(rng.random() * 0.004)
            rng.choice(engines).kill()

    names = [f"g{i // 5}/{i}" for i in range(30)]
    tasks = {name: asyncio.ensure_future(one(name)) for name in names}
    killer = asyncio.ensure_future(trouble())
    await asyncio.sleep(0.002)
    cancelled = rng.sample(names, 4)
    for name in cancelled:
        tasks[name].cancel()
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks.values(), killer, return_exceptions=True)
    assert all(ended[name] == 1 for name in names if name not in cancelled)
    assert max(ended.values()) == 1
    for name in fleet.scheduler.engines:
        assert fleet.scheduler.budget(name).reserved == 0
    assert not any(engine.running for engine in engines)
    await fleet.close()

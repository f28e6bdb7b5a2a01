"""The fleet: admission, deaths, deadlines, cancellation, and what it reports."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pytest

from rstar2.config import SchedulerConfig
from rstar2.engine.base import Engine
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.rollout.fleet import LOAD_POLL_S, Fleet, usage_metrics
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.turn_clocks import StallError, TurnClocks
from rstar2.rollout.watchdog import Watchdog
from rstar2.types import EngineLoad, Generation, Sampling, WeightVersion
from tests.rollout.scripted import ScriptedEngine, until


def fleet_of(
    *engines: ScriptedEngine,
    recover: bool = False,
    policy: Literal["worst_case", "round_robin"] = "worst_case",
    load_poll_s: float = LOAD_POLL_S,
    stall_s: float = 600.0,
    recoveries: int = 3,
) -> Fleet:
    async def restart(engine: Engine) -> WeightVersion:
        await engine.start()
        return 0

    scheduler = Scheduler(SchedulerConfig(policy=policy, stall_s=stall_s))
    fleet = Fleet(
        engines,
        scheduler,
        recover=restart if recover else None,
        recoveries=recoveries,
        load_poll_s=load_poll_s,
    )
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


async def test_an_engine_that_cannot_be_restarted_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server given by its URL: only its owner can restart it."""

    class Elsewhere(ScriptedEngine):
        async def start(self) -> None:
            if self.starts < 3:
                self.starts += 1
                raise EngineError("its URL does not answer")
            await super().start()

    monkeypatch.setattr("rstar2.rollout.fleet.RESTART_PAUSE_S", 0.001)
    engine = Elsewhere("only")
    fleet = fleet_of(engine, recover=True)
    engine.kill()
    assert (await turn(fleet, "g/0")).engine == "only"
    assert engine.starts == 4
    await fleet.close()


async def test_deaths_count_until_the_engine_finishes_a_turn() -> None:
    engine = ScriptedEngine("only")
    fleet = fleet_of(engine, recover=True, recoveries=1)
    for number in range(4):
        engine.kill()
        assert (await turn(fleet, f"g/{number}")).engine == "only"
    for _ in range(2):
        await until(lambda: "only" in fleet.scheduler.engines)
        fleet.lose("only", EngineError("it dies as soon as it runs"))
    assert not fleet._recovering
    with pytest.raises(EngineError, match="no engine is alive"):
        await turn(fleet, "g/9")
    fleet.restart_missing()  # as a weight update does
    assert (await turn(fleet, "g/10")).engine == "only"
    await fleet.close()


async def test_late_failures_of_a_lost_engine_do_not_end_its_successor() -> None:
    class Slow(ScriptedEngine):
        """Its failures arrive late, as on a busy machine."""

        may_fail = asyncio.Event()

        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
        ) -> Generation:
            try:
                return await super().generate(
                    prompt_ids, sampling, session=session, deadline_s=deadline_s
                )
            except EngineError:
                if session != "g/0":
                    await self.may_fail.wait()
                raise

    engine = Slow("only")
    engine.hang = True
    fleet = fleet_of(engine, recover=True, recoveries=1)
    tasks = [asyncio.ensure_future(turn(fleet, f"g/{i}")) for i in range(8)]
    await until(lambda: len(engine.running) == 8)
    engine.hang = False
    engine.kill()
    assert (await tasks[0]).engine == "only"
    assert engine.starts == 1
    engine.may_fail.set()
    assert {result.engine for result in await asyncio.gather(*tasks)} == {"only"}
    assert (engine.starts, fleet.take_usage()[0].deaths) == (1, 1)
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


async def start_turn(fleet: Fleet, session: str, *, deadline_s: float) -> asyncio.Task[Generation]:
    turn = fleet.generate((1,), Sampling(99), session=session, deadline_s=deadline_s)
    return asyncio.ensure_future(turn)


async def reports(engine: ScriptedEngine, count: int = 5) -> None:
    """Wait for some load reports of an engine."""
    enough = engine.loads + count
    await until(lambda: engine.loads >= enough)


async def test_waiting_for_an_engine_does_not_count_against_the_deadline() -> None:
    engine = ScriptedEngine("only", sequences=1)
    engine.hang = True
    fleet = fleet_of(engine, load_poll_s=0.001)
    first = await start_turn(fleet, "g/0", deadline_s=60.0)
    await until(lambda: bool(engine.running))
    second = await start_turn(fleet, "g/1", deadline_s=0.001)
    await reports(engine, 20)
    assert not second.done()
    engine.hang = False
    first.cancel()
    assert (await second).engine == "only"
    await fleet.close()


async def test_the_deadline_counts_from_the_start_on_the_engine() -> None:
    engine = ScriptedEngine("only", sequences=1)
    engine.hang = True
    fleet = fleet_of(engine, load_poll_s=0.001)
    with pytest.raises(DeadlineError, match="only did not finish a turn of g/0"):
        await fleet.generate((1,), Sampling(99), session="g/0", deadline_s=0.001)
    await fleet.release("g/0")
    assert fleet.scheduler.budget("only").reserved == 0
    await fleet.close()


async def test_turns_that_wait_inside_the_engine_have_not_started() -> None:
    """An engine with two requests, one of which waits: only the first one's deadline runs."""
    engine = ScriptedEngine("only")
    engine.hang, engine.waiting = True, 1
    fleet = fleet_of(engine, policy="round_robin", load_poll_s=0.001)
    first = await start_turn(fleet, "g/0", deadline_s=0.001)
    await until(lambda: "g/0" in engine.running)
    second = await start_turn(fleet, "g/1", deadline_s=0.001)
    with pytest.raises(DeadlineError, match="g/0"):
        await first
    await reports(engine, 20)
    assert not second.done(), "it is the one that waits"
    engine.waiting = 0
    with pytest.raises(DeadlineError, match="g/1"):
        await second
    await fleet.close()


async def test_a_fleet_without_progress_gives_up_waiting_turns() -> None:
    engine = ScriptedEngine("only", sequences=1)
    engine.hang = True
    fleet = fleet_of(engine, load_poll_s=0.001, stall_s=0.05)
    first = await start_turn(fleet, "g/0", deadline_s=60.0)
    await until(lambda: bool(engine.running))
    await reports(engine)
    second = await start_turn(fleet, "g/1", deadline_s=60.0)
    with pytest.raises(StallError, match="no engine made progress"):
        await second
    assert not first.done(), "it has started: its own deadline bounds it"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await fleet.close()


async def test_sampled_tokens_are_progress() -> None:
    clocks = TurnClocks(stall_s=0.0)
    async with clocks.bound("g/0", 60.0) as clock:
        clocks.reported("a", EngineLoad(0, 1, 0, 0, 0, decoded=1), asked=1.0)
        progress = clocks.progress
        clocks.reported("a", EngineLoad(0, 1, 0, 0, 0, decoded=1), asked=2.0)
        assert clocks.progress == progress, "nothing was sampled in between"
        clocks.reported("a", EngineLoad(0, 1, 0, 0, 0, decoded=2), asked=3.0)
        assert clocks.progress > progress
        assert not clock.started


async def test_an_engine_that_does_not_report_cannot_hold_a_turn_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(ScriptedEngine):
        async def load(self) -> EngineLoad:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("rstar2.rollout.fleet.LOAD_DEADLINE_S", 0.01)
    engine = Silent("only")
    engine.hang = True
    fleet = fleet_of(engine, load_poll_s=0.001)
    with pytest.raises(DeadlineError, match="g/0"):
        await fleet.generate((1,), Sampling(99), session="g/0", deadline_s=0.001)
    await fleet.close()


async def test_an_engine_that_cannot_be_asked_for_local_reasons_is_not_lost() -> None:
    class OutOfDescriptors(ScriptedEngine):
        async def load(self) -> EngineLoad:
            raise LocalResourceError("no descriptor is left")

    engine = OutOfDescriptors("only")
    fleet = fleet_of(engine)
    await fleet.poll_load("only")
    assert fleet.scheduler.engines == ("only",)
    assert await Watchdog(fleet, (1, 2), hang_s=60.0)._works(engine)
    await fleet.close()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("a bug")])
async def test_a_restart_that_fails_in_an_unforeseen_way_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No turn waits forever, and the next weight update may try again."""

    class Unstartable(ScriptedEngine):
        async def start(self) -> None:
            if self.starts == 0:
                self.starts += 1
                raise error
            await super().start()

    monkeypatch.setattr("rstar2.rollout.fleet.RESTART_S", 0.0)
    engine = Unstartable("only")
    fleet = fleet_of(engine, recover=True)
    engine.kill()
    with pytest.raises(EngineError, match=r"Too many open files|a bug"):
        await turn(fleet, "g/0")
    assert not fleet._recovering
    with pytest.raises(EngineError, match=r"Too many open files|a bug"):
        await fleet.restarted()
    fleet.restart_missing()
    assert (await turn(fleet, "g/1")).engine == "only"
    await fleet.close()


async def test_a_failed_restart_of_one_engine_does_not_hide_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unstartable(ScriptedEngine):
        async def start(self) -> None:
            raise OSError(24, "Too many open files")

    monkeypatch.setattr("rstar2.rollout.fleet.RESTART_S", 0.0)
    gone, hung = Unstartable("gone"), ScriptedEngine("hung", sequences=1)
    hung.hang = True
    fleet = fleet_of(gone, hung, recover=True, load_poll_s=0.001, stall_s=0.05)
    fleet.lose("gone", EngineError("it died"))
    first = await start_turn(fleet, "g/0", deadline_s=60.0)
    await until(lambda: bool(hung.running))
    with pytest.raises(StallError, match="no engine made progress"):
        await (await start_turn(fleet, "g/1", deadline_s=60.0))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await fleet.close()


async def test_an_engine_that_refuses_to_report_is_polled_again() -> None:
    class Refusing(ScriptedEngine):
        async def load(self) -> EngineLoad:
            await super().load()
            raise UserError("/metrics answered 403")

    engine = Refusing("only")
    engine.hang = True
    fleet = fleet_of(engine, load_poll_s=0.001)
    with pytest.raises(DeadlineError, match="g/0"):
        await fleet.generate((1,), Sampling(99), session="g/0", deadline_s=0.001)
    await reports(engine)
    await fleet.close()


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

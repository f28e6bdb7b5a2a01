"""The first start of engines: one that cannot start or is slow holds nobody up."""

from __future__ import annotations

import asyncio

import pytest

from rstar2.errors import EngineError, UserError
from rstar2.rollout.starting import start_engines
from tests.rollout.scripted import ScriptedEngine


class FailingEngine(ScriptedEngine):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.error = error

    async def start(self) -> None:
        raise self.error


class SlowEngine(ScriptedEngine):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = asyncio.Event()

    async def start(self) -> None:
        await self.ready.wait()
        await super().start()


async def test_a_dead_engine_is_named_and_a_slow_one_still_starts() -> None:
    good, slow = ScriptedEngine("good"), SlowEngine("slow")
    dead = FailingEngine("dead", EngineError("no such server"))
    started = await start_engines([good, dead, slow], straggler_s=0.01)
    assert started.running == [good]
    assert str(started.failed["dead"]) == "no such server"
    slow.ready.set()
    await started.late["slow"]
    assert slow.starts == 1


async def test_without_any_engine_the_first_error_is_raised() -> None:
    engines = [FailingEngine(name, EngineError(f"no {name}")) for name in ("one", "two")]
    with pytest.raises(EngineError, match="no one"):
        await start_engines(engines, straggler_s=0.01)


async def test_wrong_settings_of_one_engine_end_the_start_of_all() -> None:
    slow = SlowEngine("slow")
    engines = [FailingEngine("wrong", UserError("wrong settings")), slow]
    with pytest.raises(UserError, match="wrong settings"):
        await start_engines(engines, straggler_s=0.01)
    slow.ready.set()
    await asyncio.sleep(0)
    assert slow.starts == 0

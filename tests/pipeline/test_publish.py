"""Publishing when engines die: the others are served, the dead ones join when they are proven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rstar2.engine.base import WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.pipeline import runtime as runtime_module
from rstar2.pipeline.runtime import Runtime, open_runtime
from tests.e2e.miniature import miniature
from tests.rollout.scripted import until

pytestmark = pytest.mark.slow


class FragileEngine(EmbeddedEngine):
    """An engine in a thread that dies and hangs on command, and starts again when it may."""

    def __init__(self, model: Path, name: str) -> None:
        super().__init__(
            model, kv_tokens=1024, max_sequences=4, max_length=128, name=name, process=False
        )
        self.dies = self.hangs = self.unstartable = False
        self.unreachable = 0
        """Calls for which this machine has no connection."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.updates: list[int] = []

    async def start(self) -> None:
        await self.may_start.wait()
        if self.unstartable:
            raise EngineError(f"{self.name}: there is no such machine")
        await super().start()

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.unreachable:
            self.unreachable -= 1
            raise LocalResourceError(f"{self.name}: no descriptor is left")
        if self.dies:
            self.dies = False
            await super().close()
            raise EngineError(f"{self.name}: its worker has ended")
        await super().update_weights(update)
        self.updates.append(update.version)


@asynccontextmanager
async def serving(
    tmp_path: Path,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    prepare: Callable[[list[FragileEngine]], None] = lambda engines: None,
    **engine: Any,
) -> AsyncIterator[tuple[Runtime, list[FragileEngine], list[tuple[str, str]]]]:
    """A runtime of the tiny model whose version 1 its engines serve, and its events."""
    recipe = miniature(
        tmp_path / "data", model={"path": str(tiny_dir), "max_length": 128}, engine=engine
    )
    engines = [FragileEngine(tiny_dir, f"engine-{index}") for index in range(count)]
    prepare(engines)
    monkeypatch.setattr(runtime_module, "make_engines", lambda *_: engines)
    # No rollout is run, so there is no tool call.
    monkeypatch.setattr(PythonMath, "needs_sandbox", False)
    events: list[tuple[str, str]] = []

    def notify(event: str, **facts: Any) -> None:
        events.append((event, str(facts.get("part"))))

    async with open_runtime(recipe, tmp_path / "run", notify) as runtime:
        await runtime.publish(1)
        yield runtime, engines, events


def served(runtime: Runtime) -> dict[str, int]:
    """The version that the fleet may use on each engine."""
    states = runtime.fleet.scheduler.state.engines
    return {name: state.version for name, state in states.items()}


async def test_a_dead_engine_stalls_no_publication_and_joins_when_proven(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 3) as (runtime, engines, events):
        engines[1].dies = True
        engines[1].may_start.clear()
        async with runtime.changing_weights():
            assert (await runtime.publish(2))["weights/version"] == 2
            assert served(runtime) == {"engine-0": 2, "engine-2": 2}
        await runtime.publish(3)
        assert served(runtime) == {"engine-0": 3, "engine-2": 3}
        engines[1].may_start.set()
        await until(lambda: served(runtime).get("engine-1") == 3)
        assert engines[1].updates == [1, 3], "it gets the version that the others serve"
        assert events.count(("lost", "engine-1")) == events.count(("back", "engine-1")) == 1
        deaths = {usage.name: usage.deaths for usage in runtime.fleet.take_usage()}
        assert deaths == {"engine-0": 0, "engine-1": 1, "engine-2": 0}
        assert not any(usage.deaths for usage in runtime.fleet.take_usage()), "counted once"


async def test_an_engine_that_returns_during_a_step_is_proven_by_its_publication(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 2) as (runtime, engines, _):
        engines[1].dies = True
        await runtime.publish(2)
        async with runtime.changing_weights():  # a step is learnt: no engine is updated meanwhile
            await until(lambda: "engine-1" in runtime._arrived)
            assert engines[1].updates == [1]
            await runtime.publish(3)
            assert served(runtime) == {"engine-0": 3, "engine-1": 3}
        await runtime.publish(4)
        assert served(runtime) == {"engine-0": 4, "engine-1": 4}
        assert engines[1].updates == [1, 3, 4]


async def test_a_hung_engine_is_given_up_once_the_others_are_proven(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 2, hang_s=0.2) as (runtime, engines, _):
        engines[1].hangs = True
        engines[1].may_start.clear()
        await runtime.publish(2)
        assert served(runtime) == {"engine-0": 2}
        engines[1].hangs = False
        engines[1].may_start.set()
        await until(lambda: served(runtime).get("engine-1") == 2)


async def test_a_local_error_is_not_the_end_of_a_publication(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 2) as (runtime, engines, events):
        engines[1].unreachable = 2
        await runtime.publish(2)
        assert served(runtime) == {"engine-0": 2, "engine-1": 2}
        assert not events, "no engine was lost"
        monkeypatch.setattr("rstar2.http_client.LOCAL_S", 0.0)
        engines[1].unreachable = 1
        await runtime.publish(3)
        assert served(runtime)["engine-0"] == 3
        await until(lambda: served(runtime).get("engine-1") == 3)
        assert events.count(("lost", "engine-1")) == 1


async def test_a_run_starts_with_the_engines_that_can_be_started(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine is gone and one is slow: both join when they are there."""

    def prepare(engines: list[FragileEngine]) -> None:
        engines[1].unstartable = True
        engines[2].may_start.clear()

    monkeypatch.setattr("rstar2.rollout.fleet.RESTART_PAUSE_S", 0.01)
    opened = serving(tmp_path, tiny_dir, monkeypatch, 3, prepare, hang_s=0.2)
    async with opened as (runtime, engines, events):
        assert served(runtime) == {"engine-0": 1}
        assert ("away", "engine-1") in events
        assert ("lost", "engine-2") not in events, "it starts for the first time"
        engines[1].unstartable = False
        engines[2].may_start.set()
        await until(lambda: served(runtime) == dict.fromkeys(runtime.fleet.engines, 1))
        assert engines[2].updates == [1]


async def test_a_run_without_any_engine_or_with_wrong_settings_does_not_start(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(engines: list[FragileEngine]) -> None:
        for engine in engines:
            engine.unstartable = True

    with pytest.raises(EngineError, match="no such machine"):
        async with serving(tmp_path, tiny_dir, monkeypatch, 2, gone):
            pass

    async def refuse() -> None:
        raise UserError("engine.max_sequences: too many")

    def wrong(engines: list[FragileEngine]) -> None:
        engines[0].may_start.clear()  # it is not waited for
        monkeypatch.setattr(engines[1], "start", refuse)

    with pytest.raises(UserError, match="too many"):
        async with serving(tmp_path / "again", tiny_dir, monkeypatch, 2, wrong):
            pass


async def test_one_engine_with_wrong_weights_is_replaced_and_the_others_serve(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 2) as (runtime, engines, events):
        good = engines[1].held_weights

        async def other() -> HeldWeights:
            held = await good()
            return HeldWeights(held.dtype, {name: total + 1 for name, total in held.sums.items()})

        monkeypatch.setattr(engines[1], "held_weights", other)
        engines[1].may_start.clear()
        await runtime.publish(2)
        assert served(runtime) == {"engine-0": 2}, "it gets no turns"
        assert events[0] == ("away", "engine-1")
        monkeypatch.setattr(engines[1], "held_weights", good)
        engines[1].may_start.set()
        await until(lambda: served(runtime).get("engine-1") == 2)


async def test_without_any_engine_it_waits_for_the_first_or_says_why_there_is_none(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tiny_dir, monkeypatch, 2) as (runtime, engines, events):
        for engine in engines:
            engine.dies = True
        async with runtime.changing_weights():
            await runtime.publish(2)
        await until(lambda: served(runtime) == {"engine-0": 2, "engine-1": 2})
        monkeypatch.setattr("rstar2.rollout.fleet.RESTART_S", 0.0)
        for engine in engines:
            engine.dies = engine.unstartable = True
        with pytest.raises(EngineError, match=r"no engine can be started: .*no such machine"):
            await runtime.publish(3)
        assert ("away", "engine-0") in events


@pytest.mark.parametrize(
    ("engine", "learner"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
async def test_engine_and_learner_may_have_different_number_formats(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, engine: str, learner: str
) -> None:
    """The embedded engine computes in `model.dtype`; the tolerance follows from both formats."""
    monkeypatch.setattr(PythonMath, "needs_sandbox", False)
    recipe = miniature(
        tmp_path / "data",
        model={"path": str(tiny_dir), "max_length": 128, "dtype": engine},
        learner={"threads": 1, "dtype": learner},
    )
    async with open_runtime(recipe, tmp_path / "run", lambda *_, **__: None) as runtime:
        first = await runtime.publish(1)
        (served,) = runtime.fleet.engines.values()
        assert (await served.held_weights()).dtype == engine
        second = await runtime.publish(2)
        assert first["weights/tolerance"] == 1.0, "before anything was measured"
        assert second["weights/probe_gap"] < second["weights/tolerance"] < 1.0

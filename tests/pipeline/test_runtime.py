"""The parts of a run: each is closed, also if another fails; engines sleep or are ended."""

from __future__ import annotations

from typing import Any

import pytest

from rstar2.config import Recipe, SchedulerConfig, load_recipe
from rstar2.errors import EngineError
from rstar2.http_client import LocalResourceError
from rstar2.pipeline.runtime import Runtime, scheduling


class Part:
    """Something that is closed, with or without an error."""

    def __init__(self, name: str, closed: list[str], error: Exception | None = None) -> None:
        self.name, self.closed, self.error = name, closed, error

    async def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


@pytest.mark.asyncio
async def test_the_sandbox_is_closed_also_if_the_environment_fails_to() -> None:
    closed: list[str] = []
    runtime: Any = object.__new__(Runtime)
    runtime._starting, runtime._watching, runtime._late = None, None, {}
    runtime._fleet = Part("engines", closed, RuntimeError("an engine hangs"))
    runtime.environment = Part("environment", closed, OSError("a tool server is gone"))
    runtime._tools = Part("sandbox", closed)
    with pytest.raises(OSError, match="a tool server is gone"):
        await runtime.close()
    assert closed == ["engines", "environment", "sandbox"]


class Sleeper:
    """An engine that this machine cannot reach for some calls, or that does not end cleanly."""

    name = "engine-0"

    def __init__(self, unreachable: int) -> None:
        self.unreachable, self.aborts = unreachable, 0

    async def sleep(self) -> None:
        if self.unreachable:
            self.unreachable -= 1
            raise LocalResourceError("no descriptor is left")

    async def abort(self) -> None:
        self.aborts += 1
        raise EngineError("its supervisor is gone")


@pytest.mark.parametrize(("unreachable", "aborts"), [(2, 0), (999, 1)])
async def test_an_engine_that_cannot_be_reached_for_a_moment_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, unreachable: int, aborts: int
) -> None:
    """Its memory is needed, so one that stays unreachable is ended; that may fail, too."""
    monkeypatch.setattr("rstar2.http_client.LOCAL_S", 60.0 if unreachable < 9 else 0.1)
    runtime: Any = object.__new__(Runtime)
    engine: Any = Sleeper(unreachable)
    runtime.recipe = load_recipe("tiny").recipe
    await runtime._or_end({engine: engine.sleep})
    assert engine.aborts == aborts


def test_short_turns_move_only_between_engines_that_are_not_embedded() -> None:
    recipe = Recipe(name="r")
    assert scheduling(recipe).move_steps == 256
    assert scheduling(recipe.model_copy(update={"deterministic": True})).policy == "worst_case"
    asked = recipe.model_copy(update={"scheduler": SchedulerConfig(move_steps=7)})
    assert scheduling(asked).move_steps == 7
    vllm = recipe.engine.model_copy(update={"kind": "vllm"})
    assert scheduling(recipe.model_copy(update={"engine": vllm})).move_steps is None

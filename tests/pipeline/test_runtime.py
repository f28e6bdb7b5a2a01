"""Closing the parts of a run: each is closed, also if another fails."""

from __future__ import annotations

from typing import Any

import pytest

from rstar2.pipeline.runtime import Runtime


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
    runtime._starting = runtime._watching = None
    runtime._fleet = Part("engines", closed, RuntimeError("an engine hangs"))
    runtime.environment = Part("environment", closed, OSError("a tool server is gone"))
    runtime._tools = Part("sandbox", closed)
    with pytest.raises(OSError, match="a tool server is gone"):
        await runtime.close()
    assert closed == ["engines", "environment", "sandbox"]

"""Starts engines without waiting for those that fail or are slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rstar2.engine.base import Engine
from rstar2.errors import InfrastructureError
from rstar2.tasks import all_but_stragglers, cancel_all

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """How the first start of the engines went; at least one of them runs or still starts."""

    running: list[Engine]
    failed: dict[str, InfrastructureError]
    late: dict[str, asyncio.Task[None]]
    """Those that still start: the caller awaits or cancels them."""


async def start_engines(engines: Sequence[Engine], straggler_s: float) -> Started:
    """Start all engines at the same time.

    Raises the first error if none can be started, and at once any error that is not of the
    infrastructure, such as wrong settings.
    """
    starts = {e.name: asyncio.ensure_future(e.start()) for e in engines}
    started = Started([], {}, {})
    try:
        await all_but_stragglers(starts.values(), straggler_s=straggler_s)
        for engine in engines:
            start = starts[engine.name]
            if not start.done():
                log.warning("engine %s is slow to start; the others do not wait", engine.name)
                started.late[engine.name] = start
            elif (error := start.exception()) is None:
                started.running.append(engine)
            elif isinstance(error, InfrastructureError):
                log.warning("engine %s could not be started: %s", engine.name, error)
                started.failed[engine.name] = error
            else:
                raise error
        if len(started.failed) == len(engines):
            raise next(iter(started.failed.values()))
    except BaseException:
        await cancel_all(starts.values())
        raise
    return started

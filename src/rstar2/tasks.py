"""Waiting for several asyncio tasks, and for work that must not be interrupted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all results in order; after an error or a cancellation, cancel the others first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_all(closing: Iterable[Awaitable[None]]) -> None:
    """Close several things at once: each is closed, also if another fails; then raise the first
    error."""
    results = await asyncio.gather(*closing, return_exceptions=True)
    errors = [result for result in results if result is not None]
    for error in errors[1:]:
        log.warning("a second error while closing: %r", error)
    if errors:
        raise errors[0]


async def to_the_end(work: Awaitable[None]) -> None:
    """Finish work that must not be interrupted; a cancellation in that time is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()

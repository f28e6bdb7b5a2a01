"""Waiting for several asyncio tasks, for work that must not be interrupted; when to give up."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from rstar2.errors import InfrastructureError

T = TypeVar("T")

log = logging.getLogger(__name__)

STRAGGLER_FACTOR = 3.0
"""Once half of the tasks have ended, the others have this times as long in total."""
OUTAGE = 8
"""Work that draws many answers fails after this many lost results in a row."""


class LostInARow:
    """Counts lost results in a row: that many are an outage, and more work would only be lost too.

    Several workers share one count.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.count = 0

    def kept(self) -> None:
        """A result has arrived: the outage, if there was one, is over."""
        self.count = 0

    def lost(self, cause: str) -> None:
        """Count a lost result; raises InfrastructureError if it is the last of an outage."""
        self.count += 1
        if self.count >= OUTAGE:
            raise InfrastructureError(
                f"{self.count} {self.what} in a row were lost, the last one to {cause}; "
                "run the same command again to resume"
            )


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all results in order; after an error or a cancellation, cancel the others first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their errors are not raised."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def for_each(items: Sequence[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Do the same work with every item, at most `at_once` of them at a time, in their order."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    await together(worker() for _ in range(min(at_once, len(items))))


async def all_but_stragglers(
    tasks: Collection[asyncio.Task[Any]], *, within_s: float = math.inf, straggler_s: float
) -> set[asyncio.Task[Any]]:
    """Wait for tasks; returns those that are much slower than the others. They still run.

    Once half of those that did not fail have ended, the others have three times as long in total,
    and at least `straggler_s` longer. An error other than InfrastructureError ends the wait at
    once.
    """
    started, failed = time.monotonic(), 0
    ends, pending = started + within_s, set(tasks)
    while pending and (left := ends - time.monotonic()) > 0:
        done, pending = await asyncio.wait(
            pending,
            timeout=None if left == math.inf else left,
            return_when=asyncio.FIRST_COMPLETED,
        )
        errors = [task.exception() for task in done if not task.cancelled()]
        if any(e is not None and not isinstance(e, InfrastructureError) for e in errors):
            break
        failed += sum(e is not None for e in errors)
        took = time.monotonic() - started
        succeeded = len(tasks) - len(pending) - failed
        if succeeded and 2 * succeeded >= len(tasks) - failed:
            ends = min(ends, started + max(STRAGGLER_FACTOR * took, took + straggler_s))
    return pending


async def close_all(closing: Iterable[Awaitable[None]]) -> None:
    """Close several resources concurrently.

    All are closed even if one fails; the first error is raised afterwards.
    """
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

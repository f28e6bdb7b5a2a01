"""The bounded queue in front of the workers: `slots` calls at once, the rest in line, in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from rstar2.errors import DeadlineError, QueueFullError


class Permits:
    """First come, first served. A deadline counts the time in the line."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots = slots
        self.queue = queue
        self.free = slots
        self.mean_s = 0.05
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def busy(self) -> int:
        return self.slots - self.free

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def check(self, admitted: int) -> None:
        """Refuse instead of queueing without bound; `admitted` calls are not answered yet."""
        if admitted >= self.slots + self.queue:
            after = max(0.1, min(30.0, admitted * self.mean_s / self.slots))
            raise QueueFullError(
                f"the queue is full ({self.queue} calls); try again in {after:.1f} s", after
            )

    async def acquire(self, deadline: float | None) -> None:
        """Wait for a permit until `deadline` (monotonic)."""
        if self.free:
            self.free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            if deadline is None:
                await waiter
            else:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self.release()
            else:
                waiter.cancel()
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed in the queue") from None
            raise

    def release(self, spent_s: float | None = None) -> None:
        """Hand the permit to the first in line."""
        if spent_s is not None:
            self.mean_s += 0.05 * (spent_s - self.mean_s)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.free += 1

"""Answers a call from memory if the same program has run before in the same group.

A call takes part only if it names a group (`reuse`); training names none. Calls in other groups
never see each other's results.

Invariants:
- A result is reused only if executing the program again would give the same one: its text passes
  `determinism`, it has no input (stdin, files, session), it ended by itself, and it stayed far
  below every limit.
- Results are those of the interpreters that are alive: a call is a fork of one, and inherits its
  string hashes. When one is started or replaced, everything is forgotten.
- Code, limits and group are the key. Memory is bounded; the results unused for longest go first.
- Equal calls that arrive together are executed once. If that result cannot be reused, the others
  are executed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from rstar2.codeenv.protocol import CallResult, Executor, RunRequest
from rstar2.codeenv.server import determinism
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

_REUSABLE = (Outcome.OK, Outcome.NO_OUTPUT, Outcome.EXCEPTION, Outcome.SYNTAX_ERROR)
_ADDRESS = re.compile(r"0x[0-9a-f]", re.IGNORECASE)
_FAR_BELOW = 0.5
"""A result is kept if it needed less than this share of each limit."""
_OVERHEAD_BYTES = 1024
"""Size of a result in memory in addition to its text."""

ProgramKey = tuple[str, str, Limits, bool]


@dataclasses.dataclass(frozen=True, slots=True)
class ReusableResult:
    """A result and its size, with its key."""

    result: ToolResult
    bytes: int


class ReuseMemory:
    """See the module docstring."""

    def __init__(self, executor: Executor, config: CodeEnvConfig) -> None:
        self.counts: Counter[str] = Counter(hit=0, miss=0, refused=0)
        """Calls that named a group: answered from memory, executed, executed as not reusable."""
        self.bytes = 0
        self._executor = executor
        self._default = config.default
        self._most_bytes = config.reuse_mb << 20
        self._results: OrderedDict[ProgramKey, ReusableResult] = OrderedDict()
        self._running: dict[ProgramKey, asyncio.Future[ToolResult | None]] = {}
        """Programs that are being executed; the result is None if it cannot be reused."""
        self._interpreters = self._alive()

    async def answer(
        self, request: RunRequest, deadline: float, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        """The result of a call that names a group: from memory, or by `execute`."""
        assert request.reuse is not None
        if request.stdin or request.files or request.session is not None or not self._most_bytes:
            self.counts["refused"] += 1
            return await execute()
        key = (request.reuse, request.code, request.limits, request.collect)
        known = await self._lookup(key, deadline)
        if known is not None:
            self.counts["hit"] += 1
            return dataclasses.replace(known, call_id=request.id)
        if determinism.why_not(request.code) is not None:
            self.counts["refused"] += 1
            return await execute()
        self.counts["miss"] += 1
        return await self._execute(key, execute)

    async def _lookup(self, key: ProgramKey, deadline: float) -> ToolResult | None:
        self._forget_replaced()
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key].result
        running = self._running.get(key)
        if running is None:
            return None
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(running)
        except TimeoutError:  # `execute` reports the deadline
            return None

    async def _execute(
        self, key: ProgramKey, execute: Callable[[], Awaitable[CallResult]]
    ) -> CallResult:
        interpreters = self._interpreters
        running: asyncio.Future[ToolResult | None] = asyncio.get_running_loop().create_future()
        self._running.setdefault(key, running)
        reusable: ToolResult | None = None
        try:
            result = await execute()
            self._forget_replaced()
            if isinstance(result, ToolResult) and interpreters == self._interpreters:
                reusable = self._keep(key, result)
            return result
        finally:
            running.set_result(reusable)
            if self._running.get(key) is running:
                del self._running[key]

    def _keep(self, key: ProgramKey, result: ToolResult) -> ToolResult | None:
        """Remember a result; None if it cannot be reused."""
        if not self._is_reusable(result, key[2]):
            return None
        kept = dataclasses.replace(result, queue_s=0.0, attempts=1)
        texts = (*key[:2], *_texts(result))
        size = _OVERHEAD_BYTES + sum(4 * len(text) for text in texts)
        self._drop(key)
        self._results[key] = ReusableResult(kept, size)
        self.bytes += size
        while self.bytes > self._most_bytes:
            self._drop(next(iter(self._results)))
        return kept

    def _drop(self, key: ProgramKey) -> None:
        dropped = self._results.pop(key, None)
        if dropped is not None:
            self.bytes -= dropped.bytes

    def _is_reusable(self, result: ToolResult, limits: Limits) -> bool:
        """True if the program ended by itself, far below its limits, and shows no address."""
        if result.outcome not in _REUSABLE or result.truncated or result.files:
            return False
        if any(_ADDRESS.search(text) for text in _texts(result)):
            return False
        return all(
            used < _FAR_BELOW * (asked or default or 0)
            for used, asked, default in (
                (result.wall_s, limits.wall_s, self._default.wall_s),
                (result.cpu_s, limits.cpu_s, self._default.cpu_s),
                (result.peak_mb, limits.memory_mb, self._default.memory_mb),
            )
        )

    def _alive(self) -> tuple[int, tuple[str, ...]]:
        stats = self._executor.stats()
        return stats.restarts, stats.warm

    def _forget_replaced(self) -> None:
        """Forget everything if an interpreter was started or replaced."""
        alive = self._alive()
        if alive != self._interpreters:
            self._interpreters = alive
            self._results.clear()
            self.bytes = 0


def _texts(result: ToolResult) -> tuple[str, ...]:
    return (result.stdout, result.stderr, result.value or "", result.traceback, result.message)

"""The call table: the one owner of every call on this server, from admission to answer.

    submit -> known id? join or replay -> admission -> queue -> slot -> executor -> answer
                                              +-> reuse: the same program ran in this group

It owns admission, one execution per id, the order of the queue, deadlines, cancellation and
metrics. It knows no HTTP (see `app`), and the executor below it knows no ids, queue or metrics.

Invariants:
- Every admitted call ends exactly once: answered, failed as infrastructure, or abandoned because
  no caller waits for it any more.
- An id is executed once. A request with the id of a running call joins it; a request with the id of
  a finished call gets the remembered result; the same id with different content is a conflict.
- A result is returned only if it carries the id of its request.
- Admission is bounded in calls and in bytes; above the bound a caller is refused with
  retry_after_s.
- At most `slots` calls execute at once; the others wait in order of arrival. Calls of one session
  and its branches execute one after another, and hold no slot while they wait for that.
- Time in the queue counts: a call that exceeds its deadline is infrastructure, not a time-out of
  the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import overload

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.protocol import (
    CallRequest,
    CallResult,
    Executor,
    RunRequest,
    VerifyRequest,
    VerifyResult,
    infrastructure_result,
    is_infrastructure,
    outcome_name,
)
from rstar2.codeenv.server.reuse import ReuseMemory
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.errors import (
    DeadlineError,
    InfrastructureError,
    InvariantError,
    QueueFullError,
    UserError,
)
from rstar2.types import ToolResult

log = logging.getLogger(__name__)

VERSION = version("rstar2")
SHUTTING_DOWN = "the server is shutting down; ask another"

ADMITTED_BYTES = 512 << 20
"""Code and stdin of all admitted calls together."""
REMEMBERED = 8192
REMEMBERED_BYTES = 64 << 20
"""Finished results that are kept for callers that ask again: their number and their text."""


@dataclass(slots=True, eq=False)
class CallEntry:
    """One admitted call and the number of callers that wait for it."""

    request: CallRequest
    task: asyncio.Task[CallResult]
    bytes: int
    admitted: float
    """Loop time."""
    waiters: int = 1


@dataclass(frozen=True, slots=True)
class RememberedResult:
    """A finished call: its result, the hash of its request, and its size in memory."""

    result: CallResult
    request_hash: int
    bytes: int


class Histogram:
    """Counts observations in fixed buckets of seconds."""

    buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.buckets, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class CallMetrics:
    """What the call table counts; `metrics` renders it for Prometheus."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, outcome) -> calls answered."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by error code, of requests and of calls."""
    replayed: int = 0
    """Calls answered with the remembered result of their id."""
    abandoned: int = 0
    """Calls cancelled because no caller waited for them any more."""
    latency: Histogram = field(default_factory=Histogram)
    queued: Histogram = field(default_factory=Histogram)


class CallTable:
    """See the module docstring."""

    def __init__(self, executor: Executor, config: CodeEnvConfig, server: str) -> None:
        self.executor = executor
        self.config = config
        self.server = server
        self.slots = executor.slots
        self.metrics = CallMetrics()
        self.reuse = ReuseMemory(executor, config)
        self.shutting_down = False
        self._entries: dict[str, CallEntry] = {}
        """Calls that a request with the same id can join."""
        self._ending: set[asyncio.Task[CallResult]] = set()
        """Abandoned calls that still hold their slot and bytes until their worker is killed."""
        self._admitted_bytes = 0
        self._free_slots = self.slots
        self._queue: deque[asyncio.Future[None]] = deque()
        self._finished: OrderedDict[str, RememberedResult] = OrderedDict()
        self._finished_bytes = 0
        self._mean_wall_s = 0.01

    # ----------------------------------------------------------------- callers

    @property
    def active(self) -> int:
        """Calls that were admitted and have not ended."""
        return len(self._entries) + len(self._ending)

    @property
    def busy(self) -> int:
        """Slots that are executing a call."""
        return self.slots - self._free_slots

    @property
    def queued(self) -> int:
        """Calls that wait for a slot."""
        return max(0, self.active - self.busy)

    def submit(self, request: CallRequest) -> asyncio.Future[CallResult]:
        """Admit a call, or join or replay the one with its id; raises Refusal.

        A caller must either wait until the future is done or call `leave`.
        """
        entry = self._entries.get(request.id)
        if entry is not None:
            _check_same(request, _request_hash(entry.request))
            entry.waiters += 1
            return entry.task
        loop = asyncio.get_running_loop()
        remembered = self._finished.get(request.id)
        if remembered is not None:
            _check_same(request, remembered.request_hash)
            self._finished.move_to_end(request.id)
            self.metrics.replayed += 1
            replay: asyncio.Future[CallResult] = loop.create_future()
            replay.set_result(remembered.result)
            return replay
        size = _request_size(request)
        self._check_admission(size)
        admitted = loop.time()
        task = loop.create_task(self._execute(request, admitted))
        admitted_entry = CallEntry(request, task, size, admitted)
        self._entries[request.id] = admitted_entry
        self._admitted_bytes += size
        task.add_done_callback(lambda done: self._end(admitted_entry, done))
        return task

    def leave(self, request: CallRequest) -> None:
        """One caller stopped waiting; the call is cancelled if it was the last one.

        Its id is free at once: a later request with the same id is executed again.
        """
        entry = self._entries.get(request.id)
        if entry is None:
            return
        entry.waiters -= 1
        if entry.waiters <= 0:
            del self._entries[request.id]
            self._ending.add(entry.task)
            self.metrics.abandoned += 1
            entry.task.cancel()

    @overload
    async def call(self, request: RunRequest) -> ToolResult: ...

    @overload
    async def call(self, request: VerifyRequest) -> VerifyResult: ...

    async def call(self, request: CallRequest) -> CallResult:
        """Submit and wait; cancellation of the caller leaves the call."""
        future = self.submit(request)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise Refusal("shutting_down", SHUTTING_DOWN) from None
            self.leave(request)
            raise

    # ----------------------------------------------------------------- admission and slots

    def _check_admission(self, size: int) -> None:
        if self.shutting_down:
            raise Refusal("shutting_down", SHUTTING_DOWN)
        if (
            self.active >= self.config.queue + self.slots
            or self._admitted_bytes + size > ADMITTED_BYTES
        ):
            raise Refusal(
                "queue_full",
                f"{self.active} calls are waiting or running and the queue holds "
                f"{self.config.queue}; try again later, or use more servers",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """Time until about a tenth of the queue has been executed."""
        return min(5.0, max(0.05, 0.1 * self.active * self._mean_wall_s / self.slots))

    async def _take_slot(self, deadline: float) -> None:
        """Wait for a slot, in order of arrival, until the deadline."""
        if self._free_slots:
            self._free_slots -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._free_slot()
            else:
                turn.cancel()
                with contextlib.suppress(ValueError):
                    self._queue.remove(turn)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed in the queue") from None
            raise

    def _free_slot(self) -> None:
        """Give the slot to the first call in the queue."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free_slots += 1

    # ----------------------------------------------------------------- execution

    async def _execute(self, request: CallRequest, admitted: float) -> CallResult:
        """Answer from memory if the call allows it, else execute."""
        deadline = admitted + (request.deadline_s or deadlines.DEFAULT_DEADLINE_S)
        if not isinstance(request, RunRequest) or request.reuse is None:
            return await self._execute_in_turn(request, admitted, deadline)
        return await self.reuse.answer(
            request, deadline, lambda: self._execute_in_turn(request, admitted, deadline)
        )

    async def _execute_in_turn(
        self, request: CallRequest, admitted: float, deadline: float
    ) -> CallResult:
        """Wait for a slot and execute; failures of the service become an infrastructure result."""
        turn = self.executor.turn(request) if isinstance(request, RunRequest) else None
        try:
            if turn is None:
                return await self._execute_in_slot(request, admitted, deadline)
            async with asyncio.timeout_at(deadline) as waiting, turn:
                waiting.reschedule(None)
                return await self._execute_in_slot(request, admitted, deadline)
        except TimeoutError:
            message = "deadline: the deadline passed before earlier calls of the session ended"
            return self._infrastructure(request, admitted, message)

    async def _execute_in_slot(
        self, request: CallRequest, admitted: float, deadline: float
    ) -> CallResult:
        budget_s = request.deadline_s or deadlines.DEFAULT_DEADLINE_S
        try:
            await self._take_slot(deadline)
        except DeadlineError as error:
            return self._infrastructure(request, admitted, f"{error.name}: {error}")
        queue_s = asyncio.get_running_loop().time() - admitted
        try:
            async with asyncio.timeout_at(deadline + deadlines.CALL_TABLE_GRACE_S):
                if isinstance(request, RunRequest):
                    run = await self.executor.run(request, deadline)
                    _check_id(request.id, run.call_id)
                    return dataclasses.replace(run, server=self.server, queue_s=queue_s)
                verify = await self.executor.verify(request, deadline)
                _check_id(request.id, verify.id)
                return verify
        except TimeoutError:
            message = f"the deadline of {budget_s:g} s passed before a result"
            return self._infrastructure(request, admitted, message)
        except QueueFullError as error:
            raise Refusal(
                "queue_full", str(error), retry_after_s=error.retry_after_s or self._retry_after_s()
            ) from error
        except InfrastructureError as error:
            return self._infrastructure(request, admitted, f"{error.name}: {error}")
        except UserError as error:
            if isinstance(request, RunRequest) and request.session is not None:
                raise Refusal("not_found", str(error), "session") from error
            raise Refusal("invalid", str(error)) from error
        finally:
            self._free_slot()

    def _infrastructure(self, request: CallRequest, admitted: float, message: str) -> CallResult:
        result = infrastructure_result(request, message, self.server)
        if isinstance(result, ToolResult):
            waited_s = asyncio.get_running_loop().time() - admitted
            return dataclasses.replace(
                result, queue_s=waited_s, isolation=self.executor.stats().isolation
            )
        return result

    def _end(self, entry: CallEntry, task: asyncio.Task[CallResult]) -> None:
        """Release what the call held; count and remember its result."""
        request = entry.request
        if self._entries.get(request.id) is entry:
            del self._entries[request.id]
        self._ending.discard(task)
        self._admitted_bytes -= entry.bytes
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, Refusal):
                log.error("call %s failed unexpectedly", request.id, exc_info=error)
            return
        result = task.result()
        self.metrics.latency.observe(asyncio.get_running_loop().time() - entry.admitted)
        kind = "run" if isinstance(request, RunRequest) else "verify"
        self.metrics.calls[kind, outcome_name(result)] += 1
        if isinstance(result, ToolResult):
            self.metrics.queued.observe(result.queue_s)
        self._mean_wall_s += 0.02 * (result.wall_s - self._mean_wall_s)
        if not is_infrastructure(result):
            self._remember(request, result)

    def _remember(self, request: CallRequest, result: CallResult) -> None:
        size = 256 + _result_size(result)
        self._finished[request.id] = RememberedResult(result, _request_hash(request), size)
        self._finished_bytes += size
        while len(self._finished) > REMEMBERED or self._finished_bytes > REMEMBERED_BYTES:
            _, dropped = self._finished.popitem(last=False)
            self._finished_bytes -= dropped.bytes

    # ----------------------------------------------------------------- health and shutdown

    def health(self) -> wire.Health:
        """What this server reports about itself."""
        stats = self.executor.stats()
        completed: Counter[str] = Counter()
        for (kind, outcome), count in self.metrics.calls.items():
            if kind == "run":
                completed[outcome] += count
        return wire.Health(
            status="shutting_down" if self.shutting_down else "ok",
            server=self.server,
            version=VERSION,
            isolation=stats.isolation,
            slots=self.slots,
            busy=self.busy,
            queued=self.queued,
            queue=self.config.queue,
            sessions=stats.sessions,
            restarts=stats.restarts,
            warm=list(stats.warm),
            packages=list(stats.packages),
            completed=dict(completed),
            default=self.config.default,
            cap=self.config.cap,
        )

    def _tasks(self) -> list[asyncio.Task[CallResult]]:
        return [*(entry.task for entry in self._entries.values()), *self._ending]

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, wait for the running ones, cancel the rest after the grace."""
        self.shutting_down = True
        tasks = self._tasks()
        if tasks and grace_s > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks, timeout=grace_s)
        self.abort()

    def abort(self) -> None:
        """Cancel every call; their callers are answered that the server is shutting down."""
        self.shutting_down = True
        for task in self._tasks():
            task.cancel()

    async def close(self, grace_s: float) -> None:
        """Drain, then wait until no call holds a worker."""
        await self.drain(grace_s)
        await asyncio.gather(*self._tasks(), return_exceptions=True)


def _check_id(asked: str, answered: str) -> None:
    if asked != answered:
        raise InvariantError(
            f"the executor answered call {asked!r} with the result of {answered!r}"
        )


def _check_same(request: CallRequest, request_hash: int) -> None:
    if _request_hash(request) != request_hash:
        raise Refusal(
            "conflict",
            f"id: {request.id!r} was already used for another request; use a new id per call",
            "id",
        )


def _request_hash(request: CallRequest) -> int:
    """Equal for two requests that are the same call; the deadline does not count."""
    if isinstance(request, RunRequest):
        files = hash(frozenset(request.files.items())) if request.files else 0
        call = ("run", request.code, request.stdin, request.limits, request.session)
        return hash((*call, files, request.collect))
    return hash(("verify", request.function, wire.encode(request.arguments)))


def _request_size(request: CallRequest) -> int:
    if isinstance(request, RunRequest):
        return len(request.code) + len(request.stdin) + sum(map(len, request.files.values()))
    return len(wire.encode(request.arguments))


def _result_size(result: CallResult) -> int:
    if isinstance(result, ToolResult):
        return (
            len(result.stdout) + len(result.stderr) + len(result.traceback)
            + len(result.value or "") + len(result.message)
            + sum(map(len, result.files.values()))
        )  # fmt: skip
    return len(result.message) + len(wire.encode(result.value))

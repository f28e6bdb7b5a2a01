"""What the service promises about a call, whoever transports it; knows no HTTP.

Invariants:
- Every admitted call ends exactly once: answered, failed as infrastructure, or abandoned because
  nobody waited for it any more.
- An id is executed once: asking again while it runs joins the same execution, asking again later
  gets the remembered result; the same id with another request is a conflict, never an answer.
- A result is handed on only if it carries the id of its request.
- Admission is bounded in calls and in bytes; beyond it a caller is refused with retry_after_s.
- Time in the queue counts: a call that ran out of its budget is infrastructure, not a time-out of
  the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict
from dataclasses import dataclass
from importlib.metadata import version

from rstar2.codeenv import wire
from rstar2.codeenv.protocol import Executor, RunRequest
from rstar2.codeenv.results import failure, infrastructure, outcome
from rstar2.codeenv.server.metrics import Metrics
from rstar2.codeenv.wire import Refusal, Request, Result
from rstar2.config import CodeEnvConfig
from rstar2.errors import InfrastructureError, InvariantError, QueueFullError, UserError
from rstar2.types import ToolResult

log = logging.getLogger(__name__)

VERSION = version("rstar2")

ADMITTED_BYTES = 512 << 20
"""Code and stdin of all admitted calls together."""
REMEMBERED = 8192
REMEMBERED_BYTES = 64 << 20
"""How many finished results are kept for callers that ask again, and their text together."""
DEADLINE_SLACK_S = 1.0
"""The executor keeps the deadline; the service steps in this much later."""


@dataclass(slots=True)
class _Entry:
    request: Request
    task: asyncio.Task[Result]
    waiters: int
    bytes: int
    started_s: float


class Service:
    """Admission, idempotence, deadlines and figures around an Executor."""

    def __init__(self, executor: Executor, config: CodeEnvConfig, server: str) -> None:
        self.executor = executor
        self.config = config
        self.server = server
        self.metrics = Metrics()
        self.shutting_down = False
        self._slots = max(1, executor.stats().slots)
        self._running: dict[str, _Entry] = {}
        self._running_bytes = 0
        self._finished: OrderedDict[str, tuple[int, Result, int]] = OrderedDict()
        self._finished_bytes = 0
        self._mean_wall_s = 0.01

    # ----------------------------------------------------------------- calls

    @property
    def active(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> asyncio.Task[Result]:
        """Admit a call, or join or replay the one with its id; raises Refusal.

        Whoever submitted must either see the task end or call `leave`.
        """
        size = _size(request)
        entry = self._running.get(request.id)
        if entry is not None:
            _check_same(request, hash(_key(entry.request)))
            entry.waiters += 1
            return entry.task
        known = self._finished.get(request.id)
        if known is not None:
            _check_same(request, known[0])
            self._finished.move_to_end(request.id)
            self.metrics.replayed += 1
            return asyncio.ensure_future(_replay(known[1]))
        self._admit(size)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._execute(request))
        self._running[request.id] = _Entry(request, task, 1, size, loop.time())
        self._running_bytes += size
        task.add_done_callback(lambda done: self._end(request, done))
        return task

    def leave(self, request: Request) -> None:
        """One caller stopped waiting; the call is cancelled when it was the last."""
        entry = self._running.get(request.id)
        if entry is None:
            return
        entry.waiters -= 1
        if entry.waiters <= 0:
            self.metrics.abandoned += 1
            entry.task.cancel()

    async def call(self, request: Request) -> Result:
        """Submit and wait; leaving early (cancellation) abandons the call."""
        task = self.submit(request)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refusal("shutting_down", "the server is shutting down; ask another") from None
            self.leave(request)
            raise

    def _admit(self, size: int) -> None:
        if self.shutting_down:
            raise Refusal("shutting_down", "the server is shutting down; ask another")
        if (
            self.active >= self.config.queue + self._slots
            or self._running_bytes + size > ADMITTED_BYTES
        ):
            raise Refusal(
                "queue_full",
                f"{self.active} calls are waiting or running and the queue holds "
                f"{self.config.queue}; try again later, or use more servers",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """Until about a tenth of what is queued has been worked off."""
        return min(5.0, max(0.05, 0.1 * self.active * self._mean_wall_s / self._slots))

    async def _execute(self, request: Request) -> Result:
        budget_s = request.deadline_s or wire.DEFAULT_DEADLINE_S
        try:
            async with asyncio.timeout(budget_s + DEADLINE_SLACK_S):
                if isinstance(request, RunRequest):
                    run = await self.executor.run(request)
                    _check_id(request.id, run.call_id)
                    return dataclasses.replace(run, server=self.server)
                verify = await self.executor.verify(request)
                _check_id(request.id, verify.id)
                return verify
        except TimeoutError:
            message = f"the deadline of {budget_s:g} s passed before a result"
            return failure(request, message, self.server)
        except QueueFullError as error:
            raise Refusal(
                "queue_full", str(error), retry_after_s=error.retry_after_s or self._retry_after_s()
            ) from error
        except InfrastructureError as error:
            return failure(request, f"{error.name}: {error}", self.server)
        except UserError as error:
            if isinstance(request, RunRequest) and request.session is not None:
                raise Refusal("not_found", str(error), "session") from error
            raise Refusal("invalid", str(error)) from error

    def _end(self, request: Request, task: asyncio.Task[Result]) -> None:
        entry = self._running.pop(request.id)
        self._running_bytes -= entry.bytes
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, Refusal):
                log.error("call %s failed unexpectedly", request.id, exc_info=error)
            return
        result = task.result()
        elapsed_s = asyncio.get_running_loop().time() - entry.started_s
        self.metrics.latency.observe(elapsed_s)
        self.metrics.calls[_kind(request), outcome(result)] += 1
        if isinstance(result, ToolResult):
            self.metrics.queued.observe(result.queue_s)
        self._mean_wall_s += 0.02 * (result.wall_s - self._mean_wall_s)
        if not infrastructure(result):
            self._remember(request, result)

    def _remember(self, request: Request, result: Result) -> None:
        size = 256 + _result_size(result)
        self._finished[request.id] = (hash(_key(request)), result, size)
        self._finished_bytes += size
        while len(self._finished) > REMEMBERED or self._finished_bytes > REMEMBERED_BYTES:
            _, (_, _, freed) = self._finished.popitem(last=False)
            self._finished_bytes -= freed

    # ----------------------------------------------------------------- life

    def health(self) -> wire.Health:
        stats = self.executor.stats()
        return wire.Health(
            status="shutting_down" if self.shutting_down else "ok",
            server=self.server,
            version=VERSION,
            isolation=stats.isolation,
            slots=stats.slots,
            busy=stats.busy,
            queued=stats.queued,
            queue=self.config.queue,
            sessions=stats.sessions,
            restarts=stats.restarts,
            warm=list(stats.warm),
            completed=dict(stats.completed),
            default=self.config.default,
            cap=self.config.cap,
        )

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, wait for those that run, cancel what is left after the grace."""
        self.shutting_down = True
        tasks = [entry.task for entry in self._running.values()]
        if tasks and grace_s > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks, timeout=grace_s)
        self.abort()

    def abort(self) -> None:
        """Cancel every call; their callers are told that the server is shutting down."""
        self.shutting_down = True
        for entry in list(self._running.values()):
            entry.task.cancel()


def _check_id(asked: str, got: str) -> None:
    if asked != got:
        raise InvariantError(f"the executor answered call {asked!r} with the result of {got!r}")


def _check_same(request: Request, key: int) -> None:
    if hash(_key(request)) != key:
        raise Refusal(
            "conflict",
            f"id: {request.id!r} was already used for another request; use a new id per call",
            "id",
        )


def _key(request: Request) -> tuple[object, ...]:
    """What makes two requests the same call; the deadline does not."""
    if isinstance(request, RunRequest):
        return ("run", request.code, request.stdin, request.limits, request.session)
    return ("verify", request.function, wire.encode(request.arguments))


def _kind(request: Request) -> str:
    return "run" if isinstance(request, RunRequest) else "verify"


def _size(request: Request) -> int:
    if isinstance(request, RunRequest):
        return len(request.code) + len(request.stdin)
    return len(wire.encode(request.arguments))


def _result_size(result: Result) -> int:
    if isinstance(result, ToolResult):
        return (
            len(result.stdout) + len(result.stderr) + len(result.traceback)
            + len(result.value or "") + len(result.message)
        )  # fmt: skip
    return len(result.message) + len(wire.encode(result.value))


async def _replay(result: Result) -> Result:
    return result

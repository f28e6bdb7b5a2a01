"""Executes an admitted call on a warm, jailed worker. Implements protocol.Executor.

    run/verify -> worker of the right kind -> ask -> result      (a lost worker: once more)

Workers are kept by key (flavour and the limits their jail was built with) and made on demand, so a
call with unusual limits gets a jail of its own and the usual ones never wait for it. The call
table in `calls` decides which calls run, when, and how many at once.

Invariants
- A worker runs one call at a time.
- A lost worker or zygote is replaced. The call is tried once more, then it is reported as
  infrastructure, never as the program's failure. A worker killed for memory is the program's
  failure.
- Nothing here blocks the event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import cgroups, files, frames, handover, verify, warmup
from rstar2.codeenv.jail.frames import Record, WorkerReply, WorkerRequest
from rstar2.codeenv.protocol import (
    ExecutorStats,
    RunRequest,
    SessionInfo,
    VerifyRequest,
    VerifyResult,
)
from rstar2.codeenv.server import packages, selfcheck
from rstar2.codeenv.server.sessions import Sessions, memory_kill
from rstar2.codeenv.server.workers import WorkerPool
from rstar2.codeenv.server.zygotes import WorkerLostError
from rstar2.config import CodeEnvConfig
from rstar2.config.codeenv import effective_limits
from rstar2.errors import CodeEnvError, DeadlineError, IsolationError, UserError
from rstar2.machine import usable_cores
from rstar2.types import Limits, Outcome, ToolResult, Truncation

_log = logging.getLogger(__name__)

_HANDOVER_MOST_S = 4 * handover.HANDOVER_S
"""A call that used more CPU time is run to its end where it is sent next."""

WorkerAnswer = tuple[WorkerReply, bytes, bool]
"""The worker's reply, the streams, and whether the kernel killed the call for memory."""

Attempt = Callable[[WorkerRequest, float], Awaitable[WorkerAnswer]]
"""One attempt at a call before a deadline (monotonic)."""


class WorkerExecutor:
    """See the module docstring. `isolation` is a level that `probe.resolve` found possible."""

    def __init__(
        self,
        config: CodeEnvConfig,
        isolation: str,
        functions: Mapping[str, str] | None = None,
    ) -> None:
        if isolation not in ("strict", "portable"):
            raise IsolationError(f"isolation {isolation!r}: the executor takes strict or portable")
        self.config = config
        self.functions = dict(verify.FUNCTIONS if functions is None else functions)
        self.slots = config.slots or usable_cores() + 1
        self.fallback = ""
        """Why the level is weaker than the one that was chosen; empty if it is not."""
        self.setup = packages.InterpreterSetup()
        """What `start` prepares for the interpreters of programs."""
        self._build(isolation)
        self._numbers = itertools.count(1)
        self._lost = 0
        self._closing = False

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Warm up, build a first jail and check that every limit holds in it.

        If `auto` chose strict and it does not hold, portable is used instead, with a warning and
        the reason in `fallback`. If strict was requested, IsolationError names what does not hold.
        """
        try:
            self.setup = await packages.prepare(self.config)
            self._build(self.isolation)
            try:
                await self._warm_up()
            except IsolationError as error:
                if self.isolation != "strict" or self.config.isolation != "auto":
                    raise
                self.fallback = str(error)
                _log.warning("isolation falls back from strict to portable: %s", error)
                await self.workers.close()
                self._build("portable")
                await self._warm_up()
        except BaseException:
            await self.close()
            raise
        self.workers.start_others()

    def _build(self, isolation: str) -> None:
        self.isolation = isolation
        self.workers = WorkerPool(
            isolation, self.slots, self.functions, self.config.warm_up, self.setup
        )
        config = self.config
        self._standard = effective_limits(Limits(), config.default, config.cap)
        session_limits = replace(
            self._standard,
            memory_mb=config.session_memory_mb,
            scratch_mb=config.session_scratch_mb,
            cpu_s=config.cap.cpu_s,
        )
        self._sessions = Sessions(config, self.workers, session_limits)

    async def _warm_up(self) -> None:
        await self.workers.start()
        await selfcheck.check(self)

    async def close(self) -> None:
        """End every worker and session; leave no process, mount or file."""
        self._closing = True
        self._sessions.drop_all()
        await self.workers.close()
        await asyncio.to_thread(packages.discard, self.setup)

    def stats(self) -> ExecutorStats:
        """Isolation level, sessions, restarts and warm flavours."""
        return ExecutorStats(
            isolation=self.isolation,
            sessions=len(self._sessions),
            restarts=self._lost + self.workers.restarts,
            warm=tuple(filter(self.workers.warm, warmup.flavours(self.setup.packages))),
            packages=self.setup.packages,
        )

    # ------------------------------------------------------------------ sessions

    async def open_session(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        """A fresh interpreter that keeps its state across calls."""
        return await self._sessions.open(session, ttl_s)

    async def branch_session(self, session: str, branch: str | None) -> SessionInfo:
        """A copy of a session's state under another id."""
        return await self._sessions.branch(session, branch)

    async def close_session(self, session: str) -> None:
        """End a session now."""
        await self._sessions.close(session)

    # ------------------------------------------------------------------ calls

    def turn(self, request: RunRequest) -> AbstractAsyncContextManager[None] | None:
        """The call's turn among those of its session and branches; None for a plain call."""
        return None if request.session is None else self._sessions.turn(request.session)

    async def run(self, request: RunRequest, deadline: float) -> ToolResult:
        """Execute a program before a deadline (monotonic)."""
        limits = effective_limits(request.limits, self.config.default, self.config.cap)
        code, stdin = (t.encode("utf-8", "surrogatepass") for t in (request.code, request.stdin))
        if len(code) + len(stdin) > frames.MAX_BODY:
            raise UserError(
                f"code and stdin take {len(code) + len(stdin)} bytes; at most {frames.MAX_BODY}"
            )
        header = self._header(frames.RUN, limits, len(code), len(stdin))
        parts: tuple[bytes, ...] = (code, stdin)
        if request.files or request.collect:
            packed = files.pack(request.files, limits.scratch_mb or 0)
            parts = (code, stdin, packed)
            header = header._replace(files=len(packed), collect=int(request.collect))
        try:
            if request.session is None:
                attempts, answer = await self._run_warm(limits, parts, header, deadline)
            else:
                limits = replace(
                    limits,
                    memory_mb=self.config.session_memory_mb,
                    scratch_mb=self.config.session_scratch_mb,
                )
                attempt = self._in_session(request.session, parts)
                attempts, answer = await self._attempt(attempt, 1, header, deadline)
        except (WorkerLostError, DeadlineError, IsolationError) as error:
            failed = Outcome.INFRASTRUCTURE
            return ToolResult(request.id, failed, message=str(error), isolation=self.isolation)
        reply, body, oom = answer
        result = build_result(request.id, reply, body, limits, self.isolation, oom, attempts)
        if reply.cause == frames.WALL and reply.wall_s < 0.99 * (limits.wall_s or 0.0):
            # The caller's deadline ended the program, not its own limit: not the program's fault.
            budget_s = request.deadline_s or deadlines.DEFAULT_DEADLINE_S
            message = (
                f"The deadline of {budget_s:g} s passed after {reply.wall_s:.2f} s of running."
            )
            return replace(result, outcome=Outcome.INFRASTRUCTURE, message=message)
        return result

    async def _run_warm(
        self, limits: Limits, parts: tuple[bytes, ...], header: WorkerRequest, deadline: float
    ) -> tuple[int, WorkerAnswer]:
        """A plain call in the flavour that its text needs; in a warmer one if it is handed over.

        The record of a hand-over is untrusted. Each step but the last leads to a warmer flavour,
        so a program can claim it a few times only; after it has used more CPU time, only once.
        """
        flavour = self.workers.flavour_for(parts[0])
        while True:
            attempt = self._on_any_worker(flavour, limits, parts)
            attempts, answer = await self._attempt(attempt, 2, header, deadline)
            module = _handed_over(header, answer)
            if module is None:
                return attempts, answer
            warmer = warmup.warmer(flavour, module, self.setup.packages)
            quick = answer[0].cpu_s <= _HANDOVER_MOST_S
            if warmer is None or not quick or not self.workers.warm(warmer):
                header = header._replace(kind=frames.RUN_HERE)
            if warmer is not None and self.workers.warm(warmer):
                flavour = warmer

    async def verify(self, request: VerifyRequest, deadline: float) -> VerifyResult:
        """Call a trusted function by name before a deadline (monotonic)."""
        if request.function not in self.functions:
            known = ", ".join(sorted(self.functions))
            text = f"no function {request.function!r}; there are: {known}"
            return VerifyResult(request.id, error="unknown_function", message=text)
        limits = effective_limits(
            Limits(wall_s=request.deadline_s, cpu_s=request.deadline_s),
            self.config.default,
            self.config.cap,
        )
        order = {"function": request.function, "arguments": dict(request.arguments)}
        code = json.dumps(order).encode()
        header = self._header(frames.VERIFY, limits, len(code), 0)
        attempt = self._on_any_worker("verify", self._standard, (code,))
        try:
            attempts, (reply, body, oom) = await self._attempt(attempt, 2, header, deadline)
        except (WorkerLostError, DeadlineError, IsolationError) as error:
            return VerifyResult(
                request.id, error=error.name, message=str(error), infrastructure=True
            )
        return verify_result(request.id, reply, body, limits, oom, attempts)

    def _header(self, kind: int, limits: Limits, code: int, stdin: int) -> WorkerRequest:
        return WorkerRequest(
            seq=next(self._numbers),
            kind=kind,
            name=0,
            code=code,
            stdin=stdin,
            memory_mb=limits.memory_mb or 0,
            processes=limits.processes or 0,
            file_mb=limits.file_mb or 0,
            output_chars=limits.output_chars or 0,
            wall_s=limits.wall_s or 0.0,
            cpu_s=limits.cpu_s or 0.0,
        )

    async def _attempt(
        self, attempt: Attempt, tries: int, header: WorkerRequest, deadline: float
    ) -> tuple[int, WorkerAnswer]:
        """Make up to `tries` attempts; only a lost worker leads to another one."""
        for number in itertools.count(1):
            if self._closing:
                raise CodeEnvError("the executor is closing")
            try:
                return number, await attempt(header, deadline)
            except WorkerLostError:
                self._lost += 1
                if number == tries:
                    raise
        raise AssertionError("unreachable")

    def _on_any_worker(self, flavour: str, limits: Limits, parts: tuple[bytes, ...]) -> Attempt:
        """A plain call: on any worker whose jail fits."""

        async def attempt(header: WorkerRequest, deadline: float) -> WorkerAnswer:
            try:
                async with asyncio.timeout_at(deadline):
                    link = await self.workers.take(flavour, limits)
            except TimeoutError:
                raise DeadlineError("the deadline passed before a worker was ready") from None
            try:
                reply, body = await link.ask(_within(header, deadline), parts)
            except WorkerLostError:
                self.workers.drop(link)
                if await link.killed_for_memory():
                    return memory_kill(header), b"", True
                raise
            except BaseException:
                self.workers.drop(link)
                raise
            killed = os.WIFSIGNALED(reply.status) and reply.cause == frames.EXITED
            oom = killed and cgroups.oom_kills(link.spec.group) > link.oom_seen
            if oom:
                link.oom_seen = cgroups.oom_kills(link.spec.group)
            if reply.retire:
                self.workers.drop(link)
            else:
                self.workers.give_back(link)
            return reply, body, oom

        return attempt

    def _in_session(self, session: str, parts: tuple[bytes, ...]) -> Attempt:
        """A session's call: in the session's own worker, never twice."""

        async def attempt(header: WorkerRequest, deadline: float) -> WorkerAnswer:
            return await self._sessions.run(session, header, parts, deadline)

        return attempt


def _handed_over(header: WorkerRequest, answer: WorkerAnswer) -> str | None:
    """The module that a call was given up for (see jail/handover.py); None if it ended."""
    reply, body, _ = answer
    if header.kind != frames.RUN or reply.status != handover.EXIT_CODE << 8:
        return None
    record = Record.parse(reply.record_in(body))
    return record.message if record is not None and record.kind == frames.HANDOVER else None


def _within(header: WorkerRequest, deadline: float) -> WorkerRequest:
    """The header with its wall limit cut to the time that the caller's deadline leaves."""
    left_s = deadline - time.monotonic()
    if left_s >= header.wall_s:
        return header
    return header._replace(wall_s=max(0.001, left_s))


# --------------------------------------------------------------------------- replies to results
# What was observed from outside (limits exceeded, wait status) decides the outcome first. The
# child's own record counts only if it ended by itself.


def clip(text: str, limit: int, already_cut: int = 0) -> tuple[str, int]:
    """Cut the middle of a text to `limit` characters; the marker says how many are missing."""
    if len(text) <= limit and not already_cut:
        return text, 0
    head, tail = (limit + 1) // 2, limit // 2
    if len(text) <= limit:
        head, tail = (len(text) + 1) // 2, len(text) // 2
    cut = len(text) - head - tail + already_cut
    end = text[len(text) - tail :] if tail else ""
    return f"{text[:head]}\n[... {cut} characters cut ...]\n{end}", cut


def limits_hit(reply: WorkerReply, limits: Limits) -> tuple[Outcome, str] | None:
    """Outcome and message of a call that the worker ended."""
    cause = reply.cause
    if cause == frames.WALL:
        return Outcome.TIMEOUT, f"Timed out after {limits.wall_s:g} s."
    if cause == frames.CPU:
        return Outcome.TIMEOUT, f"Used more than {limits.cpu_s:g} s of CPU time."
    if cause == frames.OUTPUT:
        cap = frames.output_cap(limits.output_chars or 0)
        return Outcome.OUTPUT_LIMIT, f"Stopped after printing more than {cap} bytes."
    if cause == frames.SCRATCH:
        return Outcome.KILLED, (
            f"Stopped: its files took more than {limits.scratch_mb} MB or could not be counted."
        )
    if cause == frames.NOT_STOPPED:
        return Outcome.KILLED, "Rolled back: a thread did not stop; it waits for a child in vfork."
    if cause == frames.NO_ROOM:
        return Outcome.KILLED, (
            "Not run: the session holds too many threads or files, or too much memory "
            f"({os.strerror(reply.status)}). Its state is unchanged; open a new session."
        )
    if cause == frames.BROKEN:
        return Outcome.KILLED, (
            "Not run: an earlier call of this session broke its interpreter; its state is lost. "
            "Open a new session."
        )
    if cause == frames.FILES:
        reason = f"its files could not be written ({os.strerror(reply.status)}); rename them"
        if reply.status in (errno.ENOSPC, errno.EDQUOT):
            reason = f"its files do not fit into the scratch space of {limits.scratch_mb} MB"
        return Outcome.BAD_ARGUMENTS, f"Not run: {reason}."
    return None


def status_of(
    reply: WorkerReply, record: Record | None, limits: Limits, oom: bool
) -> tuple[Outcome, str]:
    """Outcome and message of a call that ended by itself, before output is looked at."""
    if os.WIFSIGNALED(reply.status):
        number = os.WTERMSIG(reply.status)
        if oom:
            return Outcome.MEMORY, f"Used more than {limits.memory_mb} MB of memory."
        if number in (signal.SIGKILL, signal.SIGXCPU) and reply.cpu_s >= (limits.cpu_s or 0):
            return Outcome.TIMEOUT, f"Used more than {limits.cpu_s:g} s of CPU time."
        name = signal.Signals(number).name if number in _SIGNALS else f"signal {number}"
        return Outcome.KILLED, f"The process was killed by {name}{_SIGNAL_HINTS.get(number, '')}."
    code = os.WEXITSTATUS(reply.status)
    if record is None or record.kind == frames.HANDOVER:
        if code == 0:
            return Outcome.OK, ""
        return Outcome.EXCEPTION, f"The process exited with code {code}."
    if record.kind == frames.MEMORY:
        return Outcome.MEMORY, f"{record.message} (the limit is {limits.memory_mb} MB)"
    if record.kind == frames.SYNTAX:
        return Outcome.SYNTAX_ERROR, record.message
    if record.kind == frames.EXCEPTION:
        return Outcome.EXCEPTION, record.message
    if record.kind == frames.EXIT or code != 0:
        return Outcome.EXCEPTION, record.message or f"The process exited with code {code}."
    return Outcome.OK, ""


_SIGNALS = {int(s) for s in signal.Signals}
_SIGNAL_HINTS = {
    int(signal.SIGSEGV): " (crash: bad memory access or stack overflow)",
    int(signal.SIGABRT): " (abort)",
    int(signal.SIGSYS): " (forbidden system call)",
    int(signal.SIGXFSZ): " (file too large)",
}


def build_result(
    call_id: str,
    reply: WorkerReply,
    body: bytes,
    limits: Limits,
    isolation: str,
    oom: bool = False,
    attempts: int = 1,
) -> ToolResult:
    """The result of one call. Every limit in `limits` is set."""
    stdout, stderr = body[: reply.stdout], body[reply.stdout : reply.stdout + reply.stderr]
    record = Record.parse(reply.record_in(body))
    hit = limits_hit(reply, limits)
    outcome, message = hit or status_of(reply, record, limits, oom)
    if reply.cause in (frames.FILES, frames.NO_ROOM):  # nothing was run; not a wait status
        reply = reply._replace(status=0)
    if reply.left_out and not message:
        message = files.left_out_message(reply.left_out)
    chars = limits.output_chars or 0
    out, out_cut = clip(stdout.decode("utf-8", "replace"), chars)
    err, err_cut = clip(stderr.decode("utf-8", "replace"), chars)
    value, value_cut, trace, trace_cut = None, 0, "", 0
    if record is not None and hit is None:
        if record.kind == frames.VALUE and not stdout and outcome is Outcome.OK:
            value, value_cut = clip(record.text, chars, record.cut)
        elif record.kind in (frames.EXCEPTION, frames.SYNTAX, frames.MEMORY):
            trace, trace_cut = clip(record.text, chars, record.cut)
    if outcome is Outcome.OK and not stdout and not stderr and value is None:
        outcome = Outcome.NO_OUTPUT
    signaled = os.WIFSIGNALED(reply.status)
    return ToolResult(
        call_id=call_id,
        outcome=outcome,
        stdout=out,
        stderr=err,
        value=value,
        traceback=trace,
        message=message,
        truncated=Truncation(out_cut, err_cut, value_cut, trace_cut, reply.left_out),
        exit_code=None if signaled else os.WEXITSTATUS(reply.status),
        signal=os.WTERMSIG(reply.status) if signaled else None,
        wall_s=reply.wall_s,
        cpu_s=reply.cpu_s,
        peak_mb=reply.peak_mb,
        isolation=isolation,
        attempts=attempts,
        files=files.read(body[-reply.files :]) if reply.files else {},
    )


def verify_result(
    identity: str, reply: WorkerReply, body: bytes, limits: Limits, oom: bool, attempts: int
) -> VerifyResult:
    """The result of a verification from the worker's reply."""
    record = Record.parse(reply.record_in(body))
    base = VerifyResult(identity, wall_s=reply.wall_s, attempts=attempts)
    if reply.cause in (frames.WALL, frames.CPU):
        return replace(base, error="timeout", message=f"no answer in {reply.wall_s:.2f} s")
    if record is not None and record.kind == frames.JSON:
        return replace(base, value=json.loads(record.text))
    if record is not None and record.kind == frames.REFUSED:
        return replace(base, error=record.text, message=record.message)
    _, message = status_of(reply, None, limits, oom)
    return replace(base, error="memory" if oom else "crashed", message=message)

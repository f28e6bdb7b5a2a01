"""What `Sandbox` and `AsyncSandbox` do, as coroutines of the background loop (see `background`)."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypedDict, cast

import msgspec

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.client.background import BackgroundLoop, background
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.session import CodeSession
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, UserError
from rstar2.types import Limits, Outcome, ToolResult

if TYPE_CHECKING:
    from rich.progress import Progress

Files = Mapping[str, bytes | str]
SHOW_PROGRESS_S = 2.0


class CallLimits(TypedDict, total=False):
    """The limits of a call, as keyword arguments; see `types.Limits`."""

    wall_s: float
    cpu_s: float
    memory_mb: int
    processes: int
    file_mb: int
    scratch_mb: int
    output_chars: int


class SandboxCalls:
    """What both sandboxes do, as coroutines of the background loop."""

    def __init__(self, config: CodeEnvConfig, limits: Limits) -> None:
        self.config = config
        self.limits = limits
        self.closed = False
        self._users: dict[BackgroundLoop, asyncio.Task[CodeEnvClient]] = {}
        """The client, by loop: a forked child has a loop, and therefore a client, of its own."""
        self._sessions: dict[BackgroundLoop, list[CodeSession]] = {}
        """The open sessions, by loop: a forked child must not touch those of its parent."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has the same settings and a client of its own."""
        return SandboxCalls, (self.config, self.limits)

    async def client(self) -> CodeEnvClient:
        """The client of this sandbox, started on first use."""
        if self.closed:
            raise UserError("this sandbox is closed; make another")
        loop = background()
        task = self._users.get(loop)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._users[loop] = asyncio.create_task(loop.acquire(self.config))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the sessions and give the client back; calls that are in flight still end."""
        self.closed = True
        task = self._users.pop(background(), None)
        sessions = self._sessions.pop(background(), [])
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return
        try:
            for session in sessions:
                await session.close()
        finally:
            background().release(self.config)

    async def run(
        self,
        code: str,
        stdin: str,
        files: Files | None,
        id: str | None,
        limits: CallLimits,
        session: str | None = None,
        deadline_s: float | None = None,
        reuse: str | None = None,
    ) -> ToolResult:
        """One program; raises CodeEnvError if no server could execute it."""
        texts = (("code", code), ("stdin", stdin), ("id", id or ""), ("reuse", reuse or ""))
        for name, text in texts:
            if not isinstance(text, str):
                raise UserError(f"{name}: must be text, is {type(text).__name__}")
        within = merge_limits(self.limits, limits)
        request = RunRequest(
            id or f"box-{secrets.token_hex(12)}",
            code,
            stdin,
            within,
            session,
            deadline_s or deadlines.DEFAULT_DEADLINE_S + (within.wall_s or 0.0),
            to_contents(files or {}),
            collect=True,
            reuse=reuse,
        )
        result = await (await self.client()).run(request)
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise CodeEnvError(f"call {request.id}: {result.message}")
        return result

    async def map(
        self,
        programs: Sequence[str],
        stdin: str | Sequence[str],
        files: Files | None,
        concurrency: int,
        progress: bool,
        limits: CallLimits,
        reuse: str | None,
    ) -> list[ToolResult]:
        """Many programs, `concurrency` at a time; results in the order of the programs."""
        inputs = [stdin] * len(programs) if isinstance(stdin, str) else list(stdin)
        if len(inputs) != len(programs):
            raise UserError(f"stdin: {len(inputs)} inputs for {len(programs)} programs")
        if concurrency < 1:
            raise UserError(f"concurrency: {concurrency} must be at least 1")
        client = await self.client()
        slots = max(1, sum(endpoint.health.slots for endpoint in client.endpoints))
        wall_s = merge_limits(self.limits, limits).wall_s or self.config.default.wall_s or 0.0
        deadline_s = deadlines.DEFAULT_DEADLINE_S + (1 + concurrency / slots) * wall_s
        results: list[ToolResult | None] = [None] * len(programs)
        pending = iter(enumerate(zip(programs, inputs, strict=True)))

        async def work(bar: ProgressLine) -> None:
            for index, (code, text) in pending:
                results[index] = await self.run(
                    code, text, files, None, limits, deadline_s=deadline_s, reuse=reuse
                )
                bar.advance()

        async with show_progress(len(programs), progress) as bar, asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(programs))):
                group.create_task(work(bar))
        return cast("list[ToolResult]", results)

    async def open_session(self, id: str | None, ttl_s: float | None) -> CodeSession:
        """A session that ends with this sandbox at the latest."""
        return self._own(await (await self.client()).open(id, ttl_s))

    async def branch_session(self, session: CodeSession, id: str | None) -> CodeSession:
        """A copy of a session that ends with this sandbox at the latest."""
        if session not in self._sessions.get(background(), []):
            raise UserError(
                f"session: {session.id!r} is closed, or was opened by another process; open another"
            )
        return self._own(await session.branch(id))

    async def close_session(self, session: CodeSession) -> None:
        """Close a session once; one that was closed with its sandbox is left alone."""
        sessions = self._sessions.get(background(), [])
        if session in sessions:
            sessions.remove(session)
            await session.close()

    def _own(self, session: CodeSession) -> CodeSession:
        self._sessions.setdefault(background(), []).append(session)
        return session


def merge_limits(base: Limits, given: CallLimits) -> Limits:
    """`base` with the given limits; a wall limit alone is also the CPU limit."""
    if not given:
        return base
    try:
        msgspec.convert(dict(given), wire.LimitsIn)
    except msgspec.ValidationError as error:
        known = ", ".join(wire.LimitsIn.__struct_fields__)
        raise UserError(f"limits: {error}; the limits are {known}") from None
    if "wall_s" in given and "cpu_s" not in given:
        given = {**given, "cpu_s": given["wall_s"]}
    return dataclasses.replace(base, **given)


def to_contents(files: Files) -> dict[str, bytes]:
    """Files as bytes, checked before anything is sent."""
    contents: dict[str, bytes] = {}
    for name, content in files.items():
        if not isinstance(name, str) or not isinstance(content, bytes | str):
            raise UserError(f"files: {name!r}: must map a path to bytes or text")
        contents[name] = content.encode() if isinstance(content, str) else content
    wire.check_files(contents)
    return contents


class ProgressLine:
    """Counts finished programs; `show` starts a progress bar."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.bar: Progress | None = None

    def advance(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.bar.add_task("programs", total=self.total, completed=self.done)
        self.bar.start()


@asynccontextmanager
async def show_progress(total: int, wanted: bool) -> AsyncIterator[ProgressLine]:
    """A bar on a terminal for a `map` that takes longer than two seconds."""
    line = ProgressLine(total)
    timer = None
    if wanted and sys.stderr is not None and sys.stderr.isatty():
        timer = asyncio.get_running_loop().call_later(SHOW_PROGRESS_S, line.show)
    try:
        yield line
    finally:
        if timer is not None:
            timer.cancel()
        if line.bar is not None:
            line.bar.stop()

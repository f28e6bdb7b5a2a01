"""Run untrusted Python from Python: `Sandbox`, and `AsyncSandbox` for coroutines.

    from rstar2 import Sandbox

    with Sandbox() as box:
        print(box.run("print(6*7)").stdout)

`Sandbox()` starts a code environment on this machine; `Sandbox("http://host:8088", token=...)`
uses one elsewhere. Both classes are thin: the calls run on the background loop of the process (see
`codeenv.client.background`), so that they work from threads, in a notebook and beside any event
loop. docs/sandbox.md has an example of everything.

A result is always about the program: every failure of it is an `Outcome`. When the sandbox itself
fails (no server could execute the call), `CodeEnvError` is raised, never a result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import msgspec

from rstar2.codeenv import deadlines, wire
from rstar2.codeenv.client.background import BackgroundLoop, background
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.progress import ProgressLine, show_progress
from rstar2.codeenv.client.session import CodeSession
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, UserError
from rstar2.types import Limits, Outcome, ToolResult

TOKEN_VARIABLE = "RSTAR2_CODEENV_TOKEN"
IN_FLIGHT = 128
"""Programs of one `map` that are in flight at once, unless the caller chooses."""

T = TypeVar("T")
Files = Mapping[str, bytes | str]


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
        self._sessions: list[CodeSession] = []

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
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return
        try:
            for session in self._sessions:
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
    ) -> ToolResult:
        """One program; raises CodeEnvError if no server could execute it."""
        for name, text in (("code", code), ("stdin", stdin), ("id", id or "")):
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
            _contents(files or {}),
            collect=True,
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
                    code, text, files, None, limits, deadline_s=deadline_s
                )
                bar.advance()

        async with show_progress(len(programs), progress) as bar, asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(programs))):
                group.create_task(work(bar))
        return cast("list[ToolResult]", results)

    async def open_session(self, id: str | None, ttl_s: float | None) -> CodeSession:
        """A session that ends with this sandbox at the latest."""
        self._sessions.append(await (await self.client()).open(id, ttl_s))
        return self._sessions[-1]

    async def branch_session(self, session: CodeSession, id: str | None) -> CodeSession:
        """A copy of a session that ends with this sandbox at the latest."""
        self._sessions.append(await session.branch(id))
        return self._sessions[-1]

    async def close_session(self, session: CodeSession) -> None:
        """Close a session once; one that was closed with its sandbox is left alone."""
        if session in self._sessions:
            self._sessions.remove(session)
            await session.close()


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


def _contents(files: Files) -> dict[str, bytes]:
    """Files as bytes, checked before anything is sent."""
    contents: dict[str, bytes] = {}
    for name, content in files.items():
        if not isinstance(name, str) or not isinstance(content, bytes | str):
            raise UserError(f"files: {name!r}: must map a path to bytes or text")
        contents[name] = content.encode() if isinstance(content, str) else content
    wire.check_files(contents)
    return contents


def _calls(
    url: str | Sequence[str] | None,
    token: str | None,
    isolation: Literal["auto", "strict", "portable"],
    slots: int,
    limits: CallLimits,
) -> SandboxCalls:
    """The calls of a new sandbox; a limit above an owned server's cap raises that cap."""
    urls = () if url is None else (url,) if isinstance(url, str) else tuple(url)
    base = merge_limits(Limits(), limits)
    default = CodeEnvConfig()
    raised = {
        name: value
        for name, value in dataclasses.asdict(base).items()
        if value is not None and value > getattr(default.cap, name)
    }
    config = CodeEnvConfig(
        urls=urls,
        token=token or (os.environ.get(TOKEN_VARIABLE) if urls else None),
        isolation=isolation,
        slots=slots,
        warm_up="after",
        cap=dataclasses.replace(default.cap, **raised),
    )
    return SandboxCalls(config, base)


# --------------------------------------------------------------------------- for plain code


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait; Ctrl-C cancels it."""
    future = background().submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class Sandbox:
    """Runs untrusted Python in a jail, from any thread, also in a notebook.

    url: a server elsewhere, or several; without it a server is started on this machine
    token: the secret of that server; the variable RSTAR2_CODEENV_TOKEN by default
    isolation: the level of a server that is started here; auto is the strictest one available
    slots: parallel calls of a server that is started here; one per core and one more by default
    limits: limits of every call that sets none of its own: `wall_s`, `cpu_s`, `memory_mb`,
        `processes`, `file_mb`, `scratch_mb`, `output_chars`

    A result is always about the program. Raises UserError for wrong arguments, and CodeEnvError if
    no server could execute a call.

    Example:

        with rstar2.Sandbox(wall_s=10) as box:
            print(box.run("print(6*7)").stdout)
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        isolation: Literal["auto", "strict", "portable"] = "auto",
        slots: int = 0,
        **limits: Unpack[CallLimits],
    ) -> None:
        self._calls = _calls(url, token, isolation, slots, limits)

    def __enter__(self) -> Sandbox:
        _wait(self._calls.client())
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop using the server; it ends when no sandbox of this process needs it any more."""
        _wait(self._calls.close())

    @property
    def isolation(self) -> str:
        """The isolation level of the server: strict or portable."""
        return _wait(self._calls.client()).isolation

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Files | None = None,
        id: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """Run one program and return its ToolResult.

        code: the program
        stdin: its standard input
        files: files in its working directory when it starts, by relative path; `files` of the
            result has those that it created or changed
        id: the id of the call; a second call with the same id returns the first result
        limits: limits of this call, such as `wall_s=2`
        """
        return _wait(self._calls.run(code, stdin, files, id, limits))

    def map(
        self,
        programs: Iterable[str],
        *,
        stdin: str | Sequence[str] = "",
        files: Files | None = None,
        concurrency: int = IN_FLIGHT,
        progress: bool = True,
        **limits: Unpack[CallLimits],
    ) -> list[ToolResult]:
        """Run many programs in parallel; the results have the order of the programs.

        programs: the programs
        stdin: one text for all of them, or one per program
        files: as in `run`, the same for all
        concurrency: most programs in flight at the same time
        progress: show a progress bar on a terminal after two seconds
        limits: limits of every call
        """
        work = self._calls.map(list(programs), stdin, files, concurrency, progress, limits)
        return _wait(_first_error(work))

    def session(self, *, id: str | None = None, ttl_s: float | None = None) -> SandboxSession:
        """Open an interpreter that keeps its state between calls.

        It has `run`, `branch` (a copy in its current state) and `close`.

        id: the id of the session
        ttl_s: the session expires so many seconds after its last call
        """
        return SandboxSession(self._calls, _wait(self._calls.open_session(id, ttl_s)))


class SandboxSession:
    """An interpreter with state. A call that fails leaves the state as it was before."""

    def __init__(self, calls: SandboxCalls, session: CodeSession) -> None:
        self._calls, self._session = calls, session
        self.id = session.id

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Files | None = None,
        id: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """Run one program in this interpreter. Its files stay for the next call."""
        return _wait(self._calls.run(code, stdin, files, id, limits, self.id))

    def branch(self, *, id: str | None = None) -> SandboxSession:
        """A second session that starts with a copy of this one's state."""
        return SandboxSession(self._calls, _wait(self._calls.branch_session(self._session, id)))

    def close(self) -> None:
        """End the interpreter."""
        _wait(self._calls.close_session(self._session))


async def _first_error(work: Coroutine[Any, Any, T]) -> T:
    """The first error of a group of calls instead of the group."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


# --------------------------------------------------------------------------- for coroutines


async def _await(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop; cancellation reaches it."""
    return await asyncio.wrap_future(background().submit(work))


class AsyncSandbox:
    """`Sandbox` for coroutines: the same arguments and methods, awaited.

    Example:

        async with rstar2.AsyncSandbox() as box:
            result = await box.run("print(6*7)")
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        isolation: Literal["auto", "strict", "portable"] = "auto",
        slots: int = 0,
        **limits: Unpack[CallLimits],
    ) -> None:
        self._calls = _calls(url, token, isolation, slots, limits)

    async def __aenter__(self) -> AsyncSandbox:
        await _await(self._calls.client())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await _await(self._calls.close())

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Files | None = None,
        id: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """See `Sandbox.run`."""
        return await _await(self._calls.run(code, stdin, files, id, limits))

    async def map(
        self,
        programs: Iterable[str],
        *,
        stdin: str | Sequence[str] = "",
        files: Files | None = None,
        concurrency: int = IN_FLIGHT,
        progress: bool = True,
        **limits: Unpack[CallLimits],
    ) -> list[ToolResult]:
        """See `Sandbox.map`."""
        work = self._calls.map(list(programs), stdin, files, concurrency, progress, limits)
        return await _await(_first_error(work))

    async def session(
        self, *, id: str | None = None, ttl_s: float | None = None
    ) -> AsyncSandboxSession:
        """See `Sandbox.session`."""
        return AsyncSandboxSession(self._calls, await _await(self._calls.open_session(id, ttl_s)))


class AsyncSandboxSession:
    """`SandboxSession` for coroutines."""

    def __init__(self, calls: SandboxCalls, session: CodeSession) -> None:
        self._calls, self._session = calls, session
        self.id = session.id

    async def __aenter__(self) -> AsyncSandboxSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Files | None = None,
        id: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """See `SandboxSession.run`."""
        return await _await(self._calls.run(code, stdin, files, id, limits, self.id))

    async def branch(self, *, id: str | None = None) -> AsyncSandboxSession:
        """See `SandboxSession.branch`."""
        return AsyncSandboxSession(
            self._calls, await _await(self._calls.branch_session(self._session, id))
        )

    async def close(self) -> None:
        """See `SandboxSession.close`."""
        await _await(self._calls.close_session(self._session))

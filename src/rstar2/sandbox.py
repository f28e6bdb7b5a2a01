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
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from rstar2.codeenv.client.background import background
from rstar2.codeenv.client.sandbox_calls import CallLimits, Files, SandboxCalls, merge_limits
from rstar2.codeenv.client.session import CodeSession
from rstar2.config import CodeEnvConfig
from rstar2.errors import UserError
from rstar2.types import Limits, ToolResult

TOKEN_VARIABLE = "RSTAR2_CODEENV_TOKEN"
IN_FLIGHT = 128
"""Programs of one `map` that are in flight at once, unless the caller chooses."""

T = TypeVar("T")


def _calls(
    url: str | Sequence[str] | None,
    token: str | None,
    isolation: Literal["auto", "strict", "portable"],
    slots: int,
    packages: Sequence[str],
    limits: CallLimits,
) -> SandboxCalls:
    """The calls of a new sandbox; a limit above an owned server's cap raises that cap."""
    urls = () if url is None else (url,) if isinstance(url, str) else tuple(url)
    if isinstance(packages, str) or not all(isinstance(name, str) for name in packages):
        raise UserError(f"packages: {packages!r} must be a list of names, such as ['pandas']")
    if urls and packages:
        raise UserError(
            f"packages: {list(packages)} cannot be given with a URL: the server at {urls[0]} has "
            "its own; start it with `rstar2 codeenv serve --packages`"
        )
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
        packages=tuple(str(Path(name).resolve()) if "/" in name else name for name in packages),
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
    packages: what programs of a server that is started here find imported: installed packages, or
        directories of wheels (with a slash, as in `./wheels`)
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
        packages: Sequence[str] = (),
        **limits: Unpack[CallLimits],
    ) -> None:
        self._calls = _calls(url, token, isolation, slots, packages, limits)

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
        reuse: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """Run one program and return its ToolResult.

        code: the program
        stdin: its standard input
        files: files in its working directory when it starts, by relative path; `files` of the
            result has those that it created or changed
        id: the id of the call; a second call with the same id returns the first result
        reuse: a group of calls; a deterministic program that has run in this group may be answered
            from memory
        limits: limits of this call, such as `wall_s=2`
        """
        return _wait(self._calls.run(code, stdin, files, id, limits, reuse=reuse))

    def map(
        self,
        programs: Iterable[str],
        *,
        stdin: str | Sequence[str] = "",
        files: Files | None = None,
        concurrency: int = IN_FLIGHT,
        progress: bool = True,
        reuse: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> list[ToolResult]:
        """Run many programs in parallel; the results have the order of the programs.

        programs: the programs
        stdin: one text for all of them, or one per program
        files: as in `run`, the same for all
        concurrency: most programs in flight at the same time
        progress: show a progress bar on a terminal after two seconds
        reuse: as in `run`, the same for all
        limits: limits of every call
        """
        work = self._calls.map(list(programs), stdin, files, concurrency, progress, limits, reuse)
        return _wait(_first_error(work))

    def session(self, *, id: str | None = None, ttl_s: float | None = None) -> SandboxSession:
        """Open an interpreter that keeps its state between calls.

        It has `run`, `branch` (a copy in its current state) and `close`.

        id: the id of the session
        ttl_s: seconds after its last call until the session expires
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
        packages: Sequence[str] = (),
        **limits: Unpack[CallLimits],
    ) -> None:
        self._calls = _calls(url, token, isolation, slots, packages, limits)

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
        reuse: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> ToolResult:
        """See `Sandbox.run`."""
        return await _await(self._calls.run(code, stdin, files, id, limits, reuse=reuse))

    async def map(
        self,
        programs: Iterable[str],
        *,
        stdin: str | Sequence[str] = "",
        files: Files | None = None,
        concurrency: int = IN_FLIGHT,
        progress: bool = True,
        reuse: str | None = None,
        **limits: Unpack[CallLimits],
    ) -> list[ToolResult]:
        """See `Sandbox.map`."""
        work = self._calls.map(list(programs), stdin, files, concurrency, progress, limits, reuse)
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

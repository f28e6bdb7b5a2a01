"""Sessions on this server: leases on interpreters that keep state across calls.

A session and its branches live in one worker of their own. The lease is renewed by every use and
ends after `ttl_s` without one. Then the interpreter is closed, and the worker ends with the last
interpreter of its family. Files in scratch belong to the family and are not rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field, replace

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.protocol import SessionInfo
from rstar2.codeenv.server.workers import WorkerLink, WorkerPool
from rstar2.codeenv.server.zygotes import WorkerLostError
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, QueueFullError, UserError
from rstar2.types import Limits


@dataclass(slots=True)
class SessionFamily:
    """A worker with the interpreters of a session and its branches; one call at a time."""

    link: WorkerLink
    members: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class SessionLease:
    """A session under its lease."""

    info: SessionInfo
    family: SessionFamily
    expires: float
    busy: int = 0


class Sessions:
    """All live sessions of a server."""

    def __init__(self, config: CodeEnvConfig, workers: WorkerPool, limits: Limits) -> None:
        self._config = config
        self._workers = workers
        self.limits = limits
        """Limits of a session from open to close."""
        self._live: dict[str, SessionLease] = {}
        self._sequence = 0
        self._janitor: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    async def open(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        """A fresh interpreter under a lease."""
        name = self._new_name(session)
        link = await self._workers.make("base", self.limits, session=True)
        family = SessionFamily(link, {name})
        info = SessionInfo(name, self._ttl(ttl_s))
        self._live[name] = SessionLease(info, family, time.monotonic() + info.ttl_s)
        try:
            await self._order(family, frames.SESSION_OPEN, name)
        except BaseException:
            self._forget(name)
            raise
        if self._janitor is None:
            self._janitor = asyncio.create_task(self._expire(), name="session-leases")
        return info

    async def branch(self, session: str, branch: str | None) -> SessionInfo:
        """A copy of a session's state that is independent from here on."""
        parent = self._find(session)
        name = self._new_name(branch)
        info = replace(parent.info, id=name, parent=session, calls=0)
        self._live[name] = SessionLease(info, parent.family, time.monotonic() + info.ttl_s)
        parent.family.members.add(name)
        try:
            reply = await self._order(parent.family, frames.SESSION_BRANCH, session, name)
            if reply.cause != frames.EXITED or reply.status:
                raise CodeEnvError(f"session {session!r} could not be branched")
        except BaseException:
            self._forget(name)
            raise
        parent.expires = time.monotonic() + parent.info.ttl_s
        return info

    async def close(self, session: str) -> None:
        """End a session now."""
        family = self._find(session).family
        self._forget(session)
        if family.members:
            with contextlib.suppress(WorkerLostError):
                await self._order(family, frames.SESSION_CLOSE, session)

    def drop_all(self) -> None:
        """End every session: the server is closing."""
        if self._janitor is not None:
            self._janitor.cancel()
        for name in list(self._live):
            self._forget(name)

    async def run(
        self, session: str, header: WorkerRequest, parts: tuple[bytes, ...]
    ) -> tuple[WorkerReply, bytes]:
        """One call in a session; the lease is renewed. WorkerLostError: the session is lost."""
        lease = self._find(session)
        name = session.encode()
        lease.busy += 1
        try:
            async with lease.family.lock:
                header = header._replace(kind=frames.SESSION_RUN, name=len(name))
                reply, body = await lease.family.link.ask(header, (name, *parts))
        except BaseException:
            if not lease.family.link.alive:
                self._forget_family(lease.family)
            raise
        finally:
            lease.busy -= 1
            lease.expires = time.monotonic() + lease.info.ttl_s
        if reply.cause == frames.NO_SESSION:
            self._forget(session)
            raise WorkerLostError(f"session {session!r} ended with its process")
        if reply.retire:
            self._forget_family(lease.family)
        lease.info = replace(lease.info, calls=lease.info.calls + 1)
        return reply, body

    # ------------------------------------------------------------------ internals

    async def _order(
        self, family: SessionFamily, kind: int, session: str, branch: str = ""
    ) -> WorkerReply:
        limits = self.limits
        name, extra = session.encode(), branch.encode()
        self._sequence += 1
        header = WorkerRequest(
            self._sequence | 1 << 62, kind, len(name), len(extra), 0, limits.memory_mb or 0,
            limits.processes or 0, limits.file_mb or 0, 0, deadlines.SESSION_ORDER_S,
            limits.cpu_s or 0.0,
        )  # fmt: skip
        async with family.lock:
            reply, _ = await family.link.ask(header, (name, extra))
        return reply

    def _new_name(self, wanted: str | None) -> str:
        if wanted is not None and wanted in self._live:
            raise UserError(f"session {wanted!r} exists already; choose another id")
        if len(self._live) >= self._config.sessions:
            soonest = min((s.expires for s in self._live.values()), default=time.monotonic() + 1)
            raise QueueFullError(
                f"{self._config.sessions} sessions are open, the most allowed; close one",
                max(0.1, soonest - time.monotonic()),
            )
        return wanted or secrets.token_hex(8)

    def _ttl(self, asked: float | None) -> float:
        return min(asked or self._config.session_ttl_s, self._config.session_ttl_s)

    def _find(self, session: str) -> SessionLease:
        lease = self._live.get(session)
        if lease is None:
            raise UserError(f"no session {session!r}: it was never opened, was closed or expired")
        return lease

    def _forget(self, session: str) -> None:
        lease = self._live.pop(session, None)
        if lease is None:
            return
        lease.family.members.discard(session)
        if not lease.family.members:
            self._workers.drop(lease.family.link)

    def _forget_family(self, family: SessionFamily) -> None:
        for name in list(family.members):
            self._forget(name)

    async def _expire(self) -> None:
        """Close sessions whose lease has expired."""
        while True:
            now = time.monotonic()
            for name, lease in list(self._live.items()):
                if lease.expires <= now and not lease.busy:
                    with contextlib.suppress(UserError, CodeEnvError):
                        await self.close(name)
            soonest = min((s.expires for s in self._live.values()), default=now + 1.0)
            await asyncio.sleep(min(1.0, max(0.02, soonest - time.monotonic())))

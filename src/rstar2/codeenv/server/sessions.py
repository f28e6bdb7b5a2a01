"""Sessions on this server: leases on interpreters that keep state across calls.

A session and its branches are a family: they live in one worker of their own, and their calls run
one after another. The lease is renewed by every use and ends after `ttl_s` without one. Then the
interpreter is closed, and the worker ends with the last member of its family.

Invariants
- A call whose caller has left is rolled back; the session stays usable.
- A session that is lost stays lost: every later use raises SessionLostError with the reason. No
  call runs in a fresh interpreter under an old id, unless its owner opens the id again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import cgroups, frames
from rstar2.codeenv.jail.frames import WorkerReply, WorkerRequest
from rstar2.codeenv.protocol import SessionInfo
from rstar2.codeenv.server.workers import WorkerLink, WorkerPool
from rstar2.codeenv.server.zygotes import WorkerLostError
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, DeadlineError, QueueFullError, SessionLostError, UserError
from rstar2.types import Limits

_REMEMBERED = 10_000
"""Lost sessions whose reason is kept."""


@dataclass(slots=True)
class SessionFamily:
    """A worker with the interpreters of a session and its branches; one call at a time."""

    link: WorkerLink
    members: set[str] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call table around a call, so that calls that wait for their turn hold no slot."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the worker carries out an order."""
    room: int = 1
    """Members that its control group has room for."""


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
        self._lost: OrderedDict[str, str] = OrderedDict()
        """Id -> why the session was lost."""
        self._opening = 0
        self._sequence = 0
        self._janitor: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    async def open(self, session: str | None, ttl_s: float | None) -> SessionInfo:
        """A fresh interpreter under a lease."""
        name = self._new_name(session)
        info = SessionInfo(name, self._ttl(ttl_s))
        self._opening += 1
        try:
            link = await self._workers.make("base", self.limits, session=True)
        finally:
            self._opening -= 1
        family = SessionFamily(link, {name})
        if name in self._live:
            self._workers.drop(link)
            raise _taken(name)
        self._live[name] = SessionLease(info, family, time.monotonic() + info.ttl_s)
        self._lost.pop(name, None)
        try:
            reply = await self._order(family, frames.SESSION_OPEN, name)
            if reply.cause != frames.EXITED:
                raise CodeEnvError(f"session {name!r}: its first process could not be confined")
        except BaseException:
            self._forget(name)
            raise
        if self._janitor is None:
            self._janitor = asyncio.create_task(self._expire(), name="session-leases")
        return info

    async def branch(self, session: str, branch: str | None) -> SessionInfo:
        """A copy of a session's state that is independent from here on."""
        parent = self._find(session)
        family = parent.family
        name = self._new_name(branch)
        info = replace(parent.info, id=name, parent=session, calls=0)
        self._live[name] = SessionLease(info, family, time.monotonic() + info.ttl_s, busy=1)
        family.members.add(name)
        parent.busy += 1
        try:
            self._make_room(family)
            reply = await self._order(family, frames.SESSION_BRANCH, session, name)
            self._check_reply(parent, reply)
        except BaseException as error:
            self._forget(name)
            if isinstance(error, WorkerLostError):
                raise self._lose_family(family, str(error)) from error
            raise
        finally:
            parent.busy -= 1
            parent.expires = time.monotonic() + parent.info.ttl_s
        lease = self._live[name]
        lease.busy = 0
        lease.expires = time.monotonic() + info.ttl_s
        self._lost.pop(name, None)
        return info

    async def close(self, session: str) -> None:
        """End a session now. One that was lost is closed already."""
        if self._lost.pop(session, None) is not None:
            return
        family = self._find(session).family
        self._forget(session)
        if family.members:
            with contextlib.suppress(WorkerLostError):
                await self._order(family, frames.SESSION_CLOSE, session)

    def drop_all(self) -> None:
        """End every session: the server is closing."""
        for task in (self._janitor, *self._closing):
            if task is not None:
                task.cancel()
        for name in list(self._live):
            self._forget(name)

    def turn(self, session: str) -> asyncio.Lock | None:
        """The lock for calls of this session and its branches; None if there is no such session."""
        lease = self._live.get(session)
        return None if lease is None else lease.family.turn

    async def run(
        self, session: str, header: WorkerRequest, parts: tuple[bytes, ...], deadline: float
    ) -> tuple[WorkerReply, bytes, bool]:
        """One call in a session: its reply, and whether the kernel killed it for memory.

        `deadline` is a time of the monotonic clock. The lease is renewed.
        """
        lease = self._find(session)
        link = lease.family.link
        name = session.encode()
        header = header._replace(kind=frames.SESSION_RUN, name=len(name))
        lease.busy += 1
        try:
            reply, body = await self._in_turn(lease.family, header, (name, *parts), deadline)
        except WorkerLostError as error:
            oom = await link.killed_for_memory()
            lost = self._lose_family(lease.family, "it ran out of memory" if oom else str(error))
            if oom:
                return memory_kill(header), b"", True
            raise lost from error
        finally:
            lease.busy -= 1
            lease.expires = time.monotonic() + lease.info.ttl_s
        lease.info = replace(lease.info, calls=lease.info.calls + 1)
        self._check_reply(lease, reply)
        kills = cgroups.oom_kills(link.spec.group) if os.WIFSIGNALED(reply.status) else 0
        oom = reply.cause == frames.EXITED and kills > link.oom_seen
        link.oom_seen = max(link.oom_seen, kills)
        if reply.retire:
            self._lose_family(lease.family, "its processes could not be ended")
        return reply, body, oom

    # ------------------------------------------------------------------ orders

    async def _in_turn(
        self,
        family: SessionFamily,
        header: WorkerRequest,
        parts: tuple[bytes, ...],
        deadline: float,
    ) -> tuple[WorkerReply, bytes]:
        """Wait for the family's other calls, then ask; a caller that leaves aborts its call."""
        try:
            async with asyncio.timeout_at(deadline):
                await family.lock.acquire()
        except TimeoutError:
            raise DeadlineError("the deadline passed before the session was free") from None
        try:
            left_s = max(0.001, deadline - time.monotonic())
            header = header._replace(wall_s=min(header.wall_s, left_s))
            grace_s = deadlines.SESSION_COPY_S + deadlines.WORKER_GRACE_S
            asking = asyncio.ensure_future(family.link.ask(header, parts, grace_s))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                family.link.abort()
                await asyncio.wait([asking])
                if not asking.cancelled() and asking.exception() is not None:
                    self._lose_family(family, str(asking.exception()))
                raise
        finally:
            family.lock.release()

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
        deadline = time.monotonic() + (self._config.cap.wall_s or 0.0) + deadlines.SESSION_ORDER_S
        reply, _ = await self._in_turn(family, header, (name, extra), deadline)
        return reply

    def _check_reply(self, lease: SessionLease, reply: WorkerReply) -> None:
        """Raise if the worker could not carry out an order."""
        name = lease.info.id
        if reply.cause == frames.NO_SESSION:
            if reply.retire:
                raise self._lose_family(lease.family, "its files could not be put in place")
            self._forget(name)
            raise self._lose(name, "its process ended, or obeys no orders any more")
        if reply.cause == frames.NO_COPY:
            raise CodeEnvError(
                f"session {name!r} could not be copied: {os.strerror(reply.status)}; its state is "
                "unchanged. Close branches, or raise session_memory_mb or session_scratch_mb"
            )

    def _make_room(self, family: SessionFamily) -> None:
        """Raise the limits of a family's control group: each member has its own share."""
        if len(family.members) > family.room:
            family.room = len(family.members)
            self._workers.make_room(family.link, self.limits, family.room)

    # ------------------------------------------------------------------ leases

    def _new_name(self, wanted: str | None) -> str:
        if wanted is not None and wanted in self._live:
            raise _taken(wanted)
        if len(self._live) + self._opening >= self._config.sessions:
            soonest = min((s.expires for s in self._live.values()), default=time.monotonic() + 1)
            raise QueueFullError(
                f"{self._config.sessions} sessions are open, the most allowed; close one, or raise "
                "--sessions where the server is started",
                max(0.1, soonest - time.monotonic()),
            )
        return wanted or secrets.token_hex(8)

    def _ttl(self, asked: float | None) -> float:
        return min(asked or self._config.session_ttl_s, self._config.session_ttl_s)

    def _find(self, session: str) -> SessionLease:
        lease = self._live.get(session)
        if lease is not None:
            return lease
        if session in self._lost:
            raise _lost_error(session, self._lost[session])
        raise UserError(f"no session {session!r}: it was never opened, was closed or expired")

    def _lose(self, session: str, reason: str) -> SessionLostError:
        """Remember why a session was lost; returns the error for its callers."""
        self._lost[session] = reason
        while len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)
        return _lost_error(session, reason)

    def _lose_family(self, family: SessionFamily, reason: str) -> SessionLostError:
        error = _lost_error(next(iter(sorted(family.members)), ""), reason)
        for name in list(family.members):
            self._forget(name)
            self._lose(name, reason)
        return error

    def _forget(self, session: str) -> None:
        lease = self._live.pop(session, None)
        if lease is None:
            return
        lease.family.members.discard(session)
        if not lease.family.members:
            self._workers.drop(lease.family.link)

    async def _expire(self) -> None:
        """Close sessions whose lease has expired."""
        while True:
            now = time.monotonic()
            for name, lease in list(self._live.items()):
                if lease.expires <= now and not lease.busy:
                    lease.busy += 1  # it is not closed twice
                    task = asyncio.create_task(self._close_expired(name))
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)
            soonest = min((s.expires for s in self._live.values()), default=now + 1.0)
            await asyncio.sleep(min(1.0, max(0.02, soonest - time.monotonic())))

    async def _close_expired(self, session: str) -> None:
        with contextlib.suppress(UserError, CodeEnvError, DeadlineError):
            await self.close(session)


def _taken(name: str) -> Refusal:
    return Refusal("conflict", f"session {name!r} exists already; choose another id", "id")


def _lost_error(session: str, reason: str) -> SessionLostError:
    return SessionLostError(
        f"session {session!r} is lost: {reason}; open a new one and repeat its calls"
    )


def memory_kill(header: WorkerRequest) -> WorkerReply:
    """The reply of a worker that the kernel killed, with its call, for memory."""
    return WorkerReply(header.seq, 9, frames.EXITED, 1, 0, 0, 0, 0.0, 0.0, float(header.memory_mb))

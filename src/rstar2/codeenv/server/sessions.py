"""Sessions on this server: leases on interpreters that keep state across calls.

A session and its branches are a family: they live in one worker of their own, and their calls run
one after another. The lease is renewed by every use and ends after `ttl_s` without one. Then the
interpreter is closed, and the worker ends with the last member of its family.

Invariants
- A call whose caller has left is rolled back; the session stays usable.
- A member whose lease has ended is closed in its worker, also if nobody waits for that any more.
- A session does not expire while a call waits for its turn or for a slot.
- A session that is lost stays lost: every later use raises SessionLostError with the reason. No
  call runs in a fresh interpreter under an old id, unless its owner opens the id again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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

_BROKEN = "one of its programs broke its process"
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
    key: str
    """The member's name in its worker. No other lease has it, also if its id is used again."""
    expires: float = 0.0
    users: int = 0
    """Calls and orders that use the session or wait for it; it does not expire meanwhile."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the session from expiring; renew its lease at the end."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.expires = time.monotonic() + self.info.ttl_s


class LostSession(NamedTuple):
    """Why a session was lost; the reply to all its calls if its own programs broke it."""

    reason: str
    broken: WorkerReply | None


class Sessions:
    """All live sessions of a server."""

    def __init__(self, config: CodeEnvConfig, workers: WorkerPool, limits: Limits) -> None:
        self._config = config
        self._workers = workers
        self.limits = limits
        """Limits of a session from open to close."""
        self._live: dict[str, SessionLease] = {}
        self._lost: OrderedDict[str, LostSession] = OrderedDict()
        self._opening = 0
        self._sequence = 0
        self._keys = (str(number) for number in itertools.count(1))
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
        if name in self._live:
            self._workers.drop(link)
            raise _taken(name)
        lease = self._add(info, SessionFamily(link))
        with lease.in_use():
            try:
                reply = await self._order(lease.family, frames.SESSION_OPEN, lease.key)
                if reply.cause != frames.EXITED:
                    raise CodeEnvError(f"session {name!r}: its first process could not be confined")
            except BaseException:
                self._end(lease)
                raise
        if self._janitor is None:
            self._janitor = asyncio.create_task(self._expire(), name="session-leases")
        return info

    async def branch(self, session: str, branch: str | None) -> SessionInfo:
        """A copy of a session's state that is independent from here on."""
        parent = self._find(session)
        family = parent.family
        name = self._new_name(branch)
        lease = self._add(replace(parent.info, id=name, parent=session, calls=0), family)
        with parent.in_use(), lease.in_use():
            try:
                self._make_room(family)
                reply = await self._order(family, frames.SESSION_BRANCH, parent.key, lease.key)
                self._check_reply(parent, reply)
                if reply.cause == frames.BROKEN:
                    raise _lost_error(session, _BROKEN)
                self._check_live(lease)
            except WorkerLostError as error:
                self._forget(lease)
                self._lose_family(family, str(error))
                raise _lost_error(session, str(error)) from error
            except BaseException:
                self._end(lease)  # the worker may have made the branch although its caller has left
                raise
        return lease.info

    async def close(self, session: str) -> None:
        """End a session now. One that was lost is closed already."""
        if self._lost.pop(session, None) is not None:
            return
        closing = self._end(self._find(session))
        if closing is not None:
            await asyncio.shield(closing)

    def drop_all(self) -> None:
        """End every session: the server is closing."""
        for task in (self._janitor, *self._closing):
            if task is not None:
                task.cancel()
        for lease in list(self._live.values()):
            self._forget(lease)

    def turn(self, session: str) -> AbstractAsyncContextManager[None] | None:
        """The turn of a call among those of this session and its branches; None if there is no such
        session. The session does not expire during the wait and the call."""
        lease = self._live.get(session)
        return None if lease is None else _turn(lease)

    async def run(
        self, session: str, header: WorkerRequest, parts: tuple[bytes, ...], deadline: float
    ) -> tuple[WorkerReply, bytes, bool]:
        """One call in a session: its reply, and whether the kernel killed it for memory.

        `deadline` is a time of the monotonic clock. The lease is renewed.
        """
        lost = self._lost.get(session)
        if lost is not None and lost.broken is not None:
            return lost.broken._replace(seq=header.seq), b"", False
        lease = self._find(session)
        link = lease.family.link
        key = lease.key.encode()
        header = header._replace(kind=frames.SESSION_RUN, name=len(key))
        with lease.in_use():
            try:
                reply, body = await self._in_turn(lease.family, header, (key, *parts), deadline)
            except WorkerLostError as error:
                oom = await link.killed_for_memory()
                reason = "it ran out of memory" if oom else str(error)
                self._lose_family(lease.family, reason)
                if oom:
                    killed = memory_kill(header)
                    self._lose(session, reason, killed._replace(cause=frames.BROKEN))
                    return killed, b"", True
                raise _lost_error(session, reason) from error
        lease.info = replace(lease.info, calls=lease.info.calls + 1)
        kills = cgroups.oom_kills(link.spec.group) if os.WIFSIGNALED(reply.status) else 0
        oom = reply.cause in (frames.EXITED, frames.NO_SESSION) and kills > link.oom_seen
        link.oom_seen = max(link.oom_seen, kills)
        if oom and reply.cause == frames.NO_SESSION:
            reply = reply._replace(cause=frames.BROKEN)  # the memory of its own control group
        self._check_reply(lease, reply)
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
        """Wait for the family's other calls, then ask; a caller that leaves aborts its call.

        The lock is held until the worker has answered, also if the caller does not wait for that.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await family.lock.acquire()
        except TimeoutError:
            raise DeadlineError("the deadline passed before the session was free") from None
        left_s = max(0.001, deadline - time.monotonic())
        header = header._replace(wall_s=min(header.wall_s, left_s))
        asking = asyncio.create_task(family.link.ask(header, parts, deadlines.SESSION_GRACE_S))
        asking.add_done_callback(lambda done: family.lock.release())
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            family.link.abort()
            asking.add_done_callback(lambda done: self._after_abort(family, done))
            await asyncio.wait([asking])
            raise

    def _after_abort(
        self, family: SessionFamily, asked: asyncio.Task[tuple[WorkerReply, bytes]]
    ) -> None:
        if not asked.cancelled() and asked.exception() is not None:
            self._lose_family(family, str(asked.exception()))

    async def _order(
        self, family: SessionFamily, kind: int, key: str, branch_key: str = ""
    ) -> WorkerReply:
        limits = self.limits
        name, extra = key.encode(), branch_key.encode()
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
        """Raise if the worker could not carry out an order, unless programs are to blame."""
        name = lease.info.id
        if reply.cause == frames.BROKEN:
            self._forget(lease)
            self._lose(name, _BROKEN, reply)
        if reply.cause == frames.NO_SESSION:
            self._check_live(lease)
            reason = "its process ended, or obeys no orders any more"
            if reply.retire:
                reason = "its files could not be put in place"
                self._lose_family(lease.family, reason)
            else:
                self._forget(lease)
                self._lose(name, reason)
            raise _lost_error(name, reason)
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

    def _add(self, info: SessionInfo, family: SessionFamily) -> SessionLease:
        lease = SessionLease(info, family, next(self._keys))
        self._live[info.id] = lease
        family.members.add(info.id)
        self._lost.pop(info.id, None)
        return lease

    def _find(self, session: str) -> SessionLease:
        lease = self._live.get(session)
        if lease is not None:
            return lease
        if session in self._lost:
            raise _lost_error(session, self._lost[session].reason)
        raise UserError(f"no session {session!r}: it was never opened, was closed or expired")

    def _check_live(self, lease: SessionLease) -> None:
        """Raise if the session was closed or lost while an order waited."""
        if self._live.get(lease.info.id) is not lease:
            self._find(lease.info.id)
            raise UserError(f"no session {lease.info.id!r}: it was closed")

    def _lose(self, session: str, reason: str, broken: WorkerReply | None = None) -> None:
        """Remember why a session was lost."""
        self._lost[session] = LostSession(reason, broken)
        while len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)

    def _lose_family(self, family: SessionFamily, reason: str) -> None:
        for name in list(family.members):
            self._forget(self._live[name])
            self._lose(name, reason)

    def _forget(self, lease: SessionLease) -> None:
        """Remove a lease; the worker ends with the last of its family."""
        name, family = lease.info.id, lease.family
        if self._live.get(name) is not lease:
            return
        del self._live[name]
        family.members.discard(name)
        if not family.members:
            self._workers.drop(family.link)

    def _end(self, lease: SessionLease) -> asyncio.Task[None] | None:
        """End a lease now and its member of the worker in the background; None if there is none."""
        self._forget(lease)
        if not lease.family.members:
            return None
        closing = asyncio.create_task(self._close_member(lease))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _close_member(self, lease: SessionLease) -> None:
        family = lease.family
        while family.members:  # the worker ends with the last of them
            try:
                reply = await self._order(family, frames.SESSION_CLOSE, lease.key)
            except DeadlineError:
                continue  # the orders before it took this long
            except WorkerLostError as error:
                self._lose_family(family, str(error))
                return
            if reply.retire:
                self._lose_family(family, "processes of another member could not be ended")
            return

    async def _expire(self) -> None:
        """Close sessions whose lease has expired."""
        while True:
            now = time.monotonic()
            unused = [lease for lease in self._live.values() if not lease.users]
            for lease in unused:
                if lease.expires <= now:
                    self._end(lease)
            soonest = min((lease.expires for lease in unused), default=now + 1.0)
            await asyncio.sleep(min(1.0, max(0.02, soonest - time.monotonic())))


@contextlib.asynccontextmanager
async def _turn(lease: SessionLease) -> AsyncIterator[None]:
    with lease.in_use():
        async with lease.family.turn:
            yield


def _taken(name: str) -> Refusal:
    return Refusal("conflict", f"session {name!r} exists already; choose another id", "id")


def _lost_error(session: str, reason: str) -> SessionLostError:
    return SessionLostError(
        f"session {session!r} is lost: {reason}; open a new one and repeat its calls"
    )


def memory_kill(header: WorkerRequest) -> WorkerReply:
    """The reply of a worker that the kernel killed, with its call, for memory."""
    return WorkerReply(header.seq, 9, frames.EXITED, 1, 0, 0, 0, 0.0, 0.0, float(header.memory_mb))

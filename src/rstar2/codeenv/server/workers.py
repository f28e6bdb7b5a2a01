"""The stock of warm workers: zygotes by flavour, workers by the limits their jails were built with.

Knows no calls and no queue. A worker is taken, used by one caller, and given back or dropped; idle
workers of unusual kinds make room for others. Zygotes that died are started again when needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rstar2.codeenv.jail import cgroups
from rstar2.codeenv.jail.confine import JailSpec
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.links import WorkerLink, ZygoteLink
from rstar2.errors import CodeEnvError, DeadlineError
from rstar2.types import Limits

OVERHEAD_MB = 192
"""Memory of the worker itself in its control group, beside what its calls may use."""
_UID_FIRST, _UIDS = 50_000, 10_000
"""Uids for workers when the service is root; services start at different ones."""
_PER_SLOT = 5
"""Workers kept per slot, of all kinds together: one of each flavour."""

Key = tuple[str, int, int, int]


class Stock:
    """Makes, keeps and ends workers; `directory` and control groups are its traces on the host."""

    def __init__(self, isolation: str, slots: int, functions: Mapping[str, str]) -> None:
        self.isolation = isolation
        self.functions = dict(functions)
        self.most = _PER_SLOT * slots
        self.restarts = 0
        self.directory = ""
        self.links: set[WorkerLink] = set()
        self._zygotes: dict[str, ZygoteLink] = {}
        self._starting: dict[str, asyncio.Task[ZygoteLink]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._idle: dict[Key, list[WorkerLink]] = {}
        self._numbers = itertools.count(1)
        self._tree = cgroups.ControlGroupTree([])

    async def start(self) -> None:
        """Sweep what dead services left, then warm up the common flavour."""
        await asyncio.get_running_loop().run_in_executor(None, self._prepare_host)
        await self.zygote("base")

    def _prepare_host(self) -> None:
        probe.sweep_runtime()
        self.directory = tempfile.mkdtemp(prefix=f"{cgroups.owner_name()}-")
        Path(self.directory).chmod(0o711)
        self._tree = cgroups.ControlGroupTree(cgroups.hierarchies())

    def start_others(self) -> None:
        """Warm up the other flavours meanwhile; calls that need one early wait or do without."""
        task = asyncio.create_task(self._start_each("plain", "numpy", "verify", "scipy"))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _start_each(self, *flavours: str) -> None:
        for flavour in flavours:
            with contextlib.suppress(CodeEnvError, DeadlineError):
                await self.zygote(flavour)  # if it cannot start now, it is tried again when needed

    async def close(self) -> None:
        """End every process and remove every trace."""
        for task in [*self._background, *self._starting.values()]:
            task.cancel()
        await asyncio.gather(*self._background, *self._starting.values(), return_exceptions=True)
        for link in list(self.links):
            self.drop(link)
        await asyncio.gather(*(z.close() for z in self._zygotes.values()))
        self._zygotes.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._tree.close)
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def warm(self, flavour: str) -> bool:
        """Is this flavour ready without waiting?"""
        zygote = self._zygotes.get(flavour)
        return zygote is not None and zygote.alive

    @property
    def zygotes(self) -> dict[str, ZygoteLink]:
        return dict(self._zygotes)

    async def zygote(self, flavour: str) -> ZygoteLink:
        """The live zygote of a flavour; started again if it died."""
        zygote = self._zygotes.get(flavour)
        if zygote is not None and zygote.alive:
            return zygote
        task = self._starting.get(flavour)
        if task is None:
            task = asyncio.create_task(self._start_zygote(flavour))
            self._starting[flavour] = task
            task.add_done_callback(lambda _: self._starting.pop(flavour, None))
        return await asyncio.shield(task)

    async def _start_zygote(self, flavour: str) -> ZygoteLink:
        old = self._zygotes.pop(flavour, None)
        if old is not None:
            self.restarts += 1
            await old.close()
        zygote = ZygoteLink(flavour, self.functions)
        try:
            await zygote.start()
        except asyncio.CancelledError:
            await zygote.close()
            raise
        self._zygotes[flavour] = zygote
        return zygote

    # ------------------------------------------------------------------ workers

    async def take(self, flavour: str, limits: Limits) -> WorkerLink:
        """An idle worker whose jail fits these limits, or a new one."""
        key = (flavour, limits.memory_mb or 0, limits.processes or 0, limits.scratch_mb or 0)
        idle = self._idle.get(key, [])
        while idle:
            link = idle.pop()
            if link.alive:
                return link
            self.links.discard(link)
        self._make_room()
        return await self.make(flavour, limits)

    async def make(self, flavour: str, limits: Limits, session: bool = False) -> WorkerLink:
        """A new worker in a new jail."""
        zygote = await self.zygote(flavour)
        number = next(self._numbers)
        memory_mb, scratch_mb = limits.memory_mb or 0, limits.scratch_mb or 0
        processes = limits.processes or 0
        group = self._tree.make(
            f"w{number}", memory_mb + scratch_mb + OVERHEAD_MB, processes + 1 + 2 * session
        )
        spec = JailSpec(
            level=self.isolation,
            name=f"w{number}",
            runtime=self.directory,
            memory_mb=memory_mb,
            processes=processes,
            scratch_mb=scratch_mb,
            uid=probe.worker_uid(self.isolation, _UID_FIRST + (os.getpid() * 37 + number) % _UIDS),
            group=group,
            session=session,
        )
        try:
            link = await zygote.spawn(spec)
        except BaseException:
            self._tree.remove(group)
            raise
        self.links.add(link)
        return link

    def give_back(self, link: WorkerLink) -> None:
        """The worker is idle again."""
        self._idle.setdefault(_key(link), []).append(link)

    def drop(self, link: WorkerLink) -> None:
        """End a worker that is not idle."""
        self.links.discard(link)
        link.kill()

    def _make_room(self) -> None:
        """Keep idle workers of other kinds from piling up."""
        while len(self.links) >= self.most:
            idle = [link for links in self._idle.values() for link in links]
            if not idle:
                return
            oldest = min(idle, key=lambda link: link.used_at)
            self._idle[_key(oldest)].remove(oldest)
            self.drop(oldest)


def _key(link: WorkerLink) -> Key:
    spec = link.spec
    return (link.flavour, spec.memory_mb, spec.processes, spec.scratch_mb)

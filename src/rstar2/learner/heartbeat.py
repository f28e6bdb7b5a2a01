"""Notices learner ranks that hang in the middle of a call, long before the call's deadline.

A rank gives two signs. *Life* changes as long as its process runs at all: a stopped process, a
frozen machine or a lost network shows within `learner.hang_s`, whatever the rank was doing.
*Marks* count its micro-batches and calls: ranks that run but wait for each other forever show once
no rank has made a mark for much longer than ever before in the same method.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.5
"""Time between two looks at the ranks."""
BEAT_S = 0.5
"""Time between two signs of life of an idle rank."""
STUCK_FACTOR = 10.0
"""Ranks are stuck after this times the longest time between two marks of the method."""

_COUNTS = struct.Struct("=qq")


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank shows of itself."""

    marks: int
    life: Hashable


class HangWatch:
    """Decides which ranks hang. Pure: the caller gives the time and what it saw.

    The time should be what the caller itself lived through, so that a machine that was paused as a
    whole is not taken for a hang.
    """

    def __init__(self, hang_s: float) -> None:
        self.hang_s = hang_s
        self._longest: dict[str, float] = {}
        """Maximum time without a mark of any rank, by method; only of methods that have ended."""

    def begin(self, method: str, now: float) -> None:
        """A call of all ranks starts."""
        self._method, self._gap, self._marked = method, 0.0, now
        self._pulses: dict[int, Pulse] = {}
        self._lived: dict[int, float] = {}

    def end(self, now: float) -> None:
        """All ranks have answered."""
        known = self._longest.get(self._method, 0.0)
        self._longest[self._method] = max(known, self._gap, now - self._marked)

    def look(self, pulses: Mapping[int, Pulse], now: float) -> str | None:
        """What hangs, given the pulses of the ranks that have not answered; None if nothing."""
        for rank, pulse in pulses.items():
            last = self._pulses.get(rank)
            if last is None or pulse.life != last.life:
                self._lived[rank] = now
            if last is not None and pulse.marks != last.marks:
                self._gap = max(self._gap, now - self._marked)
                self._marked = now
        self._pulses = dict(pulses)
        silent = [rank for rank in pulses if now - self._lived[rank] > self.hang_s]
        if silent:
            return f"learner rank(s) {silent} gave no sign of life for {self.hang_s:g} s"
        longest = self._longest.get(self._method)
        if longest is None or not pulses:
            return None
        patience = max(2 * self.hang_s, STUCK_FACTOR * max(longest, self._gap))
        if now - self._marked <= patience:
            return None
        fewest = min(pulse.marks for pulse in pulses.values())
        behind = [rank for rank, pulse in pulses.items() if pulse.marks == fewest]
        return f"no learner rank has progressed for {patience:.0f} s; rank(s) {behind} are behind"


class OwnTime:
    """Seconds that this process lived through: a jump of the clock counts as one look."""

    def __init__(self) -> None:
        self._last, self._total = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self._total += min(now - self._last, 2 * LOOK_S)
        self._last = now
        return self._total


class Heart:
    """A rank's end of the shared counters."""

    def __init__(self, path: Path) -> None:
        self._shared = _map(path)
        self._marks = self._beats = 0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def mark(self) -> None:
        """The rank has progressed by a micro-batch or a call."""
        self._marks += 1
        self._write()

    def _beat(self) -> None:
        while True:
            self._beats += 1
            self._write()
            time.sleep(BEAT_S)

    def _write(self) -> None:
        _COUNTS.pack_into(self._shared, 0, self._marks, self._beats)


class PulseReader:
    """The parent's end: reads the counters and the CPU time of one rank's process.

    The CPU time is the sign of life of a rank whose Python threads wait for a long call into C.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_COUNTS.size))
        self._shared = _map(path)

    def read(self, pid: int) -> Pulse:
        marks, beats = _COUNTS.unpack_from(self._shared, 0)
        return Pulse(marks, (beats, cpu_ticks(pid)))


def cpu_ticks(pid: int) -> int:
    """CPU time that a process has used, in clock ticks; -1 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, _COUNTS.size)
    finally:
        os.close(descriptor)

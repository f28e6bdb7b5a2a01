"""Forecasts: how long rollouts will get, and from that how full an engine's KV cache will get.

**Lengths** (`LengthModel`) are a life table: of the rollouts known to have reached a length, what
share ended there? These shares give the probability of getting further, given the tokens so far.
Two sources feed the table: finished rollouts, and as lower bounds those that still run.
Without the latter the first rollouts to finish, which are the short ones, would look typical.

Where nothing is known nothing ends: a length that fewer than `least` rollouts have reached is
assumed to continue to its limit (the paper's worst-case rule). This covers the cold start and a
rollout longer than all before it. It also keeps a later stage with a higher limit from taking the
old limit for a length: a truncated rollout counts as one that reached the limit and continued.

Lengths are kept in buckets whose width is 1/16 of their size, and old rollouts fade (half the
weight after `half_life` newer ones), because the policy's lengths change as it learns.

**KV use** (`KvForecast`): every sequence of an engine advances by one token per step, so steps are
the time axis. After h more steps a rollout with x tokens holds x + h tokens if it still runs; the
table gives that probability. The sum over an engine's rollouts gives the mean and the variance
(rollouts end independently) of the KV in use at every future step. Admission needs the peak of
this curve. It is far below the sum of the final lengths, because rollouts reach their final
lengths at different times.

The steps up to a limit are divided into `POINTS` intervals. Within an interval a rollout counts
with the blocks that it has at the end and the survival probability that it has at the start, so
the forecast errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Array = npt.NDArray[np.float64]

POINTS = 64
CERTAIN = 40.0
"""So many deviations below the mean, the normal distribution is 0 in a float of eight bytes."""


# --------------------------------------------------------------------------- lengths


def bucket(length: int) -> int:
    """The bucket of a length: 0 to 31 have one each, then each doubling has sixteen."""
    shift = max(0, length.bit_length() - 5)
    return 16 * shift + (length >> shift)


def shortest_in(index: int) -> int:
    """The shortest length in a bucket."""
    shift = max(0, index // 16 - 1)
    return (index - 16 * shift) << shift


class LengthModel:
    """The distribution of completion lengths, tool responses included."""

    def __init__(self, *, least: int = 16, half_life: int = 512) -> None:
        self.least = least
        self.half_life = half_life
        self.tables = 0
        """How often the table was rebuilt."""
        self._weight = 1.0
        """Weight of the next rollout; it grows instead of shrinking all earlier weights."""
        self._ended: list[float] = []
        self._reached: list[float] = []
        """Weight of finished rollouts by the bucket of their final length."""
        self._observed = 0
        self._table_of = -1
        self._alive: Array = np.ones(1)
        """Probability of getting beyond a length, by length; constant after the last entry."""

    def __len__(self) -> int:
        return self._observed

    @property
    def mean(self) -> float | None:
        """The mean length of finished rollouts, to the width of a bucket; None without any."""
        weight = sum(self._reached)
        if not weight:
            return None
        return sum(x * shortest_in(index) for index, x in enumerate(self._reached)) / weight

    def observe(self, completion: int, *, truncated: bool = False) -> None:
        """A rollout ended with this many completion tokens."""
        index = bucket(completion)
        if index >= len(self._ended):
            grow = index + 1 - len(self._ended)
            self._ended += [0.0] * grow
            self._reached += [0.0] * grow
        self._weight *= 2 ** (1 / self.half_life)
        self._reached[index] += self._weight
        if not truncated:
            self._ended[index] += self._weight
        self._observed += 1
        if self._weight > 1e100:
            self._ended = [x / self._weight for x in self._ended]
            self._reached = [x / self._weight for x in self._reached]
            self._weight = 1.0

    @property
    def outdated(self) -> bool:
        """Whether enough rollouts were observed since the last `refresh` to need another."""
        new = self._observed - max(0, self._table_of)
        return new > 0 and (
            self._table_of < 0 or new >= min(self.half_life // 8, 1 + self._table_of // 8)
        )

    def refresh(self, running: Iterable[int] = ()) -> None:
        """Rebuild the table; `running` are the completion lengths of running rollouts so far."""
        counts = [x / self._weight for x in self._reached]
        for length in running:
            index = bucket(length)
            if index >= len(counts):
                counts += [0.0] * (index + 1 - len(counts))
            counts[index] += 1.0
        at_risk = list(accumulate(reversed(counts)))
        at_risk.reverse()
        edges, alive = [0.0], [1.0]
        for index, (ended, risk) in enumerate(zip(self._ended, at_risk, strict=False)):
            share = ended / self._weight / (risk + 1.0) if risk > self.least - 0.5 else 0.0
            edges.append(float(shortest_in(index + 1)))
            alive.append(alive[-1] * (1.0 - share))
        self._alive = np.interp(np.arange(int(edges[-1]) + 1), edges, alive)
        self._table_of = self._observed
        self.tables += 1

    def survival(self, completion: npt.ArrayLike, further: npt.ArrayLike) -> Array:
        """Probability that a rollout with `completion` tokens gets beyond `further` more."""
        last = len(self._alive) - 1
        start = np.minimum(np.asarray(completion, dtype=np.int64), last)
        end = np.minimum(start + np.asarray(further, dtype=np.int64), last)
        here = self._alive[start]
        known = here > 1e-9
        return np.where(known, self._alive[end] / np.where(known, here, 1.0), 1.0)

    def quantile(self, level: float, *, completion: int, longest: int) -> int:
        """The completion length that a rollout does not exceed with probability `level`."""
        further = np.arange(max(1, longest - completion + 1))
        ended = np.flatnonzero(1.0 - self.survival(completion, further) >= level)
        return min(longest, completion + int(ended[0])) if len(ended) else longest


# --------------------------------------------------------------------------- KV use


class RolloutProgress(NamedTuple):
    """The current size of one rollout, in tokens."""

    prompt: int
    completion: int
    limit: int
    shared: int = 0
    """Prompt tokens whose KV other rollouts of its group already hold."""


@dataclass(frozen=True)
class KvDemand:
    """Mean and variance of the KV tokens held, per interval. The arrays never change."""

    mean: Array
    variance: Array
    alive: Array
    """Probability that the rollout still runs; for several rollouts, their expected number."""

    @cached_property
    def start(self) -> float:
        """The mean of the first interval."""
        return float(self.mean[0])

    @cached_property
    def mean_sum(self) -> float:
        """The mean, summed over the intervals."""
        return float(self.mean.sum())

    @cached_property
    def most(self) -> tuple[float, float]:
        """The largest mean and the largest variance of an interval."""
        return float(self.mean.max()), float(self.variance.max())

    @cached_property
    def alive_sum(self) -> float:
        """The expected number of intervals that begin before the rollout ends."""
        return float(self.alive.sum())

    @property
    def rows(self) -> list[KvDemand]:
        """The demands of several rollouts, one by one."""
        rows = zip(self.mean, self.variance, self.alive, strict=True)
        return [KvDemand(*row) for row in rows]

    @property
    def total(self) -> KvDemand:
        """The sum over all rollouts."""
        return KvDemand(self.mean.sum(axis=0), self.variance.sum(axis=0), self.alive.sum(axis=0))


def kv_demands(
    lengths: LengthModel, rollouts: Sequence[RolloutProgress], *, width: int, block: int
) -> KvDemand:
    """KV demand over the next POINTS intervals of `width` steps, one row per rollout."""
    starts = np.arange(POINTS, dtype=np.int64) * width
    prompt, completion, limit, shared = np.array(rollouts, dtype=np.int64).T[:, :, None]
    now = prompt + completion + starts
    alive = np.where(now < limit, lengths.survival(completion, starts), 0.0)
    # rollouts that share the prompt may end first: assume the same survival probability for them
    tokens = -(-np.minimum(now + width, limit) // block) * block - shared * alive
    mean = tokens * alive
    return KvDemand(mean, mean * (tokens - mean), alive)


@dataclass(slots=True)
class KvForecast:
    """The expected KV use of one engine over the coming steps."""

    width: int
    made_at: int
    """The engine's step count when the forecast was made."""
    table: int
    """The length table it was made from (`LengthModel.tables`)."""
    mean: Array = field(default_factory=lambda: np.zeros(POINTS))
    variance: Array = field(default_factory=lambda: np.zeros(POINTS))
    alive: Array = field(default_factory=lambda: np.zeros(POINTS))
    now: float = 0.0
    """The mean of the current interval."""
    alive_now: float = 0.0
    """Rollouts expected to run in the current interval."""
    peak_mean: float = 0.0
    fullest: int = 0
    """The interval in which the mean is largest."""
    work: float = 0.0
    """Tokens held, summed over all coming steps: the KV that decoding will read."""

    def add(self, demand: KvDemand) -> None:
        self.mean += demand.mean
        self.variance += demand.variance
        self.alive += demand.alive
        self._find_peak()

    def remove(self, demand: KvDemand) -> None:
        self.mean -= demand.mean
        self.variance -= demand.variance
        self.alive -= demand.alive
        self._find_peak()

    def _find_peak(self) -> None:
        self.now, self.alive_now = float(self.mean[0]), float(self.alive[0])
        self.fullest = int(self.mean.argmax())
        self.peak_mean = float(self.mean[self.fullest])
        self.work = float(self.mean.sum()) * self.width

    def steps_until_room(self, more: KvDemand, room: float) -> int:
        """Steps after which the expected KV use leaves room for the start of another rollout."""
        start = more.start
        if self.peak_mean + start <= room:
            return 0
        return self.width * int(np.flatnonzero(self.mean + start > room)[-1] + 1)

    def never_full(self, more: KvDemand, room: float) -> bool:
        """Whether `if_added` would give an overflow the probability 0, whatever the interval."""
        mean, variance = more.most
        deviation = sqrt(max(0.01, float(self.variance.max())) + variance)
        return self.peak_mean + mean + CERTAIN * deviation < room

    def if_added(self, more: KvDemand, room: float, again: float) -> tuple[float, float]:
        """What a rollout is expected to gain and to cost if it is added last.

        The last one is the first to be preempted when the cache overflows. Returns the steps that
        it runs until then, and the tokens that are computed again: its own, and those of `again`
        other rollouts for each one that ends while the cache is full because of it (a full engine
        admits and preempts at its edge whenever room becomes free).
        """
        before = np.maximum(self.variance, 0.01)
        deviation = np.sqrt(before + more.variance)
        over = room + 0.5  # tokens are whole
        full = ndtr((self.mean + more.mean - over) / deviation)
        fuller = full - ndtr((self.mean - over) / np.sqrt(before))
        alive = self.alive + more.alive
        ends = alive.copy()
        ends[:-1] -= alive[1:]
        size = (self.mean + more.mean) / np.maximum(alive, 1e-9)
        until = np.maximum.accumulate(full)
        steps = self.width * float(more.alive @ (1.0 - until))
        preempted = until.copy()
        preempted[1:] -= until[:-1]
        lost = float(more.mean @ preempted)
        return steps, lost + again * float(np.maximum(fuller, 0.0) @ (ends * size))

"""What to expect of a rollout: its final length, learnt while the run goes on.

A life table: of the rollouts known to have reached a length, which share ended right there? From
these shares follows the chance to get any further, given the tokens so far. Two sources feed it:
finished rollouts, and (as lower bounds) those that still run. Without the latter the first to
finish, which are the short ones, would pass for typical.

Where nothing is known nothing ends: a length that fewer than `least` rollouts have reached is
taken to run on to its limit (the paper's worst-case rule). This is the cold start, the answer to
a rollout longer than all before it, and what keeps a later stage with a higher limit from taking
the old limit for a length: a truncated rollout counts as one that reached the limit and went on.

Lengths are kept in buckets 1/16 wide relative to their size, and old rollouts fade (half as much
weight after `half_life` newer ones), since the policy's lengths move as it learns.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def bucket(length: int) -> int:
    """0, 1, ..., 31 have their own; from there each doubling has sixteen."""
    shift = max(0, length.bit_length() - 5)
    return 16 * shift + (length >> shift)


def first_of(index: int) -> int:
    """The shortest length in a bucket."""
    shift = max(0, index // 16 - 1)
    return (index - 16 * shift) << shift


class LengthModel:
    """The distribution of completion lengths, tool responses included."""

    def __init__(self, *, least: int = 16, half_life: int = 8192) -> None:
        self.least = least
        self.half_life = half_life
        self.tables = 0
        """How often the table was made anew."""
        self._weight = 1.0
        """Of the next rollout; grows instead of shrinking all others."""
        self._ended: list[float] = []
        self._reached: list[float] = []
        """Weight of finished rollouts by the bucket of the longest length they had."""
        self._observed = 0
        self._table_of = -1
        self._alive: Array = np.ones(1)
        """Chance to get beyond a length, by length; further on it stays as it is."""

    def __len__(self) -> int:
        return self._observed

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
        """Whether enough has been learnt since the last `refresh` to ask for another."""
        new = self._observed - max(0, self._table_of)
        return new > 0 and (self._table_of < 0 or new >= min(1024, 1 + self._table_of // 8))

    def refresh(self, running: Iterable[int] = ()) -> None:
        """Make the table anew, with the completion lengths that running rollouts have reached."""
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
            edges.append(float(first_of(index + 1)))
            alive.append(alive[-1] * (1.0 - share))
        self._alive = np.interp(np.arange(int(edges[-1]) + 1), edges, alive)
        self._table_of = self._observed
        self.tables += 1

    def survival(self, completion: npt.ArrayLike, further: npt.ArrayLike) -> Array:
        """Chance that a rollout with `completion` tokens gets beyond `further` more."""
        last = len(self._alive) - 1
        start = np.minimum(np.asarray(completion, dtype=np.int64), last)
        end = np.minimum(start + np.asarray(further, dtype=np.int64), last)
        here = self._alive[start]
        known = here > 1e-9
        return np.where(known, self._alive[end] / np.where(known, here, 1.0), 1.0)

    def quantile(self, level: float, *, completion: int, longest: int) -> int:
        """The completion that a rollout does not exceed with this probability."""
        further = np.arange(max(1, longest - completion + 1))
        ended = np.flatnonzero(1.0 - self.survival(completion, further) >= level)
        return min(longest, completion + int(ended[0])) if len(ended) else longest

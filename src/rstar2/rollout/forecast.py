"""How full an engine's KV cache will get, from who is on it and how long rollouts get.

All sequences of an engine advance by one token per step, so steps are the axis: after h more steps
a rollout with x tokens holds x + h, if it is still there, and the chance of that is known from the
length table. Summed over an engine's rollouts this gives the mean and the variance (rollouts end
independently) of the KV in use at every future step. Their peak is what counts: rollouts do not
all stand at their longest at the same time, so it lies far below the sum of their lengths.

Steps are taken `POINTS` to a limit; within an interval a rollout counts with the blocks it has at
its end and the chance it has at its beginning, so the forecast errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rstar2.rollout.lengths import Array, LengthModel

POINTS = 64


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a forecast needs to know of one rollout."""

    prompt: int
    completion: int
    limit: int
    shared: int = 0
    """Tokens of its prompt that others of its group hold anyway."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean, variance and third central moment of the KV to be held, by interval."""

    mean: Array
    variance: Array
    third: Array

    def row(self, index: int) -> Demand:
        """Of several rollouts' demands that of one."""
        return Demand(self.mean[index], self.variance[index], self.third[index])

    @property
    def total(self) -> Demand:
        """Several rollouts' demands added up."""
        return Demand(self.mean.sum(axis=0), self.variance.sum(axis=0), self.third.sum(axis=0))


def demands(lengths: LengthModel, rollouts: Sequence[Outlook], *, width: int, block: int) -> Demand:
    """What the rollouts will hold over the next POINTS intervals of `width` steps, a row each."""
    starts = np.arange(POINTS, dtype=np.int64) * width
    prompt = np.array([r.prompt for r in rollouts], dtype=np.int64)[:, None]
    completion = np.array([r.completion for r in rollouts], dtype=np.int64)[:, None]
    limit = np.array([r.limit for r in rollouts], dtype=np.int64)[:, None]
    shared = np.array([r.shared for r in rollouts], dtype=np.int64)[:, None]
    now = prompt + completion + starts
    alive = np.where(now < limit, lengths.survival(completion, starts), 0.0)
    # those with whom a prompt is shared may end first: they are still there by the same chance
    tokens = -(-np.minimum(now + width, limit) // block) * block - shared * alive
    mean = tokens * alive
    variance = mean * (tokens - mean)
    third = variance * (tokens - 2 * mean)
    return Demand(mean, variance, third)


@dataclass(slots=True)
class Forecast:
    """The KV in use on one engine, now and over the steps to come."""

    width: int
    made_at: int
    """The engine's pulse when it was made."""
    table: int
    """The length table from which it was made."""
    mean: Array = field(default_factory=lambda: np.zeros(POINTS))
    variance: Array = field(default_factory=lambda: np.zeros(POINTS))
    third: Array = field(default_factory=lambda: np.zeros(POINTS))
    z: float = 0.0
    """How many standard deviations a margin has, skewness apart."""
    peak_mean: float = 0.0
    fullest: int = 0
    """The interval in which the mean is largest."""
    work: float = 0.0
    """Tokens held, summed over all steps to come: what decoding will have to read."""

    def add(self, demand: Demand) -> None:
        self.mean += demand.mean
        self.variance += demand.variance
        self.third += demand.third
        self.settle()

    def remove(self, demand: Demand) -> None:
        self.mean -= demand.mean
        self.variance -= demand.variance
        self.third -= demand.third
        self.settle()

    def settle(self) -> None:
        """Work out the peak anew."""
        self.fullest = int(self.mean.argmax())
        self.peak_mean = float(self.mean[self.fullest])
        self.work = float(self.mean.sum()) * self.width

    def peak_with(self, more: Demand) -> float:
        """The peak with its margin if another rollout came.

        The margin is the normal quantile, corrected for skewness (Cornish-Fisher): a few rollouts
        of which each may get long are likelier to exceed it than many.
        """
        variance = np.maximum(self.variance + more.variance, 0.0)
        third = np.maximum(self.third + more.third, 0.0)
        skewed = max(0.0, self.z**2 - 1) / 6 * third / np.maximum(variance, 1.0)
        return float((self.mean + more.mean + self.z * np.sqrt(variance) + skewed).max())

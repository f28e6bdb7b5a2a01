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


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean and variance of the KV tokens that one rollout will hold, by interval."""

    mean: Array
    variance: Array


def demands(
    lengths: LengthModel, rollouts: Sequence[Outlook], *, width: int, block: int
) -> list[Demand]:
    """What each of the rollouts will hold over the next POINTS intervals of `width` steps."""
    starts = np.arange(POINTS, dtype=np.int64) * width
    prompt = np.array([r.prompt for r in rollouts], dtype=np.int64)[:, None]
    completion = np.array([r.completion for r in rollouts], dtype=np.int64)[:, None]
    limit = np.array([r.limit for r in rollouts], dtype=np.int64)[:, None]
    now = prompt + completion + starts
    tokens = -(-np.minimum(now + width, limit) // block) * block
    alive = np.where(now < limit, lengths.survival(completion, starts), 0.0)
    mean = tokens * alive
    variance = mean * (tokens - mean)
    return [Demand(mean[i], variance[i]) for i in range(len(rollouts))]


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
    z: float = 0.0
    peak: float = 0.0
    """The largest mean + z standard deviations ahead."""
    peak_mean: float = 0.0
    fullest: int = 0
    """The interval in which the mean is largest."""
    work: float = 0.0
    """Tokens held, summed over all steps to come: what decoding will have to read."""

    def add(self, demand: Demand) -> None:
        self.mean += demand.mean
        self.variance += demand.variance
        self.settle()

    def remove(self, demand: Demand) -> None:
        self.mean -= demand.mean
        self.variance -= demand.variance
        self.settle()

    def settle(self) -> None:
        """Work out the peak anew."""
        self.fullest = int(self.mean.argmax())
        self.peak_mean = float(self.mean[self.fullest])
        self.peak = self.peak_with(None)
        self.work = float(self.mean.sum()) * self.width

    def peak_with(self, more: Demand | None) -> float:
        """The peak if another rollout came."""
        mean = self.mean if more is None else self.mean + more.mean
        variance = self.variance if more is None else self.variance + more.variance
        return float((mean + self.z * np.sqrt(np.maximum(variance, 0.0))).max())

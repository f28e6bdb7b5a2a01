"""Group-normalised advantages: how much better than its siblings a kept rollout was."""

from __future__ import annotations

import math
from collections.abc import Sequence


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / std over the kept rollouts; all zero where the rewards are equal.

    std is the population's (divided by G, no epsilon): with a share p of successes a success gets
    sqrt((1 - p) / p) and a failure -sqrt(p / (1 - p)), so that they sum to zero and have unit
    variance for every G.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / std for r in rewards]

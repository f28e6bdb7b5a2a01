"""Advantages: how much better than its siblings a kept rollout was.

`rl.advantage` names one of ADVANTAGES, or your own function as `module:function`: it takes
the rewards of the kept rollouts of one group and returns as many finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rstar2.errors import UserError
from rstar2.plugins import load_function

Advantage = Callable[[Sequence[float]], Sequence[float]]


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


def centred(rewards: Sequence[float]) -> list[float]:
    """r - mean, as in Dr. GRPO: groups that are nearly always or never solved weigh less."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [r - mean for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the others (RLOO); 0 for a rollout without others."""
    total, others = math.fsum(rewards), len(rewards) - 1
    return [r - (total - r) / others if others else 0.0 for r in rewards]


ADVANTAGES: dict[str, Advantage] = {
    "grpo": advantages,
    "dr_grpo": centred,
    "rloo": leave_one_out,
}


def group_advantages(name: str, rewards: Sequence[float]) -> list[float]:
    """The advantages of one group by the function that `rl.advantage` names."""
    values = [float(v) for v in load_function("rl.advantage", name, ADVANTAGES)(rewards)]
    if len(values) != len(rewards) or not all(map(math.isfinite, values)):
        raise UserError(
            f"rl.advantage = {name}: for {len(rewards)} rewards it returned {values[:8]}, but it "
            "must return one finite number per reward"
        )
    return values

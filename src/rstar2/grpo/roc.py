"""Resampling on correct (RoC): which of a problem's 2G rollouts the policy learns from.

A pure function of (group, config, seed): no I/O, no text, no torch (Invariant 6). Its inputs are
fields: typed outcomes of tool calls, the format penalty and the reward.

    failures   floor(n_neg * G / n) of them, uniformly: failure stays diverse
    successes  the rest, without replacement, with weight 1 / (epsilon + p_err + p_format)

    p_err      failed calls / calls; 0.5 where the model called no tool at all
    p_format   the environment's format penalty, such as the paper's for tagged answers

A success is a rollout with a reward above `threshold` (0.5).

Variants, for ablation: `roc` as above; `flat` (RoC's counts, successes uniformly: the control for
the choice by cleanliness); `uniform` (G of all, at random); `none` (the first G: plain GRPO);
`release` (the choice of the released code: cleanest successes and first failures, without a draw,
counts rounded to the nearest integer, two of each).
A group of n <= G members, short because of infrastructure failures, is kept whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rstar2.errors import UserError
from rstar2.types import Choice, Group, Reward, Selection, Trajectory

if TYPE_CHECKING:  # other trainers use RoC without pydantic
    from rstar2.config import RocConfig

RELEASE_MINIMUM = 2
"""The released code keeps at least this many of each kind where they exist."""

WHOLE = "group not larger than G: all kept"
NO_REWARD = "no reward: lost to infrastructure"
FIRST, BEYOND = "among the first G", "beyond the first G"
UNIFORM, NOT_UNIFORM = "drawn uniformly", "not drawn uniformly"
FLAT, NOT_FLAT = "success: drawn uniformly", "success: not drawn uniformly"
POSITIVE, NOT_POSITIVE = "success: drawn by cleanliness", "success: not drawn"
NEGATIVE, NOT_NEGATIVE = "failure: drawn uniformly", "failure: not drawn"
CLEANEST, NOT_CLEANEST = "success: among the cleanest", "success: less clean than those kept"
FIRST_NEGATIVE, LATER_NEGATIVE = "failure: among the first", "failure: after those kept"

_REASONS = {
    "none": {True: (FIRST, BEYOND), False: (FIRST, BEYOND)},
    "uniform": {True: (UNIFORM, NOT_UNIFORM), False: (UNIFORM, NOT_UNIFORM)},
    "flat": {True: (FLAT, NOT_FLAT), False: (NEGATIVE, NOT_NEGATIVE)},
    "roc": {True: (POSITIVE, NOT_POSITIVE), False: (NEGATIVE, NOT_NEGATIVE)},
    "release": {True: (CLEANEST, NOT_CLEANEST), False: (FIRST_NEGATIVE, LATER_NEGATIVE)},
}


def error_penalty(failed_calls: int, calls: int) -> float:
    """p_err: share of failed calls; 0.5 if there was no call."""
    return failed_calls / calls if calls else 0.5


def penalties(trajectory: Trajectory) -> tuple[float, float]:
    """(p_err, p_format) of one rollout, from its typed fields."""
    p_err = error_penalty(trajectory.failed_calls, trajectory.calls)
    return p_err, trajectory.format_penalty


def quotas(
    positives: int,
    negatives: int,
    keep: int,
    min_positives: int = 1,
    min_negatives: int = 1,
    *,
    nearest: bool = False,
) -> tuple[int, int]:
    """(successes, failures) to keep of a group; they add up to min(keep, members).

    Failures get floor(negatives * keep / members) (`nearest`: rounded, halves to even), raised to
    their minimum; then successes their minimum, which wins where both do not fit. A minimum never
    exceeds what exists.
    """
    members = positives + negatives
    keep = min(keep, members)
    if keep == 0:
        return 0, 0
    share = round(negatives * keep / members) if nearest else negatives * keep // members
    failures = max(share, min(min_negatives, negatives))
    failures = min(failures, keep - min(min_positives, positives, keep))
    failures = max(failures, keep - positives)
    return keep - failures, failures


def draw(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Draw `count` indices without replacement, one after another, each by its share of weight.

    Exponential keys give exactly that law: the smallest of E_i / w_i is i with probability
    w_i / sum(w), and what remains is memoryless.
    """
    keys = [rng.expovariate(1.0) / weight for weight in weights]
    return sorted(range(len(weights)), key=keys.__getitem__)[:count]


def resample_on_correct(
    rewards: Sequence[float],
    penalties: Sequence[float],
    keep: int,
    seed: int | str,
    *,
    epsilon: float = 0.05,
    min_positives: int = 1,
    min_negatives: int = 1,
    threshold: float = 0.5,
) -> list[int]:
    """Choose the rollouts of one problem to learn from, by resampling on correct.

    A pure function of plain numbers, so that any trainer can use it; it needs no torch.

    rewards: one per rollout; those above `threshold` are successes
    penalties: p_err + p_format of each rollout; successes are drawn with weight
        1 / (epsilon + penalty), failures uniformly
    keep: how many rollouts to choose
    seed: of the draw
    epsilon: bounds the weight of a rollout without penalties
    min_positives: fewest successes, if there are any
    min_negatives: fewest failures, if there are any
    threshold: a success has a reward above it

    Returns the chosen indices in ascending order. Raises UserError if the lengths differ or `keep`
    is below 1.

    Example:

        kept = rstar2.resample_on_correct([1, 1, 0, 0], [0.0, 0.5, 0.0, 0.5], keep=2, seed="step1")
        assert len(kept) == 2
    """
    if len(rewards) != len(penalties):
        raise UserError(f"{len(rewards)} rewards but {len(penalties)} penalties")
    if keep < 1:
        raise UserError(f"keep={keep}: at least one rollout must be kept")
    rng = random.Random(str(seed))
    positives = [i for i, reward in enumerate(rewards) if reward > threshold]
    negatives = [i for i, reward in enumerate(rewards) if not reward > threshold]
    k_pos, k_neg = quotas(len(positives), len(negatives), keep, min_positives, min_negatives)
    weights = [1.0 / (epsilon + penalties[i]) for i in positives]
    kept = [positives[i] for i in draw(weights, k_pos, rng)]
    kept += rng.sample(negatives, k_neg)
    return sorted(kept)


def shaped_reward(trajectory: Trajectory, reward: Reward, tool_errors: float) -> float:
    """The reward that is learnt from: less `tool_errors` times the share of failed calls."""
    if not tool_errors or not trajectory.calls:
        return reward.value
    return reward.value - tool_errors * trajectory.failed_calls / trajectory.calls


def select(group: Group, config: RocConfig, seed: int, *, tool_errors: float = 0.0) -> Selection:
    """Choose the rollouts of one group to learn from; every choice carries its reason.

    What counts as a success does not depend on `tool_errors` (`rl.reward`); advantages do.
    """
    members = [i for i, t in enumerate(group.trajectories) if t.reward is not None]
    both = [penalties(t) for t in group.trajectories]
    p_err, p_format = [p for p, _ in both], [p for _, p in both]
    p_total = [
        p_err[i] * config.penalise_errors + p_format[i] * config.penalise_format for i in members
    ]
    rewards = [t.reward.value for t in group.trajectories if t.reward is not None]
    whole = len(members) <= config.kept
    chosen = (
        range(len(members))
        if whole
        else _choose(rewards, p_total, config, random.Random(f"{seed}/{group.id}"))
    )
    kept = {members[i] for i in chosen}
    total = dict(zip(members, p_total, strict=True))

    choices = []
    for i, trajectory in enumerate(group.trajectories):
        if trajectory.reward is None:
            choices.append(Choice(trajectory.id, False, NO_REWARD, 0.0, p_err[i], p_format[i], 0.0))
            continue
        success = trajectory.reward.value > config.threshold
        weighted = config.variant == "roc" and success
        choices.append(
            Choice(
                trajectory_id=trajectory.id,
                kept=i in kept,
                reason=WHOLE if whole else _REASONS[config.variant][success][0 if i in kept else 1],
                reward=shaped_reward(trajectory, trajectory.reward, tool_errors),
                p_err=p_err[i],
                p_format=p_format[i],
                weight=1.0 / (config.epsilon + total[i]) if weighted else 1.0,
            )
        )
    return Selection(group.id, config.variant, tuple(choices))


def _choose(
    rewards: Sequence[float], p_total: Sequence[float], config: RocConfig, rng: random.Random
) -> Iterable[int]:
    """Positions to keep of a group that is larger than G."""
    if config.variant == "none":
        return range(config.kept)
    if config.variant == "uniform":
        return rng.sample(range(len(rewards)), config.kept)
    if config.variant == "release":
        return _release(rewards, p_total, config)
    return resample_on_correct(
        rewards,
        [0.0] * len(rewards) if config.variant == "flat" else p_total,
        config.kept,
        rng.getrandbits(64),
        epsilon=config.epsilon,
        min_positives=config.min_positives,
        min_negatives=config.min_negatives,
        threshold=config.threshold,
    )


def _release(
    rewards: Sequence[float], p_total: Sequence[float], config: RocConfig
) -> Iterable[int]:
    """The choice of the released code: its main branch since 5 September 2025 (5e95b19)."""
    positives = [i for i, reward in enumerate(rewards) if reward > config.threshold]
    negatives = [i for i, reward in enumerate(rewards) if not reward > config.threshold]
    k_pos, k_neg = quotas(
        len(positives),
        len(negatives),
        config.kept,
        RELEASE_MINIMUM,
        RELEASE_MINIMUM,
        nearest=True,
    )
    return sorted(positives, key=p_total.__getitem__)[:k_pos] + negatives[:k_neg]

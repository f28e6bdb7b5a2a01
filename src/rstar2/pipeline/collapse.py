"""Collapse detection: training that has collapsed does not recover (the paper's own run collapses
after step 510), so it is stopped. Pure: a window of past steps in, a verdict out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rstar2.config import CollapseConfig
from rstar2.evaluate.metrics import mean


@dataclass(frozen=True, slots=True)
class CollapseWindow:
    """What the collapse detector remembers of earlier steps."""

    rewards: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    formats: tuple[float, ...] = ()
    best_reward: float = 0.0
    best_format: float = 0.0
    best_step: int = 0
    """Overall step that closed the best window."""


def detect_collapse(
    window: CollapseWindow,
    config: CollapseConfig,
    *,
    step: int,
    reward: float,
    entropy: float,
    format_share: float,
) -> tuple[CollapseWindow, str]:
    """Add one step; returns the new window and the reason to stop (empty: continue).

    `format_share` is the share of rollouts that gave an answer. There is no verdict before
    the window is full; means are compared with the best full window so far.
    """

    def push(values: tuple[float, ...], value: float) -> tuple[float, ...]:
        return (*values, value)[-config.window :]

    window = replace(
        window,
        rewards=push(window.rewards, reward),
        entropies=push(window.entropies, entropy),
        formats=push(window.formats, format_share),
    )
    if len(window.rewards) < config.window:
        return window, ""
    reward_mean, format_mean = mean(window.rewards), mean(window.formats)
    reason = ""
    if reward_mean < (1 - config.reward_drop) * window.best_reward:
        reason = f"reward fell from {window.best_reward:.3f} to {reward_mean:.3f}"
    elif format_mean < (1 - config.format_drop) * window.best_format:
        reason = f"share of answers fell from {window.best_format:.3f} to {format_mean:.3f}"
    elif config.entropy_floor is not None and mean(window.entropies) < config.entropy_floor:
        reason = f"entropy {mean(window.entropies):.4f} is below {config.entropy_floor:g}"
    if not window.best_step or reward_mean > window.best_reward:
        window = replace(window, best_reward=reward_mean, best_step=step)
    return replace(window, best_format=max(window.best_format, format_mean)), reason

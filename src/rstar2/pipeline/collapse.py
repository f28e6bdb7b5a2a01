"""When to stop: training that has fallen off a cliff does not climb back (the paper's own run
collapses after step 510). Pure: a window of past steps in, a verdict out.
"""

from __future__ import annotations

from dataclasses import replace

from rstar2.config import CollapseConfig
from rstar2.evaluate.metrics import mean
from rstar2.pipeline.state import Window


def watch(
    window: Window,
    config: CollapseConfig,
    *,
    step: int,
    reward: float,
    entropy: float,
    format_share: float,
) -> tuple[Window, str]:
    """Add one step; returns the new window and why to stop (empty: go on).

    `format_share` is the share of rollouts that gave an answer. Nothing is judged before the
    window is full; means are compared with the best full window so far.
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

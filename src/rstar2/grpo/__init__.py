"""GRPO-RoC: resampling, advantages and batches (pure, no torch); the loss is in `grpo.loss`.

`resample_on_correct` takes plain numbers, so that other trainers can use it alone:

    from rstar2.grpo import resample_on_correct
    kept = resample_on_correct(rewards, penalties, keep=16, seed=step)
"""

from rstar2.grpo.advantage import advantages
from rstar2.grpo.batch import make_batch, resample_groups, split_minibatches, teaches
from rstar2.grpo.roc import (
    error_penalty,
    penalties,
    resample_on_correct,
    select,
)

__all__ = [
    "advantages",
    "error_penalty",
    "make_batch",
    "penalties",
    "resample_groups",
    "resample_on_correct",
    "select",
    "split_minibatches",
    "teaches",
]

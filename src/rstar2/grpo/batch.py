"""From collected groups to a batch: resampling (2G to G rollouts per group), then advantages.

Advantages are computed before anything is packed, so no later split over micro-batches,
mini-batches or ranks can change a group's statistics. Truncated rollouts stay in, with their
reward (0). Leaving them out of the loss (`overlong_filter`) and reducing the weight of repetition
(`ngram_penalty`) exist as ablations only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rstar2.errors import InvariantError
from rstar2.grpo.advantage import group_advantages
from rstar2.grpo.roc import select
from rstar2.types import Batch, Group, Sample, Selection, Trajectory

if TYPE_CHECKING:  # other trainers use this package without pydantic
    from rstar2.config import LossConfig, RocConfig


def resample_groups(
    groups: Iterable[Group], config: RocConfig, seed: int, *, tool_errors: float = 0.0
) -> tuple[Selection, ...]:
    """Select the rollouts of each group to learn from, in the order of the groups."""
    return tuple(select(group, config, seed, tool_errors=tool_errors) for group in groups)


def teaches(selection: Selection) -> bool:
    """False where the kept rewards are all equal: their advantages are zero."""
    return len({choice.reward for choice in selection.choices if choice.kept}) > 1


def make_batch(
    step: int,
    pairs: Iterable[tuple[Group, Selection]],
    loss: LossConfig,
    advantage: str = "grpo",
) -> Batch:
    """Samples of the kept rollouts, group by group; groups that teach nothing are left out."""
    samples: list[Sample] = []
    for group, selection in pairs:
        if group.id != selection.group_id or len(group.trajectories) != len(selection.choices):
            raise InvariantError(f"selection of {selection.group_id} given for group {group.id}")
        if teaches(selection):
            samples += _samples(group, selection, loss, advantage)
    return Batch(step, tuple(samples))


def _samples(group: Group, selection: Selection, loss: LossConfig, name: str) -> Iterable[Sample]:
    kept = [group.trajectories[i] for i in selection.kept]
    rewards = [selection.choices[i].reward for i in selection.kept]
    for trajectory, advantage in zip(kept, group_advantages(name, rewards), strict=True):
        if loss.overlong_filter and trajectory.truncated:
            continue
        if not trajectory.sampled_tokens:
            continue
        if not all(segment.prompt_ids for segment in trajectory.segments):
            raise InvariantError(f"trajectory {trajectory.id} has no prompt to condition on")
        if loss.ngram_penalty and advantage > 0:
            repeated = repeated_share(trajectory, loss.ngram_tokens)
            advantage *= max(0.0, 1.0 - loss.ngram_penalty * repeated)
        for number, segment in enumerate(trajectory.segments):
            if segment.sampled_tokens:
                yield Sample(
                    token_ids=segment.token_ids,
                    mask=segment.mask,
                    logprobs=segment.logprobs,
                    advantage=advantage,
                    group_id=group.id,
                    trajectory_id=f"{trajectory.id}#{number}" if number else trajectory.id,
                    version=segment.oldest_version or 0,
                )


def repeated_share(trajectory: Trajectory, length: int) -> float:
    """Share of a rollout's runs of `length` sampled tokens that occurred earlier in the rollout."""
    seen: set[tuple[int, ...]] = set()
    total = repeated = 0
    for turn in (turn for segment in trajectory.segments for turn in segment.turns):
        ids = tuple(turn.sampled_ids)
        for start in range(len(ids) - length + 1):
            gram = ids[start : start + length]
            total += 1
            repeated += gram in seen
            seen.add(gram)
    return repeated / total if total else 0.0


def split_minibatches(samples: Sequence[Sample], count: int) -> list[tuple[Sample, ...]]:
    """Split a batch into at most `count` parts of whole groups, as equal in groups as possible."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    members = list(groups.values())
    count = min(count, len(members))
    parts = []
    for part in range(count):
        start, end = part * len(members) // count, (part + 1) * len(members) // count
        parts.append(tuple(sample for group in members[start:end] for sample in group))
    return parts

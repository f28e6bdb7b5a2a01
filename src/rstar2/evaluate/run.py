"""Answer many problems: the same agent loop, fleet and grader as in training.

A filter over 42,000 problems or an evaluation with 16 answers each is far more than the engines
can run at once, and more than memory can hold. So at most `at_once` groups are in flight, and each
is handed over when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from time import monotonic

from rstar2.agent.loop import RolloutSpec
from rstar2.config import Recipe, SamplingConfig
from rstar2.evaluate.metrics import summarise
from rstar2.rollout.collector import Runner
from rstar2.seeds import derive_seed
from rstar2.tasks import together
from rstar2.types import Evaluation, Group, Problem

GREEDY = SamplingConfig(temperature=0.0)

OnGroup = Callable[[int, Group], None]
"""Receives the index of a problem and its finished group."""


def groups_at_once(recipe: Recipe, samples: int) -> int:
    """Groups in flight: twice as many rollouts as all engines can run, since tools take time."""
    engines = len(recipe.engine.urls) or recipe.engine.count
    return max(16, -(-2 * engines * recipe.engine.max_sequences // samples))


def in_order(receive: Callable[[Group], None], first: int = 0) -> OnGroup:
    """Hand groups over in the order of problems; those that end early are held until then.

    A recorded evaluation is read back in its order: the order of ending differs between runs.
    """
    held: dict[int, Group] = {}
    position = first

    def on_group(index: int, group: Group) -> None:
        nonlocal position
        held[index] = group
        while position in held:
            receive(held.pop(position))
            position += 1

    return on_group


async def answer_each(
    runner: Runner,
    problems: Sequence[Problem],
    *,
    name: str,
    step: int,
    seed: int,
    samples: int,
    spec: RolloutSpec,
    at_once: int,
    on_group: OnGroup,
    skip: Collection[int] = (),
) -> None:
    """Draw `samples` answers to every problem but those of `skip`; groups end in any order."""
    left = [index for index in range(len(problems)) if index not in skip]
    queue = iter(left)

    async def worker() -> None:
        for index in queue:
            group = await runner.run(
                problems[index],
                group_id=f"{name}/{step}/{index}",
                step=step,
                seeds=[derive_seed(seed, name, index, sample) for sample in range(samples)],
                spec=spec,
            )
            on_group(index, group)

    await together(worker() for _ in range(min(at_once, len(left))))


async def evaluate(
    runner: Runner,
    problems: Sequence[Problem],
    *,
    stage: str,
    step: int,
    mode: str,
    seed: int,
    samples: int,
    spec: RolloutSpec,
    at_once: int,
    on_group: OnGroup = lambda index, group: None,
    before: Iterable[Group] = (),
) -> Evaluation:
    """Evaluate one mode; `on_group` receives the rollouts as they end.

    `before` has the groups of the first problems, if they were answered already.
    """
    started = monotonic()
    kept = {index: without_values(group) for index, group in enumerate(before)}

    def ended(index: int, group: Group) -> None:
        on_group(index, group)
        kept[index] = without_values(group)

    await answer_each(
        runner,
        problems,
        name=f"eval-{stage}-{mode}",
        step=step,
        seed=seed,
        samples=samples,
        spec=spec,
        at_once=at_once,
        on_group=ended,
        skip=set(kept),
    )
    groups = [kept[index] for index in sorted(kept)]
    wall_s = monotonic() - started
    return summarise(groups, stage=stage, step=step, mode=mode, wall_s=wall_s)


def without_values(group: Group) -> Group:
    """The group without logprobs, entropies and text, which are most of its memory."""
    return replace(
        group,
        trajectories=tuple(
            replace(
                trajectory,
                text="",
                turns=tuple(
                    replace(turn, logprobs=(), entropies=None, text="", calls=())
                    for turn in trajectory.turns
                ),
            )
            for trajectory in group.trajectories
        ),
    )

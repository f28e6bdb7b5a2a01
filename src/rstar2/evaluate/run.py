"""Answer many problems: the same agent loop, fleet and grader as in training.

A filter over 42,000 problems or an evaluation with 16 answers each is far more than the engines
can run at once, and more than memory can hold. So at most `at_once` groups are in flight, and each
is handed over when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from rstar2.agent.loop import RolloutSpec
from rstar2.config import Recipe, SamplingConfig
from rstar2.errors import InfrastructureError
from rstar2.evaluate.metrics import summarise
from rstar2.rollout.collector import Runner
from rstar2.seeds import derive_seed
from rstar2.tasks import LostInARow, for_each
from rstar2.types import Evaluation, Group, Problem

GREEDY = SamplingConfig(temperature=0.0)

OnGroup = Callable[[int, Group], None]
"""Receives the index of a problem and its finished group."""


def groups_at_once(recipe: Recipe, samples: int) -> int:
    """Groups in flight: twice as many rollouts as all engines can run, since tools take time."""
    engines = len(recipe.engine.urls) or recipe.engine.count
    return max(16, -(-2 * engines * recipe.engine.max_sequences // samples))


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
    """Draw `samples` answers to every problem but those of `skip`; groups end in any order.

    A group whose rollouts were all lost says nothing about its problem. It is not handed over but
    drawn again after all others, and `OUTAGE` of them in a row raise InfrastructureError. If it is
    lost again, an engine that is lost raises too. Any other failure is taken for the problem's own
    (its grader, a tool), and the group is handed over without a rollout.
    """
    in_a_row = LostInARow(f"groups of {name}")
    lost: list[int] = []

    async def draw(index: int) -> Group:
        return await runner.run(
            problems[index],
            group_id=f"{name}/{step}/{index}",
            step=step,
            seeds=[derive_seed(seed, name, index, sample) for sample in range(samples)],
            spec=spec,
        )

    async def first(index: int) -> None:
        group = await draw(index)
        if _is_lost(group):
            lost.append(index)
            in_a_row.lost(_causes(group))
        else:
            in_a_row.kept()
            on_group(index, group)

    async def again(index: int) -> None:
        group = await draw(index)
        if _is_lost(group) and "engine" in group.dropped:
            raise InfrastructureError(
                f"{name}: problem {problems[index].id} was lost twice, to {_causes(group)}; "
                "run the same command again to resume"
            )
        on_group(index, group)

    await for_each([i for i in range(len(problems)) if i not in skip], first, at_once)
    await for_each(sorted(lost), again, at_once)


def _is_lost(group: Group) -> bool:
    return bool(group.dropped) and not group.rewards


def _causes(group: Group) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(group.dropped.items()))


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
    before: Mapping[int, Group] | None = None,
) -> Evaluation:
    """Evaluate one mode; `on_group` receives the rollouts as they end.

    `before` has the groups of the problems that were answered already, by index.
    """
    started = monotonic()
    kept = {index: without_values(group) for index, group in (before or {}).items()}

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

"""Collecting ahead of the learner: how far, in which order, and which groups are dropped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.config import RlConfig, RocConfig, StageConfig
from rstar2.rollout.collector import CollectedStep, Collector
from rstar2.rollout.lookahead import GroupSlots, LookaheadCollector, drop_stale
from rstar2.types import Group, Problem, Reward, StopReason, Trajectory, Turn

STAGE = StageConfig(name="short", steps=4, max_length=64, max_turns=3)
RL = RlConfig(
    prompts_per_step=4, refill=3, staleness=1, roc=RocConfig(drawn=4, kept=2), stages=(STAGE,)
)


class Runner:
    """Groups that end when their gate opens, with rewards that follow from their seeds."""

    def __init__(self, solved: float = 0.5) -> None:
        self.solved = solved
        self.started: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.open = True

    async def run(
        self, problem: Problem, *, group_id: str, step: int, seeds: Sequence[int], spec: RolloutSpec
    ) -> Group:
        assert group_id not in self.started, "a group is drawn once"
        self.started.append(group_id)
        if not self.open:
            await self.gates.setdefault(group_id, asyncio.Event()).wait()
        made = tuple(
            Trajectory(
                id=f"{group_id}/{i}",
                problem_id=problem.id,
                group_id=group_id,
                seed=seed,
                prompt_ids=(1,),
                turns=(Turn((2,), (-1.0,), ((0, 1),)),),
                stop=StopReason.ANSWERED,
                reward=Reward(float(random.Random(seed).random() < self.solved), "1", "integer"),
            )
            for i, seed in enumerate(seeds)
        )
        return Group(group_id, problem, step, made)


class Learner:
    """The version that serves, and a collector that stamps with it."""

    def __init__(self, runner: Runner, rl: RlConfig = RL, *, overlap: bool = True) -> None:
        self.version = 0
        problems = [Problem(str(i), f"q{i}", "1") for i in range(50)]
        self.collector = Collector(
            runner,
            problems,
            rl,
            STAGE,
            seed=7,
            teaches=lambda step, group: group.informative,
            version=lambda: self.version,
            slot=GroupSlots(rl.prompts_per_step).acquire,
        )
        self.lookahead = LookaheadCollector(
            self.collector, staleness=rl.staleness, last=STAGE.steps, overlap=overlap
        )

    async def steps(self, count: int) -> list[CollectedStep]:
        taken = []
        for step in range(1, count + 1):
            taken.append(await self.lookahead.collect(step, 0, self.version))
            self.version += 1
        await self.lookahead.close()
        return taken


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_no_group_is_older_than_allowed_and_the_last_step_ends_it(staleness: int) -> None:
    runner = Runner()
    rl = RL.model_copy(update={"staleness": staleness})
    learner = Learner(runner, rl)
    for version, collected in enumerate(await learner.steps(4)):
        assert len(collected.groups) == 4
        assert collected.stale == 0
        assert all(version - staleness <= d.version <= version for d in collected.drawn)
    assert {name.split("/")[1] for name in runner.started} == {"1", "2", "3", "4"}


async def test_without_overlap_every_group_is_exactly_as_old_as_asked() -> None:
    runner = Runner()
    learner = Learner(runner, RL.model_copy(update={"staleness": 2}), overlap=False)
    ages = []
    for step in range(1, 5):
        collected = await learner.lookahead.collect(step, 0, learner.version)
        await settle()
        begun = {int(name.split("/")[1]) for name in runner.started}
        assert begun == set(range(1, min(step + 2, 4) + 1)), "nothing starts while a step is learnt"
        ages.append({learner.version - d.version for d in collected.drawn})
        learner.version += 1
    await learner.lookahead.close()
    assert ages == [{0}, {1}, {2}, {2}]


async def test_a_step_draws_the_same_groups_whatever_was_collected_ahead() -> None:
    """What a resumed run draws for a step does not depend on what was in flight before."""
    whole = await Learner(Runner(0.8)).steps(3)
    resumed = Learner(Runner(0.8))
    resumed.version = 2
    again = await resumed.lookahead.collect(3, 99, 2)
    await resumed.lookahead.close()
    expected = [(d.group, d.used) for d in whole[2].drawn]
    assert [(d.group, d.used) for d in again.drawn] == expected
    assert again.position == whole[2].position == 12
    ids = [d.group.id for collected in whole for d in collected.drawn]
    assert len(ids) == len(set(ids))
    assert any("/r" in name for name in ids), "some groups were refilled"


async def test_the_next_step_fills_what_the_last_groups_leave_free() -> None:
    runner = Runner()
    runner.open = False
    learner = Learner(runner)
    task = asyncio.ensure_future(learner.lookahead.collect(1, 0, 0))
    await settle()
    assert [name.split("/")[1] for name in runner.started] == ["1"] * 4
    runner.gates["short/1/0"].set()
    await settle()
    assert len(runner.started) == 5, "one slot was freed, one group was started"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await learner.lookahead.close()


async def test_a_stale_group_is_counted_and_not_learnt_from() -> None:
    (collected,) = await Learner(Runner()).steps(1)
    old = replace(collected.drawn[0], version=3, used=True)
    mixed = replace(collected, drawn=(old, *(replace(d, version=5) for d in collected.drawn[1:])))
    kept = drop_stale(mixed, 4)
    assert kept.stale == 1
    assert old.group not in kept.groups
    assert len(kept.groups) == len(mixed.groups) - 1
    assert drop_stale(mixed, 3) is mixed


async def test_slots_go_to_the_earliest_step_and_none_is_lost_to_a_cancelled_one() -> None:
    slots = GroupSlots(1)
    order: list[int] = []

    async def hold(step: int) -> None:
        async with slots.acquire(step):
            order.append(step)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(hold(step)) for step in (9, 3, 2, 1)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [9, 1, 3]
    async with asyncio.timeout(60), slots.acquire(4):
        pass

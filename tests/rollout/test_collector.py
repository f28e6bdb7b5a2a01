"""Which groups a step uses: by problem order and rewards, never by who was first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.config import RlConfig, RocConfig, StageConfig
from rstar2.errors import EngineError, InfrastructureError
from rstar2.rollout.collector import CollectedStep, Collector, ProblemOrder, draws_ahead
from rstar2.types import Group, Problem, Reward, StopReason, Trajectory, Turn

STAGE = StageConfig(name="short", steps=4, max_length=64, max_turns=3)
RL = RlConfig(prompts_per_step=4, refill=3, roc=RocConfig(drawn=4, kept=2), stages=(STAGE,))


def trajectory(id: str, group: str, seed: int, value: float) -> Trajectory:
    return Trajectory(
        id=id,
        problem_id="p",
        group_id=group,
        seed=seed,
        prompt_ids=(1,),
        turns=(Turn((2,), (-1.0,), ((0, 1),)),),
        stop=StopReason.ANSWERED,
        answer_tags=1,
        reward=Reward(value, "1", "integer"),
    )


class DiceRunner:
    """Groups whose rewards are a function of the seeds and whose duration is random."""

    def __init__(self, timing: int, *, solved: float = 0.5, lose: int = 0) -> None:
        self.timing, self.solved, self.lose = random.Random(timing), solved, lose
        self.in_flight: set[str] = set()
        self.most = 0
        self.seeds: dict[str, tuple[int, ...]] = {}

    async def run(
        self, problem: Problem, *, group_id: str, step: int, seeds: Sequence[int], spec: RolloutSpec
    ) -> Group:
        assert group_id not in self.seeds, "a group is drawn once"
        self.seeds[group_id] = tuple(seeds)
        self.in_flight.add(group_id)
        self.most = max(self.most, len(self.in_flight))
        for _ in range(self.timing.randint(0, 6)):
            await asyncio.sleep(0)
        self.in_flight.discard(group_id)
        made = [
            trajectory(
                f"{group_id}/{i}", group_id, s, float(random.Random(s).random() < self.solved)
            )
            for i, s in enumerate(seeds)
        ]
        return Group(group_id, problem, step, tuple(made[self.lose :]), {"engine": self.lose})


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), f"q{i}", "1", kind="k") for i in range(count)]


def teaches(step: int, group: Group) -> bool:
    return group.informative


async def collect(runner: DiceRunner, *, step: int = 1, position: int = 0) -> CollectedStep:
    collector = Collector(runner, problems(50), RL, STAGE, seed=7, teaches=teaches)
    return await collector.collect(step, position)


async def test_the_same_groups_whatever_finishes_first() -> None:
    expected = await collect(DiceRunner(0, solved=0.8))
    assert len(expected.groups) == 4
    assert len(expected.drawn) > 4, "some groups were all-equal and were refilled"
    assert expected.drawn[-1].used, "nothing is drawn beyond the group that filled the batch"
    for timing in range(1, 12):
        assert await collect(DiceRunner(timing, solved=0.8)) == expected


@pytest.mark.parametrize("solved", [0.5, 0.8, 0.9])
async def test_refills_that_start_early_change_no_step(solved: float) -> None:
    async def three_steps(timing: int, *, below: int) -> tuple[list[CollectedStep], int]:
        runner = DiceRunner(timing, solved=solved)
        collector = Collector(
            runner, problems(50), RL, STAGE, seed=7, teaches=teaches, refill_below=below
        )
        steps: list[CollectedStep] = []
        for step in (1, 2, 3):
            position = steps[-1].position if steps else 0
            steps.append(await collector.collect(step, position))
        assert not runner.in_flight
        surplus = sum(step.surplus for step in steps)
        assert len(runner.seeds) == sum(len(step.drawn) for step in steps) + surplus
        return [replace(step, surplus=0) for step in steps], runner.most

    expected, most = await three_steps(0, below=0)
    assert most == 4
    for timing in range(1, 12):
        steps, most = await three_steps(timing, below=9)
        assert steps == expected
    if solved == 0.9:
        assert 4 < most <= 9, "engines are filled with refills that will be needed"
        assert (await three_steps(0, below=5))[1] == 5


def test_draws_ahead_by_hand() -> None:
    assert draws_ahead(12, 1.0) == 12
    assert draws_ahead(0, 0.5) == 0
    # 24 draws are expected, give or take sqrt(12 x 0.5) / 0.5 = 4.9
    assert draws_ahead(12, 0.5) == 19
    assert draws_ahead(1, 0.5) == 1, "two are expected, give or take 1.4"
    assert draws_ahead(4, 0.25) == 9, "16 are expected, give or take 6.9"


async def test_no_more_groups_in_flight_than_are_missing() -> None:
    runner = DiceRunner(3, solved=0.8)
    await collect(runner)
    assert runner.most == 4


async def test_refill_stops_at_the_cap() -> None:
    runner = DiceRunner(0, solved=1.0)
    collected = await collect(runner)
    assert collected.groups == ()
    assert len(collected.drawn) == collected.position == 12


async def test_next_step_continues_where_the_last_ended_with_other_seeds() -> None:
    runner = DiceRunner(0)
    first = await collect(runner)
    second = await collect(runner, step=2, position=first.position)
    assert second.drawn[0].group.id == f"short/2/{first.position}"
    seeds = [s for group in runner.seeds.values() for s in group]
    assert len(seeds) == len(set(seeds))


async def test_a_step_mostly_lost_is_an_outage() -> None:
    with pytest.raises(InfrastructureError, match=r"48 of 64 rollouts|rollouts were lost"):
        await collect(DiceRunner(0, lose=3))


async def test_an_error_ends_the_other_groups() -> None:
    class Broken(DiceRunner):
        async def run(self, problem: Problem, **kwargs: object) -> Group:
            if kwargs["group_id"] == "short/1/2":
                raise EngineError("gone")
            self.in_flight.add(str(kwargs["group_id"]))
            try:
                await asyncio.Event().wait()
            finally:
                self.in_flight.discard(str(kwargs["group_id"]))
            raise AssertionError

    runner = Broken(0)
    with pytest.raises(EngineError, match="gone"):
        await collect(runner)
    assert not runner.in_flight


def test_order_is_one_permutation_after_another() -> None:
    order = ProblemOrder(10, seed=1, stage="a")
    first, second = [order[i] for i in range(10)], [order[i] for i in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [order[i] for i in range(10)] == first, "any position, at any time"
    assert [ProblemOrder(10, seed=1, stage="b")[i] for i in range(10)] != first

"""A runner of groups that ends the process or loses groups on command: tests of what resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rstar2.agent.loop import RolloutSpec
from rstar2.types import Group, Problem, Reward, StopReason, Trajectory, Turn


class KilledError(BaseException):
    """Ends the process between two groups."""


class ScriptedRunner:
    """Solves every third problem always; `dies_after` groups it ends the process.

    `loses` decides which groups are lost whole, by problem and number of groups ended before.
    """

    def __init__(
        self,
        dies_after: int | None = None,
        loses: Callable[[int, int], bool] = lambda index, ended: False,
        lost_to: str = "engine",
    ) -> None:
        self.asked: list[int] = []
        self.ended = self.running = self.most = 0
        self.dies_after = dies_after
        self.loses, self.lost_to = loses, lost_to

    async def run(
        self, problem: Problem, *, group_id: str, step: int, seeds: Sequence[int], spec: RolloutSpec
    ) -> Group:
        index = int(problem.id)
        self.asked.append(index)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(index % 7):  # groups end in another order
            await asyncio.sleep(0)
        if self.ended == self.dies_after:
            raise KilledError
        self.running -= 1
        if self.loses(index, self.ended):
            return Group(group_id, problem, step, (), {self.lost_to: len(seeds)})
        self.ended += 1
        turn = Turn((1, 2), (-0.5, -0.5), ((0, 2),))
        rollouts = tuple(
            Trajectory(
                f"{group_id}/{i}",
                problem.id,
                group_id,
                seed,
                (1,),
                (turn,),
                StopReason.ANSWERED,
                reward=Reward(float(index % 3 == 0 or i == 0)),
            )
            for i, seed in enumerate(seeds)
        )
        return Group(group_id, problem, step, rollouts)

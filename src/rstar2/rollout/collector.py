"""The groups of one step: drawn in a fixed order, refilled where they teach nothing.

    order -> GroupRunner -> teaches? -> yes: into the step
                               └─ no: count it, draw the next problem

Invariants
- The problems of a step are the shortest run of the order, from `position` on, that holds P groups
  worth learning from (or `refill` x P problems, if that comes first). Which these are depends on
  the rewards alone and not on which group finishes first, so a resumed step draws the same problems
  again. Refills start before it is known that they are needed (`draws_ahead`), so that engines stay
  full; groups that turn out not to be needed are left out and counted.
- Seeds derive from (recipe seed, stage, step, problem, rollout), so a group's rollouts do not
  depend on when or where they were run.
- With staleness, several steps are collected at once, so none may depend on how many problems
  another needed: step n has its own P problems of the order, and draws refills from a second
  order. Each group carries the version of the weights that served when it was dispatched.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rstar2.agent.loop import RolloutSpec
from rstar2.config import RlConfig, StageConfig
from rstar2.errors import InfrastructureError
from rstar2.seeds import derive_seed
from rstar2.tasks import cancel_all
from rstar2.types import Group, Problem, WeightVersion


class Runner(Protocol):
    """The one method of GroupRunner that collecting needs."""

    async def run(
        self, problem: Problem, *, group_id: str, step: int, seeds: Sequence[int], spec: RolloutSpec
    ) -> Group: ...


class ProblemOrder:
    """An endless seeded order over problems: one permutation after another."""

    def __init__(self, count: int, *, seed: int, stage: str) -> None:
        if count < 1:
            raise ValueError(f"stage {stage}: there is no problem to draw")
        self.count, self.seed, self.stage = count, seed, stage
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        """Index of the problem at a position; any position can be asked at any time."""
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(self.count))
            rng = random.Random(derive_seed(self.seed, "order", self.stage, epoch))
            rng.shuffle(self._permutation)
        return self._permutation[offset]


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group, and whether the step uses it."""

    group: Group
    used: bool
    version: WeightVersion = 0
    """The weights that served when it was dispatched."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """All groups that one step drew, in the order of the problems."""

    drawn: tuple[DrawnGroup, ...]
    position: int
    """Where the next step continues in the order of problems."""
    wanted: int
    stale: int = 0
    """Groups that were too old to be learnt from."""
    surplus: int = 0
    """Groups that were started ahead and turned out not to be needed."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups to learn from."""
        return tuple(d.group for d in self.drawn if d.used)

    @property
    def lost(self) -> Counter[str]:
        """Rollouts dropped because of infrastructure failures, by name."""
        return _lost(self.drawn)


def draws_ahead(missing: int, share: float) -> int:
    """How many groups to have in flight while `missing` groups worth learning from are missing.

    Each group is worth it with probability `share`, so `missing / share` draws are expected to be
    needed, with a standard deviation of sqrt(missing (1 - share)) / share. One standard deviation
    fewer are in flight: hardly any of them is drawn in vain.
    """
    if missing <= 0:
        return 0
    spread = math.sqrt(missing * (1.0 - share))
    return max(missing, math.floor((missing - spread) / share))


class Collector:
    """Collects the groups of RL steps of one stage.

    `teaches(step, group)` decides, without side effects, whether a group is worth learning from;
    the collector draws another problem for each group that is not. `on_progress(step, done, total)`
    is called after every group. `slot(step)` is held while a group runs. Refills start early while
    fewer than `refill_below` groups are in flight.
    """

    def __init__(
        self,
        runner: Runner,
        problems: Sequence[Problem],
        rl: RlConfig,
        stage: StageConfig,
        *,
        seed: int,
        teaches: Callable[[int, Group], bool],
        on_progress: Callable[[int, int, int], None] = lambda step, done, total: None,
        version: Callable[[], WeightVersion] = lambda: 0,
        slot: Callable[[int], AbstractAsyncContextManager[None]] = lambda step: nullcontext(),
        refill_below: int = 0,
    ) -> None:
        self.runner = runner
        self.problems = problems
        self.rl, self.stage, self.seed = rl, stage, seed
        self.teaches, self.on_progress = teaches, on_progress
        self.version, self.slot, self.refill_below = version, slot, refill_below
        self.order = ProblemOrder(len(problems), seed=seed, stage=stage.name)
        self.refills = ProblemOrder(len(problems), seed=seed, stage=f"{stage.name}/refill")
        self.spec = RolloutSpec(rl.sampling, stage.max_length, stage.max_turns)
        self._share = 1.0
        """Share of the last step's groups that were worth learning from."""

    async def collect(self, step: int, position: int) -> CollectedStep:
        """Draw until the step's batch is full or the refill cap is hit.

        `position` is where the step before ended; with staleness it is not used.
        """
        wanted = self.rl.prompts_per_step
        cap = wanted * self.rl.refill
        drawn: dict[int, DrawnGroup] = {}
        tasks: dict[asyncio.Task[DrawnGroup], int] = {}
        try:
            while (end := _end(drawn, wanted, cap)) is None:
                missing = wanted - sum(d.used for d in drawn.values())
                at_once = max(missing, min(draws_ahead(missing, self._share), self.refill_below))
                for ordinal in range(len(drawn) + len(tasks), min(cap, len(drawn) + at_once)):
                    task = asyncio.ensure_future(self._draw(step, position, ordinal))
                    tasks[task] = ordinal
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    drawn[tasks.pop(task)] = task.result()
                used = sum(d.used for d in drawn.values())
                self.on_progress(step, min(used, wanted), wanted)
        finally:
            await cancel_all(tasks)
        in_order = tuple(drawn[ordinal] for ordinal in range(end))
        _refuse_outage(in_order, step)
        self._share = max(1, sum(d.used for d in in_order)) / end
        surplus = len(drawn) + len(tasks) - end
        position = step * wanted if self.rl.staleness else position + end
        return CollectedStep(in_order, position, wanted, surplus=surplus)

    def _problem(self, step: int, position: int, ordinal: int) -> tuple[str, int]:
        """The name and the index of the `ordinal`-th problem that the step draws."""
        if not self.rl.staleness:
            return str(position + ordinal), self.order[position + ordinal]
        own = self.rl.prompts_per_step
        if ordinal < own:
            place = (step - 1) * own + ordinal
            return str(place), self.order[place]
        place = (step - 1) * own * (self.rl.refill - 1) + ordinal - own
        return f"r{place}", self.refills[place]

    async def _draw(self, step: int, position: int, ordinal: int) -> DrawnGroup:
        """Run one problem's group and decide whether the step uses it."""
        name, index = self._problem(step, position, ordinal)
        key: int | str = int(name) if name.isdecimal() else name
        seeds = [
            derive_seed(self.seed, self.stage.name, step, key, rollout)
            for rollout in range(self.rl.roc.drawn)
        ]
        async with self.slot(step):
            version = self.version()
            group = await self.runner.run(
                self.problems[index],
                group_id=f"{self.stage.name}/{step}/{name}",
                step=step,
                seeds=seeds,
                spec=self.spec,
            )
        return DrawnGroup(group, used=self.teaches(step, group), version=version)


def _end(drawn: Mapping[int, DrawnGroup], wanted: int, cap: int) -> int | None:
    """How many problems the step draws in total; None while that is open."""
    used = 0
    for ordinal in range(cap):
        if ordinal not in drawn:
            return None
        used += drawn[ordinal].used
        if used == wanted:
            return ordinal + 1
    return cap


def _lost(drawn: Sequence[DrawnGroup]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in drawn:
        total.update(one.group.dropped)
    return total


def _refuse_outage(drawn: Sequence[DrawnGroup], step: int) -> None:
    """Raise if most rollouts of a step were lost: that is an outage, not data to learn from."""
    lost = _lost(drawn)
    kept = sum(len(d.group.trajectories) for d in drawn)
    if lost.total() > kept:
        names = ", ".join(f"{name} x{count}" for name, count in lost.most_common())
        raise InfrastructureError(
            f"step {step}: {lost.total()} of {lost.total() + kept} rollouts were lost to "
            f"infrastructure or to errors of the environment ({names}); log.txt in the run "
            "directory has their messages"
        )

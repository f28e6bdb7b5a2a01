"""All rollouts of one problem: run and graded; infrastructure failures are retried, then counted.

Training, evaluation and the difficulty filter run their rollouts here, through the same agent
loop, fleet and grader. Every rollout is its own task, so that tools and grading overlap with
generation. Invariant 3: a rollout that fails because of infrastructure is retried `retries` times,
then dropped from its group and counted under the failure's name; it never becomes a reward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from rstar2.agent.loop import RolloutSpec, ToolRunner, run_trajectory
from rstar2.agent.template import Template
from rstar2.config import AgentConfig
from rstar2.engine.base import Generator
from rstar2.errors import InvariantError
from rstar2.reward.grade import Verifier, grade
from rstar2.types import Group, Problem, Trajectory

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")

GRADE_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Runs groups of rollouts; can run many groups at once."""

    generator: Generator
    tools: ToolRunner
    verifier: Verifier
    template: Template
    agent: AgentConfig

    async def run(
        self, problem: Problem, *, group_id: str, step: int, seeds: Sequence[int], spec: RolloutSpec
    ) -> Group:
        """One rollout per seed; the group lists them in the order of the seeds."""
        trajectories = await together(
            self.rollout(problem, group_id=group_id, index=index, seed=seed, spec=spec)
            for index, seed in enumerate(seeds)
        )
        lost = Counter(t.failure.name for t in trajectories if t.failure is not None)
        kept = tuple(t for t in trajectories if t.failure is None)
        if any(t.reward is None for t in kept):
            raise InvariantError(f"{group_id}: a rollout has neither a reward nor a failure")
        return Group(group_id, problem, step, kept, dict(lost))

    async def rollout(
        self, problem: Problem, *, group_id: str, index: int, seed: int, spec: RolloutSpec
    ) -> Trajectory:
        """Run and grade one rollout; retry it after an infrastructure failure."""
        for attempt in range(1, self.agent.retries + 2):
            suffix = "" if attempt == 1 else f"~{attempt}"
            trajectory = await run_trajectory(
                problem,
                id=f"{group_id}/{index}{suffix}",
                group_id=group_id,
                seed=seed,
                generator=self.generator,
                tools=self.tools,
                template=self.template,
                agent=self.agent,
                spec=spec,
            )
            if trajectory.failure is None:
                trajectory = await grade(trajectory, problem, self.verifier, GRADE_DEADLINE_S)
            if trajectory.failure is None:
                break
        return replace(trajectory, attempts=attempt)


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all results in order; after an error or a cancellation, cancel the others first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

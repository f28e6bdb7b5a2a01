"""All rollouts of one problem: run and graded; infrastructure failures are retried, then counted.

Training, evaluation and the difficulty filter run their rollouts here, through the same agent
loop, fleet and environment. Every rollout is its own task, so that tools and rewards overlap with
generation. Invariant 3: a rollout that fails because of infrastructure is retried `retries` times,
then dropped from its group and counted under the failure's name; it never becomes a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.errors import InvariantError
from rstar2.tasks import together
from rstar2.types import Group, Problem, Trajectory


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Runs groups of rollouts; can run many groups at once."""

    loop: AgentLoop

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
        for attempt in range(1, self.loop.config.retries + 2):
            suffix = "" if attempt == 1 else f"~{attempt}"
            trajectory = await self._attempt(
                problem, id=f"{group_id}/{index}{suffix}", group_id=group_id, seed=seed, spec=spec
            )
            if trajectory.failure is None:
                break
        return trajectory if attempt == 1 else replace(trajectory, attempts=attempt)

    async def _attempt(
        self, problem: Problem, *, id: str, group_id: str, seed: int, spec: RolloutSpec
    ) -> Trajectory:
        """One rollout by the agent loop, or by the environment if its agent is a program."""
        loop = self.loop
        if not isinstance(loop.environment, ProgramEnvironment):
            return await loop.run(problem, id=id, group_id=group_id, seed=seed, spec=spec)
        return await loop.environment.rollout(
            problem,
            id=id,
            group_id=group_id,
            seed=seed,
            generator=loop.generator,
            template=loop.template,
            agent=loop.config,
            spec=spec,
        )

"""Evaluate a policy: the same agent loop, fleet and grader as in training, on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from rstar2.agent.loop import RolloutSpec
from rstar2.config import SamplingConfig
from rstar2.evaluate.metrics import summarise
from rstar2.rollout.collector import Runner
from rstar2.seeds import derive_seed
from rstar2.tasks import together
from rstar2.types import Evaluation, Group, Problem

GREEDY = SamplingConfig(temperature=0.0)


async def answer_all(
    runner: Runner,
    problems: Sequence[Problem],
    *,
    name: str,
    step: int,
    seed: int,
    samples: int,
    spec: RolloutSpec,
    on_problem: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Group, ...]:
    """Draw `samples` answers to every problem concurrently; groups keep the order of problems."""
    done = 0

    async def one(index: int, problem: Problem) -> Group:
        nonlocal done
        group = await runner.run(
            problem,
            group_id=f"{name}/{step}/{index}",
            step=step,
            seeds=[derive_seed(seed, name, index, sample) for sample in range(samples)],
            spec=spec,
        )
        done += 1
        on_problem(done, len(problems))
        return group

    return tuple(await together(one(i, p) for i, p in enumerate(problems)))


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
    on_problem: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evaluation, tuple[Group, ...]]:
    """Evaluate one mode: return the figures and the rollouts behind them."""
    started = monotonic()
    groups = await answer_all(
        runner,
        problems,
        name=f"eval-{stage}-{mode}",
        step=step,
        seed=seed,
        samples=samples,
        spec=spec,
        on_problem=on_problem,
    )
    wall_s = monotonic() - started
    return summarise(groups, stage=stage, step=step, mode=mode, wall_s=wall_s), groups

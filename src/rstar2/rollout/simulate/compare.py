"""Compares policies with each other and with the lower bound on the same workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from rstar2.config import SchedulerConfig
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.simulate.lower_bound import lower_bound
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.workload import SHAPES, Workload, draw_workload

POLICIES: tuple[str, ...] = get_args(SchedulerConfig.model_fields["policy"].annotation)
OURS = "reserve"
LEARNING = ("reserve", "aimd")
"""Policies that keep what they learnt from one RL step to the next."""

BOUND_TARGET, RIVAL_TARGET, STATIC_TARGET = 1.10, 1.02, 1.5


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The figures of one workload under one policy."""

    workload: str
    policy: str
    makespan_s: float
    bound_s: float
    idle_share: float
    """Idle share of the engines' time until the last rollout ended."""
    kv_share: float
    kv_peak: float
    preemptions: int
    sampled_tokens: int
    recomputed_tokens: int
    """Tokens computed more than once: after preemptions, moves and lost cached prefixes."""
    moves: int
    wait_mean_s: float
    wait_p95_s: float
    """Both: from the request for a turn to the start of its computation."""
    group_spread_s: float
    """Mean time between the ends of a group's first and last rollout."""
    kv_demand: float
    """Final tokens of all rollouts / KV capacity of all engines."""
    cold_makespan_s: float | None = None
    """Makespan of the step before, in which a learning policy started without knowledge."""

    @property
    def ratio(self) -> float:
        """Makespan / lower bound."""
        return self.makespan_s / self.bound_s


def measure(
    workload: Workload, config: SchedulerConfig, *, before: Workload | None = None
) -> PolicyResult:
    """Simulate one RL step; a learning policy first runs through the step `before`."""
    scheduler: Scheduler | None = None
    cold: float | None = None
    if before is not None and config.policy in LEARNING:
        first = Simulation(before, config)
        first.run()
        scheduler, cold = first.scheduler, first.now
    simulation = Simulation(workload, config, scheduler=scheduler)
    simulation.run()
    return summarize(simulation, config.policy, cold_makespan_s=cold)


def summarize(
    simulation: Simulation, policy: str, *, cold_makespan_s: float | None = None
) -> PolicyResult:
    """The figures of a finished simulation."""
    workload, now = simulation.workload, simulation.now
    tallies = [engine.tally for engine in simulation.engines]
    time = now * len(tallies)
    waits = np.array(simulation.log.waits)
    ends: dict[str, list[float]] = {}
    for plan in workload.rollouts:
        ends.setdefault(plan.group, []).append(simulation.ends[plan.id])
    capacity = workload.model.kv_tokens * workload.engines
    return PolicyResult(
        workload=workload.name,
        policy=policy,
        makespan_s=now,
        bound_s=lower_bound(workload).seconds,
        idle_share=1 - sum(t.busy_s for t in tallies) / time,
        kv_share=sum(t.kv_s for t in tallies) / time,
        kv_peak=max(t.kv_peak for t in tallies),
        preemptions=sum(t.preemptions for t in tallies),
        sampled_tokens=sum(t.decoded for t in tallies),
        recomputed_tokens=sum(t.recomputed for t in tallies),
        moves=simulation.log.moves,
        wait_mean_s=float(waits.mean()),
        wait_p95_s=float(np.quantile(waits, 0.95)),
        group_spread_s=float(np.mean([max(e) - min(e) for e in ends.values()])),
        kv_demand=sum(plan.tokens for plan in workload.rollouts) / capacity,
        cold_makespan_s=cold_makespan_s,
    )


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One cell of the table; small enough to send to another process."""

    shape: str
    policy: str
    seed: int
    scale: float
    cold: bool = False

    def run(self) -> PolicyResult:
        shape = SHAPES[self.shape]
        before = None if self.cold else draw_workload(shape, self.seed + 1, scale=self.scale)
        config = SchedulerConfig.model_validate({"policy": self.policy})
        return measure(draw_workload(shape, self.seed, scale=self.scale), config, before=before)


# --------------------------------------------------------------------------- reading the results


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """Our policy's figures in one workload, compared with the targets."""

    workload: str
    ratio: float
    behind_best: float
    """Our makespan / the makespan of the best other policy."""
    best: str
    over_static: float
    """Makespan of static_split / ours."""
    preemptions: int
    kv_short: bool

    @property
    def missed(self) -> tuple[str, ...]:
        """The missed targets, as messages."""
        messages = []
        if self.ratio > BOUND_TARGET:
            messages.append(f"{self.ratio:.3f}x the bound (target {BOUND_TARGET})")
        if self.behind_best > RIVAL_TARGET:
            messages.append(f"{self.behind_best - 1:.1%} behind {self.best}")
        if self.kv_short and self.over_static < STATIC_TARGET:
            messages.append(f"{self.over_static:.2f}x static split (target {STATIC_TARGET})")
        if self.preemptions:
            messages.append(f"{self.preemptions} preemptions")
        return tuple(messages)


def check_targets(results: Sequence[PolicyResult]) -> list[TargetCheck]:
    """One per workload that has results of our policy and at least one other."""
    checks = []
    for name, row in _rows(results).items():
        others = [r for r in row.values() if r.policy not in (OURS, "worst_case")]
        if OURS not in row or not others:
            continue
        ours, best = row[OURS], min(others, key=lambda r: r.makespan_s)
        static = row.get("static_split")
        checks.append(
            TargetCheck(
                workload=name,
                ratio=ours.ratio,
                behind_best=ours.makespan_s / best.makespan_s,
                best=best.policy,
                over_static=static.makespan_s / ours.makespan_s if static else float("inf"),
                preemptions=ours.preemptions,
                kv_short=any(r.preemptions for r in others),
            )
        )
    return checks


def table(results: Sequence[PolicyResult]) -> str:
    """Makespan / lower bound, one row per workload, as Markdown."""
    rows = _rows(results)
    policies = list(dict.fromkeys(r.policy for r in results))
    checks = {check.workload: check for check in check_targets(results)}
    head = ["workload", "bound, s", *policies, "static / ours", "ours / best other"]
    body = []
    for name, row in rows.items():
        bound = next(iter(row.values())).bound_s
        cells = [f"{row[p].ratio:.3f}{'*' * bool(row[p].preemptions)}" for p in policies]
        check = checks.get(name)
        static = f"{check.over_static:.2f}" if check else ""
        best = f"{check.behind_best:.3f} ({check.best})" if check else ""
        body.append([name, f"{bound:.0f}", *cells, static, best])
    return (
        _markdown(head, body) + "\n\nCells: makespan / lower bound. * marks runs with preemptions."
    )


def details(results: Iterable[PolicyResult]) -> str:
    """All figures, one row per workload and policy, as Markdown."""
    head = (
        "workload policy makespan,s /bound idle kv kv-peak preempted recomputed moved wait,s "
        "wait-p95,s spread,s"
    )
    body = [
        [
            r.workload,
            r.policy,
            f"{r.makespan_s:.1f}",
            f"{r.ratio:.3f}",
            f"{r.idle_share:.1%}",
            f"{r.kv_share:.0%}",
            f"{r.kv_peak:.0%}",
            str(r.preemptions),
            f"{r.recomputed_tokens / max(1, r.sampled_tokens):.1%}",
            str(r.moves),
            f"{r.wait_mean_s:.1f}",
            f"{r.wait_p95_s:.1f}",
            f"{r.group_spread_s:.0f}",
        ]
        for r in results
    ]
    return _markdown(head.split(), body)


def _rows(results: Iterable[PolicyResult]) -> dict[str, dict[str, PolicyResult]]:
    rows: dict[str, dict[str, PolicyResult]] = {}
    for result in results:
        rows.setdefault(result.workload, {})[result.policy] = result
    return rows


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def run_cases(
    cases: Sequence[ComparisonCase], *, jobs: int, done: Callable[[PolicyResult], None]
) -> list[PolicyResult]:
    """Run all cells on `jobs` processes; results are in the order of the cases."""
    results: list[PolicyResult] = []
    if jobs == 1:
        for case in cases:
            results.append(case.run())
            done(results[-1])
        return results
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(ComparisonCase.run, cases):
            results.append(result)
            done(result)
    return results

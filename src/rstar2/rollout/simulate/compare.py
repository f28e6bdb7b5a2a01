"""Compares policies with each other and with the lower bound on the same workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import get_args

import msgspec
import numpy as np

from rstar2.config import SchedulerConfig
from rstar2.errors import DataError
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.simulate.lower_bound import lower_bound
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.workload import Workload, WorkloadShape, draw_workload

POLICIES: tuple[str, ...] = get_args(SchedulerConfig.model_fields["policy"].annotation)
OURS = "reserve"
LEARNING = ("reserve", "aimd", "prime_rl", "mean_cap")
"""Policies that keep what they learnt from one RL step to the next."""
TUNED = "mean_cap"
FACTORS = (0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.2)
"""`cap_factor` of mean_cap: a suite shows the best for each workload, as no one could know it."""
PROMPT_EDGES = (1024, 2048, 4096, 8192, 1 << 30)

RIVAL_TARGET = 1.02
"""Our makespan is at most this many times that of the best other policy."""


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
    first_p99_s: dict[int, float]
    """99th percentile of the time until a first turn had ended, by maximum prompt tokens."""
    cold_makespan_s: float | None = None
    """Makespan of the step before, in which an adaptive policy started without observations."""

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
    capacity = sum(model.kv_tokens for model in workload.engines)
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
        first_p99_s=_first_responses(simulation),
        cold_makespan_s=cold_makespan_s,
    )


def _first_responses(simulation: Simulation) -> dict[int, float]:
    by_prompt: dict[int, list[float]] = {}
    for plan in simulation.workload.rollouts:
        edge = next(edge for edge in PROMPT_EDGES if plan.prompt <= edge)
        by_prompt.setdefault(edge, []).append(simulation.log.first_s[plan.id])
    return {edge: float(np.quantile(by_prompt[edge], 0.99)) for edge in sorted(by_prompt)}


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One cell of the table; small enough to send to another process."""

    shape: WorkloadShape
    policy: str
    seed: int
    scale: float
    cold: bool = False
    factor: float | None = None
    """`cap_factor`, if the policy has it."""

    @property
    def key(self) -> str:
        """Names the case in a file of results."""
        settings = (self.shape.name, self.policy, self.seed, self.scale, self.cold, self.factor)
        return " ".join(map(str, settings))

    def run(self) -> PolicyResult:
        shape = self.shape
        steady = shape.steady
        before = None if self.cold else draw_workload(steady, self.seed + 1, scale=self.scale)
        config: dict[str, object] = {"policy": self.policy}
        if self.factor is not None:
            config |= {"cap_factor": self.factor}
        workload = draw_workload(shape, self.seed, scale=self.scale)
        return measure(workload, SchedulerConfig.model_validate(config), before=before)


# --------------------------------------------------------------------------- reading the results


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """Our policy's figures in one workload, compared with those of the best other policy."""

    workload: str
    ratio: float
    behind_best: float
    """Our makespan / the makespan of the best other policy."""
    best: str

    @property
    def missed(self) -> tuple[str, ...]:
        """The missed targets, as messages."""
        if self.behind_best > RIVAL_TARGET:
            return (f"{self.behind_best - 1:.1%} behind {self.best}",)
        return ()


def check_targets(results: Sequence[PolicyResult]) -> list[TargetCheck]:
    """One per workload that has results of our policy and at least one other."""
    checks = []
    for name, row in _rows(results).items():
        others = [r for r in row.values() if r.policy != OURS]
        if OURS not in row or not others:
            continue
        ours, best = row[OURS], min(others, key=lambda r: r.makespan_s)
        behind = ours.makespan_s / best.makespan_s
        checks.append(TargetCheck(name, ours.ratio, behind, best.policy))
    return checks


def table(results: Sequence[PolicyResult]) -> str:
    """Makespan / lower bound, one row per workload and their geometric means, as Markdown."""
    rows = _rows(results)
    policies = list(dict.fromkeys(r.policy for r in results))
    checks = {check.workload: check for check in check_targets(results)}
    head = ["workload", "bound, s", *policies, "ours / best other"]
    body = []
    for name, row in rows.items():
        check = checks.get(name)
        best = f"{check.behind_best:.3f} ({check.best})" if check else ""
        bound = next(iter(row.values())).bound_s
        body.append([name, f"{bound:.0f}", *(_cell(row.get(p)) for p in policies), best])
    if len(rows) > 1:
        means = {p: geometric_mean([r.ratio for r in results if r.policy == p]) for p in policies}
        best = min((p for p in policies if p != OURS), key=lambda p: means[p], default="")
        ahead = f"{means[OURS] / means[best]:.3f} ({best})" if best and OURS in means else ""
        body.append(["geometric mean", "", *(f"{means[p]:.3f}" for p in policies), ahead])
    return _markdown(head, body) + "\n\nCells: makespan / lower bound, preemptions in brackets."


def _cell(result: PolicyResult | None) -> str:
    if result is None:
        return ""
    return f"{result.ratio:.3f}" + (f" ({result.preemptions})" if result.preemptions else "")


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


def first_responses(results: Iterable[PolicyResult]) -> str:
    """First-response times of the workloads whose prompts differ in length, as Markdown; or ""."""
    shown = [r for r in results if len(r.first_p99_s) > 1]
    if not shown:
        return ""
    edges = sorted({edge for r in shown for edge in r.first_p99_s})
    body = []
    for r in shown:
        times = r.first_p99_s
        cells = [f"{times[edge]:.1f}" if edge in times else "" for edge in edges]
        body.append([r.workload, r.policy, *cells, f"{times[max(times)] / times[min(times)]:.2f}"])
    names = ["longer" if edge == PROMPT_EDGES[-1] else f"{edge // 1024}K" for edge in edges]
    return (
        _markdown(["workload", "policy", *names, "longest / shortest"], body)
        + "\n\nCells: seconds after which 99% of the first turns had ended, by prompts of up to so "
        "many tokens."
    )


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


# --------------------------------------------------------------------------- running


def cases_of(
    shapes: Iterable[WorkloadShape],
    policies: Sequence[str],
    seeds: Iterable[int],
    scale: float,
    cold: bool,
    *,
    tuned: bool,
) -> list[ComparisonCase]:
    """All cells; with `tuned`, mean_cap runs with every one of `FACTORS`."""
    seeds = tuple(seeds)
    return [
        ComparisonCase(shape, policy, seed, scale, cold, factor)
        for shape in shapes
        for policy in policies
        for factor in (FACTORS if tuned and policy == TUNED else (None,))
        for seed in seeds
    ]


def run_cases(
    cases: Sequence[ComparisonCase],
    *,
    jobs: int,
    done: Callable[[PolicyResult, int, int], None],
    file: Path | None = None,
) -> list[PolicyResult]:
    """Run all cells on `jobs` processes; one result per workload and policy.

    Finished cells are appended to `file`; those that it already has are not run again.
    """
    known = _read_results(file) if file is not None else {}
    missing = [case for case in cases if case.key not in known]
    with ExitStack() as stack:
        output = stack.enter_context(file.open("ab")) if file is not None else None
        if jobs == 1:
            results: Iterable[PolicyResult] = map(ComparisonCase.run, missing)
        else:
            pool = stack.enter_context(ProcessPoolExecutor(jobs))
            results = pool.map(ComparisonCase.run, missing)
        for number, (case, result) in enumerate(zip(missing, results, strict=True), 1):
            known[case.key] = result
            if output is not None:
                output.write(msgspec.json.encode(_KeptResult(case.key, result)) + b"\n")
                output.flush()
            done(result, len(cases) - len(missing) + number, len(cases))
    by_cell: dict[tuple[str, str, float | None], list[PolicyResult]] = {}
    for case in cases:
        by_cell.setdefault((case.shape.name, case.policy, case.factor), []).append(known[case.key])
    best: dict[tuple[str, str], PolicyResult] = {}
    for (workload, policy, _), seeds in by_cell.items():
        result = _mean(seeds)
        other = best.get((workload, policy))
        if other is None or result.ratio < other.ratio:
            best[workload, policy] = result
    return list(best.values())


class _KeptResult(msgspec.Struct):
    """One line of a file of results."""

    key: str
    result: PolicyResult


def _read_results(file: Path) -> dict[str, PolicyResult]:
    known: dict[str, PolicyResult] = {}
    if not file.exists():
        return known
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            kept = msgspec.json.decode(line, type=_KeptResult)
        except msgspec.MsgspecError as error:
            raise DataError(f"{file}, line {number} is no result: {error}; remove it") from error
        known[kept.key] = kept.result
    return known


def _mean(results: Sequence[PolicyResult]) -> PolicyResult:
    """One result of several seeds: geometric means of times, sums of preemptions."""
    if len(results) == 1:
        return results[0]
    return replace(
        results[0],
        makespan_s=geometric_mean([r.makespan_s for r in results]),
        bound_s=geometric_mean([r.bound_s for r in results]),
        preemptions=sum(r.preemptions for r in results),
        first_p99_s={
            edge: geometric_mean([r.first_p99_s[edge] for r in results if edge in r.first_p99_s])
            for edge in sorted({edge for r in results for edge in r.first_p99_s})
        },
    )

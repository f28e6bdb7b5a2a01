"""`rstar2 simulate`: compares scheduling policies on simulated engines; needs no GPU, no model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.waiting import start_of_line, waiting
from rstar2.errors import UserError
from rstar2.report.summary import duration

if TYPE_CHECKING:
    from rstar2.rollout.simulate.compare import PolicyResult, TargetCheck
    from rstar2.rollout.simulate.workload import EngineCrash, Workload, WorkloadShape

ROLLOUT_S = 0.002
"""CPU seconds to simulate one rollout, as measured with stage2; the estimate before the first."""
ABOUT = """
An RL step runs hundreds of groups of rollouts. Their lengths differ widely, and they pause for
tool calls. The scheduler decides how long the step takes: with too many rollouts an engine's KV
cache overflows (rollouts are preempted and recomputed), with too few the engine idles. This command
runs the scheduler of real runs on simulated engines and compares its policies:

\b
  reserve         ours: admits what saves more time than it is expected to cost
  worst_case      admits what fits if every rollout reaches its limit (the paper's rule)
  static_split    assigns rollouts in advance; an engine waits for its slowest
  round_robin     sends every turn to the next engine
  least_requests  starts a rollout on the engine with the fewest; it stays there
  least_kv        starts a rollout on the engine with the least KV in use; it stays there
  sticky_hash     starts a rollout where its name hashes to; it stays there
  aimd            caps the rollouts per engine; the cap follows the engine's KV use
  prime_rl        one cap for all engines, as in prime-rl
  mean_cap        caps the rollouts per engine at a multiple of KV / mean length
  thunder_agent   pauses and resumes rollouts between their turns, as in ThunderAgent

Workloads: stage1, stage2 and stage3 are the paper's (512 problems x 32 on 16 engines of 4 MI300X);
{short,ample}-{slow,fast}-{light,heavy} vary KV, tools and the tail of the lengths. The suites have
workloads with unequal, slow and dying engines, little KV and changing lengths; held-out draws its
workloads at random from --seed. All figures are makespan / lower bound, where no schedule can beat
the lower bound; docs/scheduler.md derives it. Where prompts differ in length (--suite prompts), a
second table shows how long each kind waits for its first response.

\b
Examples:
  rstar2 simulate --jobs 8             all policies, all workloads of the paper
  rstar2 simulate stage2 --scale 0.25  a quarter of one workload, on 4 engines
  rstar2 simulate --suite held-in --results held-in.jsonl
  rstar2 simulate stage3 --policies reserve,aimd --timeline out/
  rstar2 simulate --trace runs/tiny --stage stage1 --step 3 --engine model.json
  rstar2 simulate --rollouts mine.jsonl --engine h100.json --engine a100.json --crash 1@40-90
"""


WorkloadsOption = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="Workloads to simulate; all of them if none is given.",
        show_default=False,
    ),
]
SuiteOption = Annotated[
    str | None, typer.Option(help="Simulate this suite of workloads: held-in, held-out or prompts.")
]
PoliciesOption = Annotated[
    str, typer.Option(help="Policies to compare, separated by commas, or all.")
]
ScaleOption = Annotated[
    float, typer.Option(min=0.01, help="Simulate this share of the engines and problems.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the drawn lengths and latencies.")]
SeedsOption = Annotated[
    int,
    typer.Option(
        min=1, help="Number of seeds, starting at --seed. Results are averaged over them."
    ),
]
ResultsOption = Annotated[
    Path | None,
    typer.Option(
        help="Append finished simulations to this file; those already in it are not run again."
    ),
]
ColdOption = Annotated[
    bool,
    typer.Option(
        help="Start adaptive policies without earlier observations, as in the first step of a run."
    ),
]
TraceOption = Annotated[
    Path | None, typer.Option(help="Simulate a recorded step of this run directory.")
]
StageOption = Annotated[str, typer.Option(help="The recorded stage, with --trace.")]
StepOption = Annotated[int, typer.Option(help="The recorded step, with --trace.")]
RolloutsOption = Annotated[
    Path | None,
    typer.Option(help="Simulate your own rollouts: JSON Lines with group, prompt and turns."),
]
EngineOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON file of an engine model, or of measured steps to fit one to. "
        "Repeat it for engines that differ."
    ),
]
EnginesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of engines, with --trace or --rollouts."),
]
CrashOption = Annotated[
    list[str] | None,
    typer.Option(
        help="ENGINE@SECONDS or ENGINE@SECONDS-RESTART: an engine crashes, and serves again "
        "from RESTART on. Engines are numbered from 0."
    ),
]
JobsOption = Annotated[int, typer.Option(min=1, help="Number of simulations to run in parallel.")]
TimelineOption = Annotated[
    Path | None,
    typer.Option(help="Write timelines (HTML and Perfetto traces) to this directory."),
]
DetailsOption = Annotated[bool, typer.Option(help="Also print all figures of every simulation.")]
CheckOption = Annotated[bool, typer.Option(help="Exit with code 1 if our policy misses a target.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def simulate(
    workloads: WorkloadsOption = None,
    suite: SuiteOption = None,
    policies: PoliciesOption = "all",
    scale: ScaleOption = 1.0,
    seed: SeedOption = 0,
    seeds: SeedsOption = 1,
    results: ResultsOption = None,
    cold: ColdOption = False,
    trace: TraceOption = None,
    stage: StageOption = "stage1",
    step: StepOption = 1,
    rollouts: RolloutsOption = None,
    engine: EngineOption = None,
    engines: EnginesOption = None,
    crash: CrashOption = None,
    jobs: JobsOption = 1,
    timeline: TimelineOption = None,
    details: DetailsOption = False,
    check: CheckOption = False,
    json: JsonOption = False,
) -> None:
    from rstar2.rollout.simulate.compare import POLICIES, cases_of, check_targets, run_cases
    from rstar2.rollout.simulate.suites import shapes_of
    from rstar2.rollout.simulate.workload import draw_workload

    chosen = POLICIES if policies == "all" else tuple(policies.split(","))
    _known("policy", chosen, POLICIES)
    crashes = _crashes(crash or [])
    if trace is not None or rollouts is not None:
        own = _own(trace, stage, step, rollouts, engine or [], engines, crashes)
        measured = _simulate_own(own, chosen, timeline)
    else:
        shapes = _with_crashes(_chosen_shapes(shapes_of(suite, seed), workloads), crashes)
        cases = cases_of(shapes, chosen, range(seed, seed + seeds), scale, cold, tuned=bool(suite))
        sizes = [case.shape.problems * case.shape.group * scale for case in cases]
        progress = SimulationProgress(sizes, jobs)
        with waiting(progress.line):
            measured = run_cases(cases, jobs=jobs, done=progress.done, file=results)
        if timeline is not None:
            for shape in shapes:
                _write_timelines(draw_workload(shape, seed, scale=scale), chosen, timeline)
    checks = check_targets(measured)
    if json:
        _print_json(measured, checks)
    else:
        _print_tables(measured, checks, all_figures=details)
    if check and any(target.missed for target in checks):
        raise typer.Exit(1)


simulate.__doc__ = "Compare scheduling policies on simulated engines.\n" + ABOUT


def _chosen_shapes(
    shapes: dict[str, WorkloadShape], names: list[str] | None
) -> list[WorkloadShape]:
    chosen = tuple(names or shapes)
    _known("workload", chosen, tuple(shapes))
    return [shapes[name] for name in chosen]


def _crashes(given: list[str]) -> tuple[EngineCrash, ...]:
    from math import inf

    from rstar2.rollout.simulate.workload import EngineCrash

    crashes = []
    for text in given:
        engine, _, times = text.partition("@")
        time, _, restart = times.partition("-")
        try:
            crashes.append(
                EngineCrash(float(time), int(engine), float(restart) if restart else inf)
            )
        except ValueError:
            raise UserError(
                f"--crash {text!r}: give ENGINE@SECONDS or ENGINE@SECONDS-RESTART"
            ) from None
        if not 0 <= crashes[-1].time < crashes[-1].restart or crashes[-1].engine < 0:
            raise UserError(f"--crash {text!r}: an engine restarts after its crash, from 0 s on")
    return tuple(crashes)


def _with_crashes(
    shapes: list[WorkloadShape], crashes: tuple[EngineCrash, ...]
) -> list[WorkloadShape]:
    return [replace(shape, crashes=crashes) for shape in shapes] if crashes else shapes


def _print_json(results: list[PolicyResult], checks: list[TargetCheck]) -> None:
    import msgspec

    rows = [asdict(result) | {"ratio": result.ratio} for result in results]
    verdicts = [asdict(target) | {"missed": target.missed} for target in checks]
    ok = not any(target.missed for target in checks)
    typer.echo(msgspec.json.encode({"rows": rows, "verdicts": verdicts, "ok": ok}).decode())


def _print_tables(
    results: list[PolicyResult], checks: list[TargetCheck], *, all_figures: bool
) -> None:
    from rstar2.rollout.simulate.compare import details, first_responses, table

    typer.echo(table(results))
    if responses := first_responses(results):
        typer.echo("\n" + responses)
    if all_figures:
        typer.echo("\n" + details(results))
    for target in checks:
        for missed in target.missed:
            typer.echo(f"target missed in {target.workload}: {missed}")


def _known(what: str, given: tuple[str, ...], valid: tuple[str, ...]) -> None:
    from difflib import get_close_matches

    for name in given:
        if name not in valid:
            near = get_close_matches(name, valid, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(valid)}"
            raise UserError(f"there is no {what} {name!r}: {hint}")


class SimulationProgress:
    """Shows the expected duration at the start, and the remaining time after each simulation."""

    def __init__(self, rollouts: list[float], jobs: int = 1) -> None:
        self._rollouts, self._finished, self._skipped = rollouts, 0, 0
        self._started = monotonic()
        self._expected_s = sum(rollouts) * ROLLOUT_S / jobs
        parallel = f" on {jobs} processes" if jobs > 1 else ""
        count = len(rollouts)
        typer.echo(
            f"{count} simulation{'s' if count > 1 else ''}{parallel}, about "
            f"{duration(self._expected_s)}",
            err=True,
        )

    def left_s(self) -> float:
        """Seconds that are left, from the time of the finished ones, else from `ROLLOUT_S`."""
        done = sum(self._rollouts[self._skipped : self._finished])
        elapsed = monotonic() - self._started
        if not done:
            return max(0.0, self._expected_s - elapsed)
        return elapsed / done * sum(self._rollouts[self._finished :])

    def line(self) -> str:
        """The progress as one line."""
        return (
            f"{self._finished} of {len(self._rollouts)} simulations done, about "
            f"{duration(self.left_s())} left"
        )

    def done(self, result: PolicyResult, number: int, total: int) -> None:
        """The `number`-th result of `total`; those in a file of results come without a call."""
        if not self._finished:
            self._skipped = number - 1
        self._finished = number
        left = f", about {duration(self.left_s())} left" if number < total else ""
        typer.echo(
            f"{start_of_line()}[{number}/{total}] {result.workload} {result.policy}: "
            f"{result.makespan_s:.1f} s{left}",
            err=True,
        )


def _own(
    trace: Path | None,
    stage: str,
    step: int,
    rollouts: Path | None,
    files: list[Path],
    count: int | None,
    crashes: tuple[EngineCrash, ...],
) -> Workload:
    """The workload of a recorded step or of a file, on the engines of the given files."""
    from rstar2.rollout.simulate.model import EngineModel
    from rstar2.rollout.simulate.recorded import (
        fit_recorded_engine,
        recorded_engines,
        recorded_rollouts,
        rollouts_from_file,
    )
    from rstar2.rollout.simulate.workload import Workload

    models = [EngineModel.from_json(path) for path in files]
    if rollouts is not None:
        if trace is not None:
            raise UserError("give either --trace or --rollouts, not both")
        if not models:
            raise UserError("--rollouts needs an engine: add --engine FILE")
        name, plans = rollouts.stem, rollouts_from_file(rollouts)
        count = count or len(models)
    else:
        assert trace is not None
        if not models:
            fit = fit_recorded_engine(trace, stage=stage)
            models = [fit.model]
            typer.echo(
                f"engine model fitted to {fit.rows} recorded turns: "
                f"median error {fit.median_error:.0%}, largest {fit.worst_error:.0%}",
                err=True,
            )
        name, plans = f"{stage}:{step}", recorded_rollouts(trace, stage=stage, step=step)
        count = count or max(len(models), recorded_engines(trace))
    largest = max(plan.limit for plan in plans)
    for model in models:
        if model.kv_tokens < largest:
            raise UserError(
                f"engine {model.name} holds {model.kv_tokens} tokens, but rollouts may have "
                f"{largest}: raise its kv_tokens or lower their limit"
            )
    for crash in crashes:
        if crash.engine >= count:
            raise UserError(f"--crash names engine {crash.engine}, the last is {count - 1}")
    chosen = tuple(models[index % len(models)] for index in range(count))
    return Workload(name, plans, chosen, crashes=crashes)


def _simulate_own(
    workload: Workload, policies: tuple[str, ...], timeline: Path | None
) -> list[PolicyResult]:
    from rstar2.config import SchedulerConfig
    from rstar2.rollout.simulate.compare import measure

    before = replace(workload, crashes=())
    results = []
    progress = SimulationProgress([float(len(workload.rollouts))] * len(policies))
    with waiting(progress.line):
        for policy in policies:
            config = SchedulerConfig.model_validate({"policy": policy})
            results.append(measure(workload, config, before=before))
            progress.done(results[-1], len(results), len(policies))
    if timeline is not None:
        _write_timelines(workload, policies, timeline)
    return results


def _write_timelines(workload: Workload, policies: tuple[str, ...], directory: Path) -> None:
    """Simulate again, record the spans and write them as timelines."""
    from rstar2.config import SchedulerConfig
    from rstar2.rollout.simulate.compare import details, summarize
    from rstar2.rollout.simulate.simulation import Simulation
    from rstar2.rollout.timeline import chrome_trace, page

    directory.mkdir(parents=True, exist_ok=True)
    for policy in policies:
        config = SchedulerConfig.model_validate({"policy": policy})
        simulation = Simulation(workload, config, spans=True)
        simulation.run()
        name = f"{workload.name.replace(':', '-')}-{policy}"
        title = f"{workload.name} under {policy}"
        text = details([summarize(simulation, policy)])
        spans = simulation.log.spans
        (directory / f"{name}.html").write_text(page(spans, title=title, text=text))
        (directory / f"{name}.trace.json").write_text(chrome_trace(spans))
        typer.echo(f"written: {directory / name}.html and .trace.json", err=True)

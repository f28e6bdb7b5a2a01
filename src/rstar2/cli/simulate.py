"""`rstar2 simulate`: compares scheduling policies on simulated engines; needs no GPU, no model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.rollout.simulate.compare import PolicyResult, TargetCheck
    from rstar2.rollout.simulate.workload import Workload

ABOUT = """
An RL step runs hundreds of groups of rollouts. Their lengths differ widely, and they pause for
tool calls. The scheduler decides how long the step takes: with too many rollouts an engine's KV
cache overflows (rollouts are preempted and recomputed), with too few the engine idles. This command
runs the scheduler of real runs on simulated engines and compares its policies:

\b
  reserve         ours: admits what is expected to fit, from lengths learnt in the run
  worst_case      admits what fits if every rollout reaches its limit (the paper's rule)
  static_split    assigns rollouts in advance; an engine waits for its slowest
  round_robin     sends every turn to the next engine
  least_requests  starts a rollout on the engine with the fewest; it stays there
  sticky_hash     starts a rollout where its name hashes to; it stays there
  aimd            caps the rollouts per engine; the cap follows the engine's KV use

Workloads: stage1, stage2 and stage3 are the paper's (512 problems x 32 on 16 engines of 4 MI300X);
{short,ample}-{slow,fast}-{light,heavy} vary KV, tools and the tail of the lengths. All figures are
makespan / lower bound, where no schedule can beat the lower bound; docs/scheduler.md derives it.

\b
Examples:
  rstar2 simulate --jobs 8             all policies, all workloads
  rstar2 simulate stage2 --scale 0.25  a quarter of one workload, on 4 engines
  rstar2 simulate stage3 --policies reserve,aimd --timeline out/
  rstar2 simulate --trace runs/tiny --stage stage1 --step 3 --engine model.json
"""


def simulate(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="Workloads to simulate; all of them if none is given.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas, or all.")
    ] = "all",
    scale: Annotated[
        float, typer.Option(min=0.01, help="Simulate this share of the engines and problems.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the drawn lengths and latencies.")] = 0,
    cold: Annotated[
        bool,
        typer.Option(help="Learning policies start without knowledge, as in a run's first step."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Simulate a recorded step of this run directory.")
    ] = None,
    stage: Annotated[str, typer.Option(help="The recorded stage, with --trace.")] = "stage1",
    step: Annotated[int, typer.Option(help="The recorded step, with --trace.")] = 1,
    engine: Annotated[
        Path | None,
        typer.Option(help="JSON file of an engine model, or of measured steps to fit one to."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(help="Number of engines, with --trace; the run's own by default.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of simulations to run in parallel.")] = 1,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write timelines (HTML and Perfetto traces) to this directory."),
    ] = None,
    details: Annotated[
        bool, typer.Option(help="Also print all figures of every simulation.")
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Exit with code 1 if our policy misses a target.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    from rstar2.rollout.simulate.compare import (
        POLICIES,
        ComparisonCase,
        check_targets,
        run_cases,
    )
    from rstar2.rollout.simulate.workload import SHAPES

    chosen = POLICIES if policies == "all" else tuple(policies.split(","))
    _known("policy", chosen, POLICIES)
    if trace is not None:
        workload = _recorded(trace, stage, step, engine, engines)
        results = _simulate_recorded(workload, chosen, timeline)
    else:
        names = tuple(workloads or SHAPES)
        _known("workload", names, tuple(SHAPES))
        cases = [
            ComparisonCase(name, policy, seed, scale, cold) for name in names for policy in chosen
        ]
        results = run_cases(cases, jobs=jobs, done=_progress)
        if timeline is not None:
            from rstar2.rollout.simulate.workload import draw_workload

            for name in names:
                _write_timelines(draw_workload(SHAPES[name], seed, scale=scale), chosen, timeline)
    checks = check_targets(results)
    if json:
        _print_json(results, checks)
    else:
        _print_tables(results, checks, all_figures=details)
    if check and any(target.missed for target in checks):
        raise typer.Exit(1)


simulate.__doc__ = "Compare scheduling policies on simulated engines.\n" + ABOUT


def _print_json(results: list[PolicyResult], checks: list[TargetCheck]) -> None:
    import msgspec

    rows = [asdict(result) | {"ratio": result.ratio} for result in results]
    verdicts = [asdict(target) | {"missed": target.missed} for target in checks]
    ok = not any(target.missed for target in checks)
    typer.echo(msgspec.json.encode({"rows": rows, "verdicts": verdicts, "ok": ok}).decode())


def _print_tables(
    results: list[PolicyResult], checks: list[TargetCheck], *, all_figures: bool
) -> None:
    from rstar2.rollout.simulate.compare import details, table

    typer.echo(table(results))
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


def _progress(result: PolicyResult) -> None:
    typer.echo(f"{result.workload} {result.policy}: {result.makespan_s:.1f} s", err=True)


def _recorded(
    run: Path, stage: str, step: int, engine: Path | None, engines: int | None
) -> Workload:
    from rstar2.rollout.simulate.model import EngineModel
    from rstar2.rollout.simulate.workload import fit_recorded_engine, recorded_workload

    if engine is not None:
        model = EngineModel.from_json(engine)
    else:
        fit = fit_recorded_engine(run, stage=stage)
        model = fit.model
        typer.echo(
            f"engine model fitted to {fit.rows} recorded turns: "
            f"median error {fit.median_error:.0%}, largest {fit.worst_error:.0%}",
            err=True,
        )
    return recorded_workload(run, model, stage=stage, step=step, engines=engines)


def _simulate_recorded(
    workload: Workload, policies: tuple[str, ...], timeline: Path | None
) -> list[PolicyResult]:
    from rstar2.config import SchedulerConfig
    from rstar2.rollout.simulate.compare import measure

    results = []
    for policy in policies:
        config = SchedulerConfig.model_validate({"policy": policy})
        results.append(measure(workload, config, before=workload))
        _progress(results[-1])
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

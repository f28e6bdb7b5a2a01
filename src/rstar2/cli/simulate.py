"""`rstar2 simulate`: rollout schedulers compared on modelled engines; no GPU, no model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.rollout.simulate.compare import Result
    from rstar2.rollout.simulate.workload import Workload

ABOUT = """
A step of RL draws hundreds of groups of rollouts whose lengths differ wildly and which stop for
tools. Who runs them where decides how long the step takes: too many on an engine and its KV cache
overflows (rollouts are thrown out and computed again), too few and it idles. This command drives
the scheduler of real runs over modelled engines and compares its policies:

  reserve         ours: admit what is expected to fit, by lengths learnt in the run
  worst_case      admit what fits if every rollout gets as long as it may (the paper's rule)
  static_split    deal rollouts out beforehand; each engine waits for its slowest at every turn
  round_robin     every turn to the next engine
  least_requests  begin where the fewest rollouts are, stay
  sticky_hash     begin where the name hashes to, stay
  aimd            a cap per engine that follows its KV use

Workloads: stage1, stage2, stage3 are the paper's (512 problems x 32 on 16 engines of 4 MI300X);
{short,ample}-{slow,fast}-{light,heavy} vary KV, tools and the tail of the lengths. All figures are
makespans over a lower bound that no schedule can beat; docs/scheduler.md derives it.

Examples:

  rstar2 simulate                                all policies on all workloads (an hour; see --jobs)
  rstar2 simulate stage2 --scale 0.25            one workload on 4 engines, a quarter of the work
  rstar2 simulate stage3 --policies reserve,aimd --timeline out/
  rstar2 simulate --trace runs/tiny --stage stage1 --step 3 --engine model.json
"""


def simulate(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="[all]", show_default=False)
    ] = None,
    policies: Annotated[str, typer.Option(help="comma-separated, or all")] = "all",
    scale: Annotated[
        float, typer.Option(min=0.01, help="this share of engines and problems")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="of the drawn lengths and latencies")] = 0,
    cold: Annotated[
        bool, typer.Option(help="learning policies know nothing yet, as in a run's first step")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="a run directory: simulate one of its recorded steps")
    ] = None,
    stage: Annotated[str, typer.Option(help="with --trace")] = "stage1",
    step: Annotated[int, typer.Option(help="with --trace")] = 1,
    engine: Annotated[
        Path | None, typer.Option(help="JSON of an engine model or of measured steps to fit")
    ] = None,
    engines: Annotated[int | None, typer.Option(help="with --trace; [the run's]")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="simulations at once")] = 1,
    timeline: Annotated[
        Path | None, typer.Option(help="write timelines (HTML, Perfetto trace) to this directory")
    ] = None,
    details: Annotated[bool, typer.Option(help="also print all figures of every cell")] = False,
    check: Annotated[bool, typer.Option(help="exit 1 when a target is missed")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    from rstar2.rollout.simulate.compare import POLICIES, Case, run_cases, table, verdicts
    from rstar2.rollout.simulate.compare import details as all_figures
    from rstar2.rollout.simulate.workload import SHAPES

    chosen = POLICIES if policies == "all" else tuple(policies.split(","))
    _known("policy", chosen, POLICIES)
    if trace is not None:
        results = _traced(_recorded(trace, stage, step, engine, engines), chosen, timeline)
    else:
        names = tuple(workloads or SHAPES)
        _known("workload", names, tuple(SHAPES))
        cases = [Case(name, policy, seed, scale, cold) for name in names for policy in chosen]
        results = run_cases(cases, jobs=jobs, done=_progress)
        if timeline is not None:
            from rstar2.rollout.simulate.workload import draw

            for name in names:
                _draw(draw(SHAPES[name], seed, scale=scale), chosen, timeline)
    judged = verdicts(results)
    if json:
        import msgspec

        rows = [asdict(result) | {"ratio": result.ratio} for result in results]
        found = [asdict(verdict) | {"missed": verdict.missed} for verdict in judged]
        ok = not any(verdict.missed for verdict in judged)
        typer.echo(msgspec.json.encode({"rows": rows, "verdicts": found, "ok": ok}).decode())
    else:
        typer.echo(table(results))
        if details:
            typer.echo("\n" + all_figures(results))
        for verdict in judged:
            for missed in verdict.missed:
                typer.echo(f"missed in {verdict.workload}: {missed}")
    if check and any(verdict.missed for verdict in judged):
        raise typer.Exit(1)


simulate.__doc__ = "Compare rollout schedulers on modelled engines.\n" + ABOUT


def _known(what: str, given: tuple[str, ...], valid: tuple[str, ...]) -> None:
    from difflib import get_close_matches

    for name in given:
        if name not in valid:
            near = get_close_matches(name, valid, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose of {', '.join(valid)}"
            raise UserError(f"no {what} {name!r}: {hint}")


def _progress(result: Result) -> None:
    typer.echo(f"{result.workload} {result.policy}: {result.makespan_s:.1f} s", err=True)


def _recorded(
    run: Path, stage: str, step: int, engine: Path | None, engines: int | None
) -> Workload:
    from rstar2.rollout.simulate.model import EngineModel
    from rstar2.rollout.simulate.traces import fitted, recorded

    if engine is not None:
        return recorded(run, EngineModel.from_json(engine), stage=stage, step=step, engines=engines)
    found = fitted(run, stage=stage)
    typer.echo(
        f"engine model fitted to {found.rows} recorded turns: "
        f"median error {found.median_error:.0%}, worst {found.worst_error:.0%}",
        err=True,
    )
    return recorded(run, found.model, stage=stage, step=step, engines=engines)


def _traced(workload: Workload, policies: tuple[str, ...], timeline: Path | None) -> list[Result]:
    from rstar2.config import SchedulerConfig
    from rstar2.rollout.simulate.compare import measure

    results = []
    for policy in policies:
        config = SchedulerConfig.model_validate({"policy": policy})
        results.append(measure(workload, config, before=workload))
        _progress(results[-1])
    if timeline is not None:
        _draw(workload, policies, timeline)
    return results


def _draw(workload: Workload, policies: tuple[str, ...], directory: Path) -> None:
    """Simulate once more with spans, and write them down."""
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
        spans = simulation.observed.spans
        (directory / f"{name}.html").write_text(page(spans, title=title, text=text))
        (directory / f"{name}.trace.json").write_text(chrome_trace(spans))
        typer.echo(f"written: {directory / name}.html and .trace.json", err=True)

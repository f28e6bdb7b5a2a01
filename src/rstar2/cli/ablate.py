"""`rstar2 ablate`: GRPO, uniform resampling, RoC and its parts over seeds; a table and a plot.

Every run is an `rstar2 train` of its own, with its recipe, log and run directory under --out, so
that several can share a machine and each can be resumed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.child import Child
from rstar2.errors import InfrastructureError, RecipeError

if TYPE_CHECKING:
    from rstar2.config import Recipe
    from rstar2.pipeline.ablation import AblationRun, Execute

STOP_DEADLINE_S = 60.0


def ablate(
    out: Annotated[
        Path, typer.Option(help="Directory of all runs, the table and the plot.")
    ] = Path("runs/ablation"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, counted from 0.")] = 3,
    variants: Annotated[
        str,
        typer.Option(
            help="Variants separated by commas, or all: grpo, uniform, flat, roc, roc-no-errors, "
            "roc-no-format, release."
        ),
    ] = "all",
    steps: Annotated[
        int | None, typer.Option(help="RL steps of every run. The default is 80.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of runs in parallel; each needs one or two cores.")
    ] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="KEY=VALUE",
            help="Override a setting in all runs. Can be repeated.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare resampling variants that start from the same SFT weights. Resumes stopped runs."""
    from rstar2.pipeline.ablation import VARIANTS, to_json
    from rstar2.pipeline.ablation import ablate as run_all
    from rstar2.pipeline.ablation_report import plot, table

    chosen = VARIANTS if variants == "all" else tuple(v for v in variants.split(",") if v)
    if not chosen:
        raise RecipeError("--variants: none given")

    async def supervised() -> list[AblationRun]:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await run_all(
            out,
            variants=chosen,
            seeds=range(seeds),
            steps=steps,
            execute=trainer(alone=jobs == 1),
            overrides=set_ or (),
            jobs=jobs,
        )

    try:
        runs = asyncio.run(supervised())
    except asyncio.CancelledError:
        typer.echo("stopped; the same command resumes", err=True)
        raise typer.Exit(130) from None
    document = to_json(runs)
    (out / "ablation.json").write_text(document)
    (out / "ablation.md").write_text(table(runs))
    (out / "ablation.svg").write_text(plot(runs))
    typer.echo(document if json else table(runs))
    typer.echo(f"wrote ablation.md, ablation.json and ablation.svg to {out}", err=True)


def trainer(*, alone: bool) -> Execute:
    """Run recipes as processes; with several at once, each process uses one thread."""
    environment = dict(os.environ)
    if not alone:
        environment["OMP_NUM_THREADS"] = "1"

    async def execute(recipe: Recipe, path: Path) -> None:
        from rstar2.record import dump_recipe, is_finished

        if is_finished(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        file, log = path.with_suffix(".yaml"), path.with_suffix(".log")
        file.write_text(dump_recipe(recipe))
        started = monotonic()
        typer.echo(f"{path.name} started, log in {log}", err=True)
        child = Child(
            path.name,
            [sys.executable, "-m", "rstar2", "train", str(file), "--run", str(path)],
            parent_death_signal=signal.SIGTERM,
            grace_s=STOP_DEADLINE_S,
            environment=environment,
            log=log,
        )
        try:
            status = await child.wait()
        finally:  # when the ablation is stopped, its runs stop gracefully
            await child.stop()
        if status != 0:
            raise InfrastructureError(f"{path.name}: {child.post_mortem()} (log: {log})")
        typer.echo(f"{path.name} done in {monotonic() - started:.0f} s", err=True)

    return execute

"""`rstar2 ablate`: GRPO, uniform resampling, RoC and its parts over seeds; a table and a plot."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.errors import RecipeError

if TYPE_CHECKING:
    from rstar2.config import Recipe
    from rstar2.pipeline.ablation import Run


def ablate(
    out: Annotated[Path, typer.Option(help="directory of all runs, table and plot")] = Path(
        "runs/ablation"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, from 0")] = 3,
    variants: Annotated[
        str, typer.Option(help="comma-separated; all: grpo, uniform, roc, roc-no-errors, ...")
    ] = "all",
    steps: Annotated[int | None, typer.Option(help="RL steps of every run [80]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="override a setting in all runs"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of the table")] = False,
) -> None:
    """Compare what resampling keeps, from the same SFT checkpoints. Goes on where it stopped."""
    from rstar2.pipeline.ablation import VARIANTS, to_json
    from rstar2.pipeline.ablation import ablate as run_all
    from rstar2.pipeline.ablation_report import plot, table

    chosen = VARIANTS if variants == "all" else tuple(v for v in variants.split(",") if v)
    if not chosen:
        raise RecipeError("--variants: none given")

    async def supervised() -> list[Run]:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await run_all(
            out,
            variants=chosen,
            seeds=range(seeds),
            steps=steps,
            execute=_execute,
            overrides=set_ or (),
        )

    try:
        runs = asyncio.run(supervised())
    except asyncio.CancelledError:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130) from None
    document = to_json(runs)
    (out / "ablation.json").write_text(document)
    (out / "ablation.md").write_text(table(runs))
    (out / "ablation.svg").write_text(plot(runs))
    typer.echo(document if json else table(runs))
    typer.echo(f"written to {out}: ablation.md, ablation.json, ablation.svg", err=True)


async def _execute(recipe: Recipe, path: Path) -> None:
    """Run one recipe to its end with plain lines; finished runs are left alone."""
    from rstar2.pipeline.controller import run
    from rstar2.pipeline.live import PlainView
    from rstar2.record import RunDirectory, is_finished

    with RunDirectory.create_or_resume(path, recipe) as directory:
        if is_finished(path):
            return
        typer.echo(f"{path.name}: {recipe.name}, seed {recipe.seed}", err=True)
        view = PlainView(sys.stderr)
        try:
            view.open(recipe, path)
            await run(recipe, directory, view)
        finally:
            view.close()
        directory.event("finished")

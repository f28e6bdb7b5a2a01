"""`rstar2 view`: shows run directories as a local web page."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rstar2.cli.waiting import waiting
from rstar2.errors import UserError

DEFAULT_PORT = 8765
DEFAULT_RUNS = Path("runs")


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or directories that contain them. The default is runs/.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = DEFAULT_PORT,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
) -> None:
    """Show finished and running runs: curves, groups, rollouts, tokens, timelines.

    Serves on this machine only and never writes into a run. Ctrl-C stops it.
    """
    with waiting("loading the viewer"):
        from rstar2.viewer.run import open_runs
        from rstar2.viewer.server import serve

    given = runs or [DEFAULT_RUNS]
    if not runs and not DEFAULT_RUNS.is_dir():
        raise UserError(
            f"there is no {DEFAULT_RUNS}/ here: give run directories, or make a run with "
            "`rstar2 quickstart`"
        )
    directories = [directory for path in given for directory in run_directories(path)]

    def ready(url: str) -> None:
        typer.echo(url)
        typer.echo(f"viewing {len(directories)} run(s) at {url}   (Ctrl-C stops)", err=True)
        if browser:
            webbrowser.open(url)

    asyncio.run(serve(open_runs(directories), port, ready))


def run_directories(path: Path) -> list[Path]:
    """A run directory itself, or those one or two levels inside a directory (of a claim)."""
    if (path / "recipe.yaml").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such run directory")
    inside = sorted({p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/recipe.yaml")})
    runs = [p for p in inside if (p / "environment.json").is_file()]
    if not runs:
        raise UserError(f"{path} is not a run directory and has none inside (no recipe.yaml)")
    return runs

"""`rstar2 view`: run directories as a local web page."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rstar2.errors import UserError

DEFAULT_PORT = 8765


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = DEFAULT_PORT,
    browser: Annotated[bool, typer.Option(help="open the page in a browser")] = False,
) -> None:
    """Look inside runs, finished or going on: curves, groups, rollouts, tokens, timeline.

    Serves on this machine only and never writes into a run. Stop with Ctrl-C.
    """
    from rstar2.viewer.run import open_runs
    from rstar2.viewer.server import serve

    found = [directory for path in runs for directory in run_directories(path)]

    def ready(url: str) -> None:
        typer.echo(url)
        typer.echo(f"viewing {len(found)} run(s) at {url}   (Ctrl-C stops)", err=True)
        if browser:
            webbrowser.open(url)

    asyncio.run(serve(open_runs(found), port, ready))


def run_directories(path: Path) -> list[Path]:
    """A run directory, or those directly or two levels inside a directory (an ablation's)."""
    if (path / "recipe.yaml").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run directory")
    inside = sorted({p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/recipe.yaml")})
    runs = [p for p in inside if (p / "environment.json").is_file()]
    if not runs:
        raise UserError(f"{path} is no run directory and has none inside (no recipe.yaml)")
    return runs

"""`rstar2 train`, `quickstart` and `sft`: from a recipe's name to a finished run directory.

Everything that can be refused is refused before torch is imported and before a file is made. A
run that was stopped, by whatever means, goes on with the same command.
"""

from __future__ import annotations

import asyncio
import logging.handlers
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rstar2.config import LoadedRecipe, Recipe, load_recipe, preflight, render_recipe
from rstar2.errors import RecipeError, UserError
from rstar2.pipeline.progress import ProgressView
from rstar2.record import RunDirectory, is_finished, read_evaluations
from rstar2.track import check_trackers
from rstar2.types import encode

Pipeline = Callable[[Recipe, RunDirectory, ProgressView], Awaitable[Any]]

INTRO = """\
[bold]rstar2 quickstart[/]  the whole rStar2-Agent recipe, small enough for this machine

  A model of less than a million parameters is made from a seed. [cyan]SFT[/] teaches
  it how to write a tool call, not which one is right. Three stages of [cyan]RL[/] with
  GRPO-RoC then reward nothing but right answers: the model draws rollouts, its
  Python runs in a jail, and it learns from clean successes and varied failures.
  What it can do is measured on held-out problems after every stage.

  Stop with Ctrl-C whenever you like: the same command goes on from there.
"""

RecipeArgument = Annotated[
    str, typer.Argument(help="a recipe: a YAML file, or the name of a shipped one such as tiny")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="override a setting (repeatable)"),
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="run directory [runs/NAME-seedN]", metavar="DIR")
]
SeedOption = Annotated[int | None, typer.Option(help="override the recipe's seed")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="remove an earlier run and start anew")]
DryOption = Annotated[
    bool, typer.Option("--dry-run", help="print the resolved recipe and where each value came from")
]
RayOption = Annotated[
    str | None,
    typer.Option("--ray-address", help="run on this Ray cluster (host:port, or auto)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


def train(
    recipe: RecipeArgument,
    set_: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    fresh: FreshOption = False,
    dry_run: DryOption = False,
    ray_address: RayOption = None,
    json: JsonOption = False,
) -> None:
    """Run a recipe: SFT, RL stages, evaluation after each. Goes on where it was stopped."""
    joined = [f"cluster.address={ray_address}"] if ray_address else []
    loaded = load_recipe(recipe, [*(set_ or ()), *joined], seed=seed)
    if dry_run:
        show(loaded, run)
    else:
        execute(loaded.recipe, run, fresh=fresh, json=json)


def quickstart(
    set_: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    fresh: FreshOption = False,
    json: JsonOption = False,
) -> None:
    """Train the tiny agent by the whole recipe on this machine, in minutes."""
    loaded = load_recipe("tiny", set_ or (), seed=seed)
    Console(stderr=True, highlight=False).print(INTRO)
    execute(loaded.recipe, run, fresh=fresh, json=json)


def sft(
    recipe: RecipeArgument,
    set_: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    fresh: FreshOption = False,
    dry_run: DryOption = False,
    json: JsonOption = False,
) -> None:
    """Run only the SFT stage of a recipe, and evaluate what came out."""
    loaded = load_recipe(recipe, [*(set_ or ()), "rl.stages=[]"], seed=seed)
    if loaded.recipe.sft is None:
        raise RecipeError(f"recipe {loaded.recipe.name} has no SFT stage (sft: null)")
    run = run or default_directory(loaded.recipe, "-sft")
    if dry_run:
        show(loaded, run)
    else:
        execute(loaded.recipe, run, fresh=fresh, json=json)


# --------------------------------------------------------------------------- running


def default_directory(recipe: Recipe, suffix: str = "") -> Path:
    """Where a run goes if nothing else is said."""
    return Path("runs") / f"{recipe.name}{suffix}-seed{recipe.seed}"


def show(loaded: LoadedRecipe, run: Path | None) -> None:
    """Print the resolved recipe, then what would keep it from starting on this machine."""
    typer.echo(render_recipe(loaded), nl=False)
    try:
        preflight(loaded.recipe, run or default_directory(loaded.recipe))
    except UserError as error:
        typer.echo(f"note: it could not start here as it is: {error}", err=True)


def execute(
    recipe: Recipe,
    run: Path | None,
    *,
    fresh: bool = False,
    json: bool = False,
    pipeline: Pipeline | None = None,
) -> None:
    """Run a checked recipe in its directory, then print the table and write the report."""
    path = (run or default_directory(recipe)).absolute()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not fresh and path.is_dir() and is_finished(path):
        RunDirectory.create_or_resume(path, recipe).close()  # refuses another recipe
        console.print(f"[bold]{path}[/] is finished already; --fresh starts it anew")
        conclude(path, json=json)
        return
    preflight(recipe, path)
    check_trackers(recipe)
    with RunDirectory.create_or_resume(path, recipe, fresh=fresh) as directory:
        if directory.resumed:
            console.print(f"going on with the run in [bold]{path}[/]")
        with log_to(path / "log.txt"):
            _supervise(recipe, directory, pipeline, console)
        directory.event("finished")
    conclude(path, json=json)


def conclude(path: Path, *, json: bool) -> None:
    """Write the report; print the end table, or everything as JSON."""
    from rstar2.report import end_table, write_report

    started = time.monotonic()
    page = write_report(path)
    evaluations = read_evaluations(path)
    if json:
        result = {"run": str(path), "report": str(page), "evaluations": evaluations}
        typer.echo(encode(result).decode())
        return
    Console(highlight=False).print(end_table(path))
    took = time.monotonic() - started
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"report: [bold]{page}[/] [dim](written in {took:.1f} s)[/]"
    )


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send log messages of this process to a file of bounded size, not through the view."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=8 << 20, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _supervise(
    recipe: Recipe, directory: RunDirectory, pipeline: Pipeline | None, console: Console
) -> None:
    """Run the pipeline; a signal stops it in order, and says how to go on."""
    from rstar2.pipeline.progress import make_view

    view = make_view()
    run_pipeline = pipeline or _real_pipeline(recipe)
    stopped: list[signal.Signals] = []
    interrupted = False

    async def supervised() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            if len(stopped) == 1:
                view.note("stopping in order; again stops at once")
                task.cancel()
            else:
                loop.remove_signal_handler(number)
                raise SystemExit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        view.open(recipe, directory.path)
        await run_pipeline(recipe, directory, view)

    try:
        asyncio.run(supervised())
    except asyncio.CancelledError:
        if not stopped:
            raise
        interrupted = True
    except Exception as error:
        directory.event("failed", error=type(error).__name__, message=str(error))
        if not stopped:  # a terminal's Ctrl-C also ends engines, whose loss is then no news
            raise
        interrupted = True
    finally:
        view.close()
    if interrupted:
        directory.event("stopped", signal=stopped[0].name)
        console.print(f"stopped. To go on: [bold]{shlex.join(again(sys.argv))}[/]")
        raise typer.Exit(128 + stopped[0])


def _real_pipeline(recipe: Recipe) -> Pipeline:
    """The controller; imports torch, so only once everything has been checked."""
    if recipe.model.path in ("tiny", "smollm2") or Path(recipe.model.path).is_dir():
        # Bars for loading files that are here already would only tear the view.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rstar2.pipeline.controller import run

    return run


def again(argv: list[str]) -> list[str]:
    """The command that goes on with this run."""
    return [Path(argv[0]).name, *(word for word in argv[1:] if word != "--fresh")]

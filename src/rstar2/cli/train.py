"""`rstar2 train`, `quickstart` and `sft`: from a recipe's name to a finished run directory.

Every check runs before torch is imported and before a file is created. The same command resumes a
run that was stopped, however it was stopped.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rstar2.cli.waiting import waiting
from rstar2.config import LoadedRecipe, Recipe, load_recipe, render_recipe
from rstar2.config.preflight import BUILT_IN, preflight
from rstar2.errors import RecipeError, UserError
from rstar2.machine import typed_command
from rstar2.plugins import folder_of, load_function, make_importable
from rstar2.record import RunDirectory, is_finished, read_evaluations
from rstar2.track import check_trackers
from rstar2.types import Split, encode

if TYPE_CHECKING:
    from rich.console import Console

    from rstar2.pipeline.progress import ProgressView

Pipeline = Callable[[Recipe, RunDirectory, "ProgressView"], Awaitable[Any]]

INTRO = """\
[bold]rstar2 quickstart[/]  the whole rStar2-Agent recipe, small enough for this machine

  A model of less than a million parameters is created from a seed. [cyan]SFT[/] teaches
  it how to write a tool call, not which call is right. Three stages of [cyan]RL[/] with
  GRPO-RoC then reward only correct answers: the model generates rollouts, its
  Python runs in a jail, and it learns from clean successes and varied failures.
  Every stage ends with an evaluation on held-out problems.

  You can stop at any time with Ctrl-C; the same command resumes the run.
"""

NEXT_QUESTION = "What is 30 choose 4?"

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe: a YAML file, or the name of a shipped recipe such as tiny.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting. Can be repeated."),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="The run directory. The default is runs/NAME-seedN.", metavar="DIR"),
]
SeedOption = Annotated[int | None, typer.Option(help="Override the recipe's seed.")]
FreshOption = Annotated[
    bool,
    typer.Option("--fresh", help="Delete an earlier run in the run directory and start again."),
]
DryOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the resolved recipe and the origin of each value, and exit."
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option("--ray-address", help="Run on this Ray cluster (host:port, or auto)."),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Time budget: RL takes as many of the recipe's steps as fit into N minutes, "
        "evaluations included.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def train(
    recipe: RecipeArgument,
    set_: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    minutes: MinutesOption = None,
    fresh: FreshOption = False,
    dry_run: DryOption = False,
    ray_address: RayOption = None,
    json: JsonOption = False,
) -> None:
    """Run a recipe: SFT, RL stages, and an evaluation after each. Resumes a stopped run."""
    given = list(set_ or ())
    given += [f"cluster.address={ray_address}"] if ray_address else []
    given += [f"minutes={minutes:g}"] if minutes is not None else []
    loaded = load_recipe(recipe, given, seed=seed)
    make_importable(folder_of(recipe))
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
    """Train the tiny agent with the whole recipe on this machine. Resumes a stopped run."""
    loaded = load_recipe("tiny", set_ or (), seed=seed)
    on_stderr().print(INTRO)
    execute(loaded.recipe, run, fresh=fresh, json=json)
    path = run or default_directory(loaded.recipe)
    on_stderr(markup=False, soft_wrap=True).print(next_steps(path))


def sft(
    recipe: RecipeArgument,
    set_: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    fresh: FreshOption = False,
    dry_run: DryOption = False,
    json: JsonOption = False,
) -> None:
    """Run only the SFT stage of a recipe and evaluate the result. Resumes a stopped run."""
    loaded = load_recipe(recipe, [*(set_ or ()), "rl.stages=[]"], seed=seed)
    make_importable(folder_of(recipe))
    if loaded.recipe.sft is None:
        raise RecipeError(f"recipe {loaded.recipe.name} has no SFT stage (sft: null)")
    run = run or default_directory(loaded.recipe, "-sft")
    if dry_run:
        show(loaded, run)
    else:
        execute(loaded.recipe, run, fresh=fresh, json=json)


def next_steps(path: Path) -> str:
    """What to do with a finished quickstart; every line works as it is printed."""
    activate = Path(sys.executable).parent / "activate"
    on_path = shutil.which("rstar2") is not None
    first = [] if on_path or not activate.is_file() else [(f"source {_short(activate)}", "once")]
    question = shlex.quote(NEXT_QUESTION)
    where = shlex.quote(_short(path))
    lines = [
        *first,
        (f"rstar2 chat --model {where} {question}", "15 s"),
        (f"rstar2 view {where}", "5 s, then a page in your browser"),
        (f"rstar2 entropy {where}", "20 s"),
        (f"rstar2 export {where} --to tiny-model", "10 s"),
    ]
    width = max(len(command) for command, _ in lines)
    shown = "\n".join(f"  {command:{width}}  # {time}" for command, time in lines)
    return (
        f"\nNext steps:\n{shown}\n"
        "The tiny model knows eight kinds of arithmetic questions; chat lists them."
    )


def on_stderr(**settings: bool) -> Console:
    """A console for progress; rich is imported on use, because --dry-run needs none of it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, **settings)  # type: ignore[arg-type]


def _short(path: Path) -> str:
    """A path relative to the current directory if it is below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# --------------------------------------------------------------------------- running


def default_directory(recipe: Recipe, suffix: str = "") -> Path:
    """The default run directory."""
    return Path("runs") / f"{recipe.name}{suffix}-seed{recipe.seed}"


def show(loaded: LoadedRecipe, run: Path | None) -> None:
    """Print the resolved recipe, then why it could not start on this machine, if so."""
    typer.echo(render_recipe(loaded), nl=False)
    try:
        check_start(loaded.recipe, run or default_directory(loaded.recipe))
    except UserError as error:
        typer.echo(f"note: this recipe could not start here: {error}", err=True)


def check_start(recipe: Recipe, path: Path) -> dict[str, Any]:
    """Raise UserError for what would make the run fail: machine, environment, problems, ...

    Returns what the run records about its environment.
    """
    from rstar2.environments.identity import identify
    from rstar2.environments.load import load_environment, recipe_problems

    preflight(recipe, path)
    environment = load_environment(recipe.environment, recipe.template)
    splits: tuple[Split, ...] = get_args(Split) if recipe.rl.stages else ("heldout",)
    problems = {split: recipe_problems(recipe, environment, split) for split in splits}
    for setting, name in (
        ("rl.advantage", recipe.rl.advantage),
        ("rl.loss.kind", recipe.rl.loss.kind),
    ):
        if ":" in name:
            load_function(setting, name, {})
    check_trackers(recipe)
    return identify(recipe.environment, environment, problems)


def execute(
    recipe: Recipe,
    run: Path | None,
    *,
    fresh: bool = False,
    json: bool = False,
    extend: bool = False,
    pipeline: Pipeline | None = None,
) -> None:
    """Run a checked recipe in its directory, then print the table and write the report.

    With `extend`, the recipe has one more stage than the finished run in the directory.
    """
    path = (run or default_directory(recipe)).absolute()
    console = on_stderr(soft_wrap=True)
    if not fresh and not extend and path.is_dir() and is_finished(path):
        RunDirectory.create_or_resume(path, recipe).close()  # refuses another recipe
        console.print(
            f"[bold]{path}[/] is already finished; --fresh starts it again, and "
            f"`rstar2 extend {_short(path)} --steps N` trains it further"
        )
        conclude(path, json=json)
        return
    with waiting("checking the recipe"):
        identity = check_start(recipe, path)
    with RunDirectory.create_or_resume(
        path, recipe, fresh=fresh, extend=extend, environment=identity
    ) as directory:
        if directory.resumed:
            console.print(f"resuming the run in [bold]{path}[/]")
        with log_to(path / "log.txt"):
            _supervise(recipe, directory, pipeline, console)
        directory.event("finished")
    conclude(path, json=json)


def conclude(path: Path, *, json: bool) -> None:
    """Write the report; print the end table, or everything as JSON."""
    from rich.console import Console

    from rstar2.report.page import write_report
    from rstar2.report.table import end_table

    started = time.monotonic()
    page = write_report(path)
    evaluations = read_evaluations(path)
    if json:
        result = {"run": str(path), "report": str(page), "evaluations": evaluations}
        typer.echo(encode(result).decode())
        return
    Console(highlight=False).print(end_table(path))
    took = time.monotonic() - started
    on_stderr(soft_wrap=True).print(f"report: [bold]{page}[/] [dim](written in {took:.1f} s)[/]")


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write log messages of this process to a file of bounded size."""
    import logging.handlers

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
    """Run the pipeline; a signal stops it gracefully and prints how to resume."""
    import asyncio

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
                view.note("stopping gracefully; a second signal stops at once")
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
        if not stopped:  # Ctrl-C in a terminal also ends the engines: their loss is expected
            raise
        interrupted = True
    finally:
        view.close()
    if interrupted:
        directory.event("stopped", signal=stopped[0].name)
        console.print(f"stopped. To resume: [bold]{shlex.join(again(sys.argv))}[/]")
        raise typer.Exit(128 + stopped[0])


def _real_pipeline(recipe: Recipe) -> Pipeline:
    """The controller; it imports torch, so only after all checks."""
    if recipe.model.path in BUILT_IN or Path(recipe.model.path).is_dir():
        # Progress bars for loading local files would garble the view.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    from rstar2.pipeline.controller import run

    return run


def again(argv: list[str]) -> list[str]:
    """The command that resumes this run."""
    return [word for word in typed_command(argv) if word != "--fresh"]

"""The `rstar2` command: one module per sub-command, imported on use.

Progress goes to stderr and results to stdout. Exit codes: 0 success, 1 failure, 2 invalid input
(one message says why), 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rstar2 import extras
from rstar2.cli.waiting import waiting
from rstar2.errors import InfrastructureError, UserError

COMMANDS = {
    "quickstart": ("rstar2.cli.train", "quickstart", "Train the tiny agent with the whole recipe."),
    "train": ("rstar2.cli.train", "train", "Run a recipe: SFT, RL stages, evaluation."),
    "sft": ("rstar2.cli.train", "sft", "Run only the SFT stage of a recipe."),
    "extend": ("rstar2.cli.extend", "extend", "Train a finished run further."),
    "reproduce": (
        "rstar2.cli.reproduce",
        "reproduce",
        "Run the experiment of a claim, or repeat one of its cells.",
    ),
    "eval": ("rstar2.cli.eval", "app", "Score a model on benchmarks, or compare two evaluations."),
    "view": ("rstar2.cli.view", "view", "Browse finished and running runs on a local web page."),
    "entropy": ("rstar2.cli.entropy", "entropy", "Analyse the token entropy of a policy."),
    "export": (
        "rstar2.cli.export",
        "export",
        "Write a trained model to a directory, or upload it to a hub.",
    ),
    "chat": ("rstar2.cli.chat", "chat", "Chat with an agent and watch its Python calls."),
    "data": (
        "rstar2.cli.data",
        "app",
        "Prepare training data: clean, decontaminate, filter, convert.",
    ),
    "models": (
        "rstar2.cli.models",
        "models",
        "List the models that can be had without a model hub.",
    ),
    "simulate": (
        "rstar2.cli.simulate",
        "simulate",
        "Compare scheduling policies on simulated engines.",
    ),
    "route": (
        "rstar2.cli.route",
        "route",
        "Route requests to a fleet of vLLM servers with our scheduler.",
    ),
    "codeenv": ("rstar2.cli.codeenv", "app", "Serve, run and measure the code environment."),
    "env": ("rstar2.cli.env", "app", "List, check and try environments."),
    "plan": ("rstar2.cli.plan", "plan", "Estimate memory, time and cost of a recipe on a cluster."),
    "doctor": ("rstar2.cli.doctor", "doctor", "Check what this machine supports."),
    "gpu-check": (
        "rstar2.cli.gpu_check",
        "gpu_check",
        "Check on this machine everything that a run on GPUs needs.",
    ),
}


HELP_NAMES = {"help_option_names": ["-h", "--help"]}
SPOKEN_AFTER_S = 0.3
"""An import that takes longer is announced on the terminal."""


class LazyGroup(TyperGroup):
    """Imports a sub-command's module only when it is called, so that --help stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [
            name for name, (module, _, _) in COMMANDS.items() if importlib.util.find_spec(module)
        ]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command as --help and "did you mean" show it, without its module."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][2])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that will run; a misspelt one gets a suggestion."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and (near := get_close_matches(args[0], known, 1)):
            ctx.fail(f"There is no command {args[0]!r}. Did you mean {near[0]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if command is not None and name is not None else command, rest


def load(name: str) -> Any:
    """Import a sub-command."""
    module, attribute, summary = COMMANDS[name]
    with waiting(f"starting rstar2 {name}", after_s=SPOKEN_AFTER_S):
        target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        wrapper = typer.Typer(add_completion=False, rich_markup_mode=None)
        wrapper.command(name=name)(target)
        target = wrapper
    command = typer.main.get_command(target)
    command.name = name
    command.short_help = summary
    name_values(command)
    return command


def name_values(command: Any) -> None:
    """Show what an option takes as a word (`--url URL`, `--seed N`), not as a Python type."""
    for parameter in command.params:
        if parameter.metavar is None and not getattr(parameter, "is_flag", False):
            parameter.metavar = _placeholder(parameter)
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None  # else typer adds <str> to the name
    for inner in getattr(command, "commands", {}).values():
        name_values(inner)


def _placeholder(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        described = getattr(parameter, "type_descriptor", None) or parameter.type  # by version
        kind = str(getattr(described, "annotation", described)).lower()
        if "int" in kind or "float" in kind:
            return "N"
        if "path" in kind:
            return "PATH"
    return str(parameter.name).strip("_").rpartition("_")[2].upper()


app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP_NAMES
)


def _version(asked: bool) -> None:
    if asked:
        from rstar2 import __version__

        typer.echo(f"rstar2 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train language models to reason with a Python tool, using agentic reinforcement learning.

    Start with `rstar2 quickstart`, which runs the whole recipe with a tiny model on this machine.
    """


def main(argv: list[str] | None = None) -> Any:
    """Entry point: turn named errors into one message and an exit code."""
    try:
        try:
            return app(args=argv, prog_name="rstar2")
        except ModuleNotFoundError as error:
            missing = extras.explain(error, "this command")
            if missing is None:
                raise
            raise missing from error
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except InfrastructureError as error:
        typer.echo(f"failed: {type(error).__name__}: {error}", err=True)
        sys.exit(1)

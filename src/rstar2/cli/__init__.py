"""The `rstar2` command: one sub-command per job, each in its own module and imported on use.

Progress goes to stderr and results to stdout. Exit codes: 0 done, 1 failed, 2 the user's input
cannot work (one message says why), 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rstar2.errors import InfrastructureError, UserError

COMMANDS = {
    "quickstart": ("rstar2.cli.train", "quickstart", "train the tiny agent by the whole recipe"),
    "train": ("rstar2.cli.train", "train", "run a recipe: SFT, RL stages, evaluation"),
    "sft": ("rstar2.cli.train", "sft", "run only the SFT stage of a recipe"),
    "ablate": ("rstar2.cli.ablate", "ablate", "compare RoC with its alternatives over seeds"),
    "eval": ("rstar2.cli.eval", "app", "score a model on benchmarks; compare two scores"),
    "view": ("rstar2.cli.view", "view", "look inside runs: a local page, live"),
    "entropy": ("rstar2.cli.entropy", "entropy", "where a policy is uncertain, token by token"),
    "chat": ("rstar2.cli.chat", "chat", "watch an agent think, call Python, read and answer"),
    "data": ("rstar2.cli.data", "app", "prepare training data: clean, decontaminate, grade"),
    "simulate": ("rstar2.cli.simulate", "simulate", "compare rollout schedulers, no GPU needed"),
    "codeenv": ("rstar2.cli.codeenv", "app", "serve, run and measure the code environment"),
    "plan": ("rstar2.cli.plan", "plan", "does a recipe fit a cluster, how long, at what cost"),
    "doctor": ("rstar2.cli.doctor", "doctor", "what this machine can do, and what to change"),
}


class LazyGroup(TyperGroup):
    """Imports a sub-command's module only when it is called, so that --help stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [
            name for name, (module, _, _) in COMMANDS.items() if importlib.util.find_spec(module)
        ]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What --help and "did you mean" show of a command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][2])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is to be run, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if command is not None and name is not None else command, rest


def load(name: str) -> Any:
    """Import a sub-command."""
    module, attribute, summary = COMMANDS[name]
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        wrapper = typer.Typer(add_completion=False, rich_markup_mode=None)
        wrapper.command(name=name)(target)
        target = wrapper
    command = typer.main.get_command(target)
    command.name = name
    command.short_help = summary
    return command


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        from rstar2 import __version__

        typer.echo(f"rstar2 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train language models to reason with a Python tool, by agentic reinforcement learning.

    Start with `rstar2 quickstart`: the whole recipe on this machine, in minutes.
    """


def main(argv: list[str] | None = None) -> Any:
    """Entry point: turns named errors into one message and an exit code."""
    try:
        return app(args=argv)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except InfrastructureError as error:
        typer.echo(f"failed: {type(error).__name__}: {error}", err=True)
        sys.exit(1)

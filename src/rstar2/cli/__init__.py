"""The `rstar2` command: one sub-command per job, each in its own module and imported on use.

Progress goes to stderr and results to stdout; user errors are one message and exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rstar2.errors import InfrastructureError, UserError

COMMANDS = {
    "quickstart": ("rstar2.cli.train", "quickstart", "train the tiny agent by the whole recipe"),
    "train": ("rstar2.cli.train", "train", "run a recipe: SFT, RL stages, evaluation"),
    "sft": ("rstar2.cli.train", "sft", "run only the SFT stage of a recipe"),
    "ablate": ("rstar2.cli.ablate", "ablate", "compare RoC with its alternatives over seeds"),
    "chat": ("rstar2.cli.chat", "chat", "watch an agent think, call Python, read and answer"),
    "codeenv": ("rstar2.cli.codeenv", "app", "serve, run and measure the code environment"),
    "doctor": ("rstar2.cli.doctor", "doctor", "what this machine can do, and what to change"),
}


class LazyGroup(TyperGroup):
    """Imports a sub-command's module only when it is asked for, so that --help stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, summary = COMMANDS[cmd_name]
        target = getattr(importlib.import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            wrapper = typer.Typer(add_completion=False)
            wrapper.command(name=cmd_name)(target)
            target = wrapper
        command = typer.main.get_command(target)
        command.name = cmd_name
        command.short_help = summary
        return command


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Train language models to reason with a Python tool, by agentic reinforcement learning."""


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

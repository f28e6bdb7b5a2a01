"""`rstar2 extend`: trains a finished run further, in a new stage after its last one.

A new stage changes nothing that is recorded: earlier stages keep their metrics, evaluations and
exports, and the new one has its own. It starts new optimizer moments and its own learning-rate
schedule, so the schedules of earlier stages stay as they were.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from rstar2.cli.model_directory import only_in_python
from rstar2.cli.train import JsonOption, execute
from rstar2.config import Recipe, StageConfig, load_recipe
from rstar2.config.check import check
from rstar2.errors import RecipeError, UserError
from rstar2.plugins import make_importable
from rstar2.record import extension, is_finished, read_events


def extend(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of RL steps to add.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="KEY=VALUE",
            help="Change a setting of the new stage, as in lr=1e-4. Can be repeated.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a finished run further, in a new stage with the settings of its last one.

    The new stage is added to the run's recipe, evaluated and exported like the others. The same
    command resumes it if it was stopped.
    """
    path = run.absolute()
    recipe = extendable(path)
    asked = next_stage(recipe, steps, set_ or ())
    begun = extension(read_events(path))
    if begun is not None:
        recipe, asked = _begun(path, recipe, asked, StageConfig.model_validate(begun))
    elif not is_finished(path):
        raise UserError(
            f"{run} is not finished: resume it first with "
            f"`rstar2 train {run / 'recipe.yaml'} --run {run}`"
        )
    execute(with_stage(recipe, asked), path, json=json, extend=True)


def extendable(path: Path) -> Recipe:
    """The recipe of a run that can be trained further; UserError says why one cannot."""
    if not (path / "recipe.yaml").is_file():
        raise UserError(f"{path} is not a run directory (it has no recipe.yaml)")
    recipe = load_recipe(path / "recipe.yaml").recipe
    if not recipe.rl.stages:
        raise UserError(f"{path} has no RL stage to continue: train a recipe with rl.stages")
    if only_in_python(recipe, path):
        raise UserError(
            f"{path} was trained in an environment {recipe.environment.use!r} that exists only in "
            "Python: a command cannot continue it"
        )
    if any(event.get("event") == "collapsed" for event in read_events(path)):
        raise UserError(f"{path} ended because training collapsed: more steps would not help it")
    if not any((path / "checkpoints").glob("step-*")):
        raise UserError(f"{path} has no checkpoint left to continue from")
    make_importable(recipe.environment.folder)
    return recipe


def next_stage(recipe: Recipe, steps: int, settings: list[str] | tuple[str, ...]) -> StageConfig:
    """The stage after the last one: its settings, the given ones, and its own optimizer."""
    last = recipe.rl.stages[-1]
    values: dict[str, Any] = last.model_dump() | {
        "name": next_name([stage.name for stage in recipe.rl.stages]),
        "reset_optimizer": True,
    }
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or key not in StageConfig.model_fields or key in ("name", "steps"):
            known = ", ".join(sorted(StageConfig.model_fields.keys() - {"name", "steps"}))
            raise RecipeError(f"--set {text}: write KEY=VALUE with a setting of a stage: {known}")
        values[key] = yaml.safe_load(value)
    try:
        return StageConfig.model_validate(values | {"steps": steps})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecipeError(f"--set {where}={first['input']}: {first['msg']}") from error


def next_name(names: list[str]) -> str:
    """stage3 -> stage4; hard -> hard-2."""
    numbered = re.fullmatch(r"(.*?)(\d+)", names[-1])
    start, number = (numbered[1], int(numbered[2])) if numbered else (f"{names[-1]}-", 1)
    while f"{start}{number}" in names or f"{start}{number}" == f"{names[-1]}-1":
        number += 1
    return f"{start}{number}"


def with_stage(recipe: Recipe, stage: StageConfig) -> Recipe:
    """The recipe with one more stage, which takes all of its steps; RecipeError if its settings
    contradict others."""
    rl = recipe.rl.model_copy(update={"stages": (*recipe.rl.stages, stage)})
    extended = recipe.model_copy(update={"rl": rl, "minutes": None})
    if faults := check(extended):
        raise RecipeError(faults[0].render(lambda path: "the recipe of the run"))
    return extended


def _begun(
    path: Path, recipe: Recipe, asked: StageConfig, begun: StageConfig
) -> tuple[Recipe, StageConfig]:
    """The recipe without the stage that an earlier command added, and that stage, to resume it."""
    kept = tuple(stage for stage in recipe.rl.stages if stage.name != begun.name)
    recipe = recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"stages": kept})})
    if asked.model_dump(exclude={"name"}) != begun.model_dump(exclude={"name"}):
        raise UserError(
            f"{path} is being extended by {begun.steps} steps in stage {begun.name}: resume that "
            "with the same command before you add another stage"
        )
    return recipe, begun

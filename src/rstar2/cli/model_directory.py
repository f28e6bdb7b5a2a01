"""Where a model is, and what the run that made it says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from rstar2.config import EnvironmentConfig, Recipe, load_recipe
from rstar2.config.preflight import TINY
from rstar2.environments.load import PYTHON_MATH, known_environments
from rstar2.errors import UserError
from rstar2.model_config import CONFIG_FILE, read_config_fields
from rstar2.plugins import make_importable
from rstar2.problems.arithmetic import EXAMPLES, is_known_question
from rstar2.problems.load import ARITHMETIC
from rstar2.record.read import read_environment, read_recipe, rl_stage_names


def model_directory(path: Path) -> Path:
    """The directory that holds the weights: the path itself, or the export of a run's last stage.

    The order of stages is that of the run's recipe; times of files change when a run is copied.
    """
    if (path / CONFIG_FILE).is_file():
        return path
    exports = {
        entry.parent.name: entry.parent for entry in (path / "exports").glob(f"*/{CONFIG_FILE}")
    }
    if not exports:
        raise UserError(
            f"--model {path}: no config.json here and no exports/ of a run: give a directory that "
            "transformers can load, or a run directory"
        )
    stages = ["sft", *rl_stage_names(read_recipe(path))]
    known = [name for name in stages if name in exports]
    if not known:
        raise UserError(
            f"--model {path}: its exports ({', '.join(sorted(exports))}) are not stages of its "
            f"recipe: give one of them, such as {exports[min(exports)]}"
        )
    typer.echo(f"model: {exports[known[-1]]}", err=True)
    return exports[known[-1]]


def run_of(directory: Path) -> Path | None:
    """The run that exported a model directory; None if none did."""
    run = directory.absolute().parent.parent
    inside = directory.absolute().parent.name == "exports" and (run / "recipe.yaml").is_file()
    return run if inside else None


def longest(directory: Path, asked: int) -> int:
    """The requested length, or the model's maximum if that is less."""
    most = read_config_fields(directory).get("max_position_embeddings")
    return min(asked, int(most or asked))


def only_in_python(recipe: Recipe, run: Path) -> bool:
    """Whether a run's environment is a Python object, which a command cannot make again."""
    use = recipe.environment.use
    recorded = read_environment(run).get("environment") or {}
    was_given = "made_from" in recorded and recorded.get("use") == use
    unknown = ":" not in use and use not in known_environments()
    return use != PYTHON_MATH and (was_given or unknown)


def trained_environment(directory: Path) -> EnvironmentConfig:
    """The environment that a model was trained in; python-math if no run made the model."""
    run = run_of(directory)
    if run is None:
        return EnvironmentConfig()
    recipe = load_recipe(run / "recipe.yaml").recipe
    if only_in_python(recipe, run):
        raise UserError(
            f"{run} was trained in an environment {recipe.environment.use!r} that exists only in "
            f"Python: chat there with rstar2.Agent({str(directory)!r}, environment), or name one "
            f"with --environment ({PYTHON_MATH} gives the model a Python tool)"
        )
    make_importable(recipe.environment.folder)
    return recipe.environment


def known_questions(directory: Path) -> Callable[[str], bool] | None:
    """Which questions the model can answer, if it is the tiny one of the embedded task."""
    fields = read_config_fields(directory)
    sizes = (fields.get("hidden_size"), fields.get("vocab_size"))
    if sizes != (TINY.shape.hidden, TINY.shape.vocabulary):
        return None
    run = run_of(directory)
    if run is not None:
        recipe = read_recipe(run)
        sources = [(recipe.get(part) or {}).get("problems") for part in ("rl", "evaluation")]
        task = (recipe.get("environment") or {}).get("use", PYTHON_MATH)
        if task != PYTHON_MATH or any(s not in (None, ARITHMETIC) for s in sources):
            return None
    return is_known_question


def unknown_question() -> str:
    """The warning about a question that the tiny model was not trained on."""
    examples = "\n".join(f"  {example}" for example in EXAMPLES)
    return (
        "warning: the tiny model knows eight kinds of questions, in the wordings that it was "
        f"trained on, and answers anything else at random. One of each:\n{examples}"
    )

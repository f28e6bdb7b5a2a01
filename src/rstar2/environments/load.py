"""Environments by name: built in, `module:attribute`, or an entry point of an installed package.

`module:attribute` names an environment, or a function or class that makes one from `args`. The
module is searched in the folder of the recipe, then in the current directory, then among the
installed packages.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from types import ModuleType
from typing import Any

from rstar2 import extras
from rstar2.config import EnvironmentConfig, Recipe, TemplateConfig
from rstar2.environments.base import EnvironmentProtocol
from rstar2.errors import DataError, RecipeError, UserError
from rstar2.plugins import make_importable
from rstar2.problems.load import load_problems
from rstar2.types import Problem, Split

GROUP = "rstar2.environments"
"""Entry point group of packages that bring environments."""

PYTHON_MATH = "python-math"
BUILT_IN = {
    PYTHON_MATH: "rstar2.environments.python_math:PythonMath",
    "reasoning-gym": "rstar2.environments.reasoning_gym:ReasoningGym",
    "verifiers": "rstar2.endpoint.verifiers:VerifiersEnvironment",
}
"""Name of each environment in this package -> where it is defined."""


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A name that `environment.use` accepts, and where it leads."""

    name: str
    target: str
    origin: str
    """`built in`, or the package that brings it."""


def known_environments() -> dict[str, EnvironmentEntry]:
    """All names: built in, and of installed packages."""
    known = {name: EnvironmentEntry(name, target, "built in") for name, target in BUILT_IN.items()}
    for point in metadata.entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
        known.setdefault(point.name, EnvironmentEntry(point.name, point.value, package))
    return known


def load_environment(
    config: EnvironmentConfig, template: TemplateConfig | None = None
) -> EnvironmentProtocol:
    """The environment of a recipe; raises RecipeError if it cannot be made."""
    target = _target(config)
    value = _attribute(target, config)
    arguments = dict(config.args)
    if config.use == PYTHON_MATH:
        arguments = {"template": template, **arguments}
    if callable(value):
        environment = _make(value, arguments, config)
    elif arguments:
        raise RecipeError(
            f"environment.args: {config.use} is an environment, not a function that makes one, so "
            f"it takes no arguments (got {', '.join(arguments)})"
        )
    else:
        environment = value
    if not isinstance(environment, EnvironmentProtocol):
        raise RecipeError(
            f"environment.use = {config.use!r} is {type(environment).__name__!r}, not an "
            "environment: give an rstar2.Environment, or a function that returns one"
        )
    return environment


def _target(config: EnvironmentConfig) -> str:
    """`module:attribute` of a name."""
    use = config.use
    if ":" in use:
        return use
    known = known_environments()
    if use in known:
        return known[use].target
    near = get_close_matches(use, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"environment.use = {use!r}: there is no environment of this name. {hint}Known are "
        f"{', '.join(sorted(known))} (built in, or entry points of {GROUP}); an own one is given "
        "as module:attribute"
    )


def _attribute(target: str, config: EnvironmentConfig) -> Any:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise RecipeError(
            f"environment.use = {config.use!r}: write it as module:attribute, as in cities:env"
        )
    value: Any = _module(module_name, config)
    for name in path.split("."):
        if name not in dir(value):
            public = [n for n in dir(value) if not n.startswith("_")]
            near = get_close_matches(name, public, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise RecipeError(
                f"environment.use = {config.use!r}: {module_name} has no attribute {name!r}{hint}"
            )
        value = getattr(value, name)
    return value


def _module(name: str, config: EnvironmentConfig) -> ModuleType:
    """Import a module: from the recipe's folder, the current directory, or as installed."""
    folders = make_importable(config.folder) if ":" in config.use else []
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise _explained(config, error) from error
        places = ", ".join([*folders, "the installed packages"])
        raise RecipeError(
            f"environment.use = {config.use!r}: there is no module {name!r} in {places}"
        ) from error
    except RecipeError:
        raise
    except Exception as error:
        raise _explained(config, error) from error


def _explained(config: EnvironmentConfig, error: Exception) -> UserError:
    """The error of a module that cannot be imported, with its place in that module."""
    if isinstance(error, ModuleNotFoundError):
        missing = extras.explain(error, f"environment {config.use}")
        if missing is not None:
            return missing
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RecipeError(
        f"environment.use = {config.use!r} cannot be imported: {type(error).__name__}: {error} "
        f"({frame.filename}:{frame.lineno})"
    )


def _make(maker: Any, arguments: Mapping[str, Any], config: EnvironmentConfig) -> Any:
    """Call the function or class that makes an environment."""
    parameters = inspect.signature(maker).parameters
    names = [name for name in parameters if name != "template"]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    shown = f"{config.use} takes {', '.join(names) or 'no arguments'}"
    for name in config.args:
        if name not in parameters and not open_ended:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RecipeError(
                f"environment.args.{name} is not a parameter of this environment: {hint}{shown}"
            )
    for name, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if needed and name not in arguments:
            raise RecipeError(f"environment.args.{name} is missing: {shown}")
    try:
        return maker(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise _explained_call(config, error) from error


def _explained_call(config: EnvironmentConfig, error: Exception) -> RecipeError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    given = ", ".join(f"{key}={value!r}" for key, value in config.args.items())
    return RecipeError(
        f"environment {config.use}({given}) raised {type(error).__name__}: {error} "
        f"({frame.filename}:{frame.lineno})"
    )


# --------------------------------------------------------------------------- problems


def recipe_problems(
    recipe: Recipe, environment: EnvironmentProtocol, split: Split
) -> tuple[Problem, ...]:
    """The problems of a run: of the file that the recipe names, else the environment's own."""
    if split == "train":
        source, count, seed = recipe.rl.problems, recipe.rl.count or None, recipe.seed
    else:
        source, count, seed = recipe.evaluation.problems, recipe.evaluation.count, 0
    if source is not None:
        graded = environment.name == PYTHON_MATH
        return load_problems(source, split, count=count, seed=seed, graded=graded)
    problems = tuple(environment.problems(split, count, seed))
    if not problems:
        raise DataError(f"environment {environment.name} has no problems of the split {split!r}")
    return problems

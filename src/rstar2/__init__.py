"""rstar2: train language models to reason with a Python tool, by agentic reinforcement learning.

The public names are imported on first use, so that `import rstar2` takes milliseconds and loads
neither torch nor pydantic. A public name has two lines here: one for type checkers, and one in the
table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar2.api import Agent as Agent
    from rstar2.api import RolloutFailure as RolloutFailure
    from rstar2.api import evaluate_model as evaluate_model
    from rstar2.api import train as train
    from rstar2.config.schema import Recipe as Recipe
    from rstar2.environments.environment import Environment as Environment
    from rstar2.environments.environment import EpisodeView as EpisodeView
    from rstar2.environments.python_tool import python as python
    from rstar2.environments.tools import tool as tool
    from rstar2.errors import CodeEnvError as CodeEnvError
    from rstar2.errors import InfrastructureError as InfrastructureError
    from rstar2.errors import RstarError as RstarError
    from rstar2.errors import UserError as UserError
    from rstar2.grpo.roc import resample_on_correct as resample_on_correct
    from rstar2.sandbox import AsyncSandbox as AsyncSandbox
    from rstar2.sandbox import Sandbox as Sandbox
    from rstar2.types import Outcome as Outcome
    from rstar2.types import Problem as Problem
    from rstar2.types import Reward as Reward
    from rstar2.types import ToolResult as ToolResult
    from rstar2.types import Trajectory as Trajectory

__version__ = "0.3.0.dev0"

_PUBLIC = {
    "Agent": "rstar2.api",
    "AsyncSandbox": "rstar2.sandbox",
    "CodeEnvError": "rstar2.errors",
    "Environment": "rstar2.environments.environment",
    "EpisodeView": "rstar2.environments.environment",
    "InfrastructureError": "rstar2.errors",
    "Outcome": "rstar2.types",
    "Problem": "rstar2.types",
    "Recipe": "rstar2.config.schema",
    "Reward": "rstar2.types",
    "RolloutFailure": "rstar2.api",
    "RstarError": "rstar2.errors",
    "Sandbox": "rstar2.sandbox",
    "ToolResult": "rstar2.types",
    "Trajectory": "rstar2.types",
    "UserError": "rstar2.errors",
    "evaluate_model": "rstar2.api",
    "python": "rstar2.environments.python_tool",
    "resample_on_correct": "rstar2.grpo.roc",
    "tool": "rstar2.environments.tools",
    "train": "rstar2.api",
}
"""Public name -> the module that defines it."""

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rstar2' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        from rstar2 import extras

        missing = extras.explain(error, f"rstar2.{name}")
        if missing is None:
            raise
        raise missing from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

"""Recipes: the typed schema of a run, how one is loaded, and what is checked before it starts.

It does not import torch, so an invalid recipe is refused in well under two seconds. Names are
imported on first use: the code environment needs only its own section. `preflight` is a
module here: import the function from it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar2.config.codeenv import CodeEnvConfig as CodeEnvConfig
    from rstar2.config.codeenv import Section as Section
    from rstar2.config.load import LoadedRecipe as LoadedRecipe
    from rstar2.config.load import Origin as Origin
    from rstar2.config.load import find_recipe as find_recipe
    from rstar2.config.load import load_recipe as load_recipe
    from rstar2.config.load import render_recipe as render_recipe
    from rstar2.config.load import shipped_recipes as shipped_recipes
    from rstar2.config.schema import AgentConfig as AgentConfig
    from rstar2.config.schema import ClusterConfig as ClusterConfig
    from rstar2.config.schema import CollapseConfig as CollapseConfig
    from rstar2.config.schema import DifficultyFilter as DifficultyFilter
    from rstar2.config.schema import EngineConfig as EngineConfig
    from rstar2.config.schema import EnvironmentConfig as EnvironmentConfig
    from rstar2.config.schema import EvaluationConfig as EvaluationConfig
    from rstar2.config.schema import LearnerConfig as LearnerConfig
    from rstar2.config.schema import LoraConfig as LoraConfig
    from rstar2.config.schema import LossConfig as LossConfig
    from rstar2.config.schema import ModelConfig as ModelConfig
    from rstar2.config.schema import OptimizerConfig as OptimizerConfig
    from rstar2.config.schema import PlateauConfig as PlateauConfig
    from rstar2.config.schema import Recipe as Recipe
    from rstar2.config.schema import RecordConfig as RecordConfig
    from rstar2.config.schema import RewardConfig as RewardConfig
    from rstar2.config.schema import RlConfig as RlConfig
    from rstar2.config.schema import RocConfig as RocConfig
    from rstar2.config.schema import SamplingConfig as SamplingConfig
    from rstar2.config.schema import SchedulerConfig as SchedulerConfig
    from rstar2.config.schema import SftConfig as SftConfig
    from rstar2.config.schema import StageConfig as StageConfig
    from rstar2.config.schema import TemplateConfig as TemplateConfig
    from rstar2.config.schema import UntilConfig as UntilConfig

_MODULES = {
    "codeenv": "CodeEnvConfig Section",
    "load": "LoadedRecipe Origin find_recipe load_recipe render_recipe shipped_recipes",
    "schema": """
        AgentConfig ClusterConfig CollapseConfig DifficultyFilter EngineConfig EnvironmentConfig
        EvaluationConfig LearnerConfig LoraConfig LossConfig ModelConfig OptimizerConfig
        PlateauConfig Recipe RecordConfig RewardConfig RlConfig RocConfig SamplingConfig
        SchedulerConfig SftConfig StageConfig TemplateConfig UntilConfig
    """,
}
"""Module -> the public names that it defines."""
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rstar2.config' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"rstar2.config.{_PUBLIC[name]}"), name)
    return globals()[name]

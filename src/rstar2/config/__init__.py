"""Recipes: the typed schema of a run, how one is loaded, and what is checked before it starts.

It does not import torch, so an invalid recipe is refused in well under two seconds.
"""

from rstar2.config.load import (
    LoadedRecipe,
    Origin,
    find_recipe,
    load_recipe,
    render_recipe,
    shipped_recipes,
)
from rstar2.config.preflight import preflight
from rstar2.config.schema import (
    AgentConfig,
    ClusterConfig,
    CodeEnvConfig,
    CollapseConfig,
    DifficultyFilter,
    EngineConfig,
    EvaluationConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    RecordConfig,
    RlConfig,
    RocConfig,
    SamplingConfig,
    SchedulerConfig,
    Section,
    SftConfig,
    StageConfig,
    TemplateConfig,
)

__all__ = [
    "AgentConfig",
    "ClusterConfig",
    "CodeEnvConfig",
    "CollapseConfig",
    "DifficultyFilter",
    "EngineConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "LoadedRecipe",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Origin",
    "Recipe",
    "RecordConfig",
    "RlConfig",
    "RocConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "Section",
    "SftConfig",
    "StageConfig",
    "TemplateConfig",
    "find_recipe",
    "load_recipe",
    "preflight",
    "render_recipe",
    "shipped_recipes",
]

"""The model that a run starts from: its directory, tokenizer, and a learner with its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rstar2.config import OptimizerConfig, Recipe
from rstar2.errors import RecipeError
from rstar2.files import replacing_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rstar2.cluster.ray_cluster import RayCluster
    from rstar2.learner.group import LearnerGroup


def find_model(recipe: Recipe, directory: Path) -> Path | str:
    """The directory or hub id of the initial policy; models with a short name are made here."""
    from rstar2.learner.gemma3 import make_gemma3
    from rstar2.learner.smollm2 import make_smollm2
    from rstar2.learner.tiny import make_tiny

    makers: dict[str, Callable[[Path], None]] = {
        "tiny": lambda path: make_tiny(path, recipe.seed),
        "smollm2": make_smollm2,
        "gemma3-270m": make_gemma3,
    }
    make = makers.get(recipe.model.path)
    if make is None:
        return recipe.model.path
    path = directory / "model"
    if not path.exists():
        with replacing_directory(path) as temporary:
            make(temporary)
    return path


def load_model(
    recipe: Recipe, model_dir: Path | str, cluster: RayCluster | None = None
) -> tuple[PreTrainedTokenizerFast, LearnerGroup]:
    """The tokenizer, and a learner with the initial weights."""
    import torch
    from transformers import AutoTokenizer

    from rstar2.learner.group import LearnerGroup

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"model.path={str(model_dir)!r}: no tokenizer found there: {error}"
        ) from error
    optimizer: OptimizerConfig = recipe.sft.optimizer if recipe.sft else recipe.rl.optimizer
    if recipe.deterministic:
        torch.use_deterministic_algorithms(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    learner = LearnerGroup(
        model_dir,
        recipe.learner,
        optimizer,
        total_steps=1,
        seed=recipe.seed,
        device=device,
        ranks=None if cluster is None else cluster.ranks(),
    )
    return tokenizer, learner

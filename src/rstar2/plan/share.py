"""Share of a GPU's memory for the vLLM servers that use it together with the learner."""

from __future__ import annotations

from collections.abc import Callable

from rstar2.config import Recipe
from rstar2.errors import RecipeError, UserError
from rstar2.model_config import find_shape
from rstar2.plan.estimate import layout_of
from rstar2.plan.lora import resident_bytes
from rstar2.plan.memory import GB, learner_memory
from rstar2.plan.workload import Assumptions


def beside_learner(recipe: Recipe, assume: Assumptions | None = None) -> Callable[[float], float]:
    """The share that the learner leaves, by the memory of the GPU in GB.

    The learner's memory is its peak, so that a rank can also be started again beside a running
    server; with `engine.sleep`, what it keeps while engines generate. RecipeError if a server's
    weights do not fit beside it.
    """

    def share(memory_gb: float) -> float:
        layout = layout_of(recipe)
        try:
            shape = find_shape(recipe.model.path)
        except UserError as error:
            raise RecipeError(
                f"the memory of engines beside the learner is not known: {error}. Set "
                "engine.gpu_memory_share"
            ) from error
        learner = sum(learner_memory(recipe.learner, shape, layout.ranks).values())
        if recipe.engine.sleep:
            learner = resident_bytes(shape, recipe.learner) / layout.ranks / GB
        left = (assume or Assumptions()).kv_share - learner / memory_gb
        weights = 2 * shape.parameters / layout.tensor_parallel / GB
        if left * memory_gb <= weights:
            raise RecipeError(
                f"an engine and a learner rank do not fit on one GPU of {memory_gb:.0f} GB: the "
                f"rank needs {learner:.1f} GB, the engine more than {weights:.1f} GB "
                "(`rstar2 plan` shows the parts). Use more GPUs, learner.lora or a smaller model"
            )
        return left

    return share

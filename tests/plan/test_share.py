"""Memory of vLLM servers on GPUs that they share with the learner."""

from __future__ import annotations

import pytest

from rstar2.config import load_recipe
from rstar2.errors import RecipeError
from rstar2.plan import make_plan, parse_cluster
from rstar2.plan.share import beside_learner


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("qwen3-1.7b-1gpu", "1xA100-80"),
        ("qwen3-1.7b-1gpu", "1xH100"),
        ("qwen3-1.7b-lora-24gb", "1x4090"),
        ("qwen3-1.7b-lora-24gb", "1xL4"),
        ("qwen3-4b-lora-24gb", "1x4090"),
        ("qwen3-4b-lora-24gb", "1xL4"),
        ("rstar2-agent-14b", "64xMI300X"),
    ],
)
def test_shipped_recipes_fit_with_the_computed_share(name: str, cluster: str) -> None:
    """Engine and learner are on the card at the same time, unless they take turns."""
    recipe, machine = load_recipe(name).recipe, parse_cluster(cluster)
    plan = make_plan(recipe, machine)
    assert not [p for p in plan.problems if "GB" in p or "KV" in p]
    share = beside_learner(recipe)(machine.gpu.memory_gb)
    assert share == pytest.approx(plan.engine_share, abs=0.01)
    assert plan.learner.fits
    if recipe.engine.sleep:  # the peak of the learner is while the engine sleeps
        return
    learner = sum(v for k, v in plan.learner.parts.items() if not k.startswith("engine"))
    assert share * machine.gpu.memory_gb + learner <= 0.95 * machine.gpu.memory_gb


def test_a_card_that_is_too_small_is_refused_with_the_parts() -> None:
    share = beside_learner(load_recipe("qwen3-1.7b-1gpu").recipe)
    with pytest.raises(RecipeError, match=r"one GPU of 24 GB: the rank needs \d+\.\d GB.*lora"):
        share(24)


def test_a_model_of_unknown_shape_needs_the_setting() -> None:
    recipe = load_recipe("qwen3-1.7b-1gpu", ["model.path=someone/unknown"]).recipe
    with pytest.raises(RecipeError, match=r"someone/unknown.*Set engine\.gpu_memory_share"):
        beside_learner(recipe)(80)

"""A layout for a cluster, and the recipe that sets it.

All layouts that use the whole cluster are planned: engines of 1, 2, 4, ... GPUs, with the learner
on the same GPUs or on half of them. The fastest one that fits is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rstar2.config import ClusterConfig, Recipe
from rstar2.errors import UserError
from rstar2.plan.estimate import Layout, Plan, make_plan
from rstar2.plan.hardware import Cluster
from rstar2.plan.workload import Assumptions


def propose(recipe: Recipe, cluster: Cluster, assume: Assumptions | None = None) -> Recipe:
    """The recipe with the fastest layout for this cluster; UserError if none fits."""
    tried = [
        (changed, make_plan(changed, cluster, assume))
        for layout in _layouts(cluster)
        if (changed := with_layout(recipe, layout))
    ]
    fitting = [(changed, plan) for changed, plan in tried if not plan.problems]
    if not fitting:
        least = min(tried, key=lambda pair: max(pair[1].engine.excess, pair[1].learner.excess))
        raise UserError(
            f"{recipe.name} does not fit {cluster.gpus} x {cluster.gpu.name} in any layout: "
            f"{least[1].problems[0].partition(': use')[0]}. Use more or larger GPUs, or a smaller "
            "model (model.path)"
        )
    return min(fitting, key=lambda pair: pair[1].total_s)[0]


def _layouts(cluster: Cluster) -> Iterator[Layout]:
    parallel = 1
    while parallel <= cluster.gpus_per_node and parallel <= cluster.gpus:
        yield Layout(cluster.gpus // parallel, parallel, cluster.gpus, True)
        half = cluster.gpus // 2
        if half >= parallel:
            yield Layout(half // parallel, parallel, cluster.gpus - half, False)
        parallel *= 2


def with_layout(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe with another layout; more than one GPU needs the `cluster` section."""
    changes: dict[str, Any] = {
        "engine": recipe.engine.model_copy(update={"count": layout.engines}),
        "learner": recipe.learner.model_copy(update={"ranks": layout.ranks}),
    }
    if layout.gpus > 1 or recipe.cluster is not None:
        section = recipe.cluster or ClusterConfig()
        placed = {"colocate": layout.colocated, "gpus_per_engine": layout.tensor_parallel}
        changes["cluster"] = section.model_copy(update=placed)
    return recipe.model_copy(update=changes)


def recipe_text(source: str, plan: Plan, recipe: Recipe) -> str:
    """A recipe file that extends `source` and sets the layout of a plan."""
    layout = plan.layout
    engine: dict[str, Any] = {"kind": "vllm", "count": layout.engines}
    if layout.colocated:
        engine["gpu_memory_share"] = round(max(0.05, plan.engine_share - 0.005), 2)
    values: dict[str, Any] = {
        "extends": source,
        "name": f"{recipe.name}-{plan.cluster.gpus}x{plan.cluster.gpu.name.lower()}",
        "engine": engine,
        "learner": {"ranks": layout.ranks},
    }
    if recipe.cluster is not None:
        values["cluster"] = {
            "colocate": layout.colocated,
            "gpus_per_engine": layout.tensor_parallel,
        }
    head = f"# The layout of {recipe.name} for {plan.cluster.gpus} x {plan.cluster.gpu.name}, "
    return head + "by `rstar2 plan`: an estimate.\n" + yaml.safe_dump(values, sort_keys=False)


def source_name(recipe: str) -> str:
    """How a file in any directory names the recipe that it extends."""
    path = Path(recipe)
    return str(path.resolve()) if path.is_file() else recipe

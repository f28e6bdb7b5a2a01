"""Time of a weight update by its path, and the disk that a run needs.

    files, one machine   rank 0 writes an export to memory, engines load it
    files, nodes         the same, and each other node receives one copy in between
    adapter              the same with the adapter's files
    nccl                 one copy from GPU to GPU over the slowest link

Nothing overlaps: the engines wait for the last byte.
"""

from __future__ import annotations

from rstar2.config import Recipe
from rstar2.model_config import ModelShape
from rstar2.plan.hardware import Cluster
from rstar2.plan.memory import GB
from rstar2.plan.workload import Assumptions, StageLoad

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def weight_seconds(
    recipe: Recipe, shape: ModelShape, cluster: Cluster, assume: Assumptions
) -> dict[str, float]:
    """Seconds of one weight update by part, for the path that the recipe sets."""
    engine, lora = recipe.engine, recipe.learner.lora
    fixed = {"fixed": assume.sync_fixed_s}
    if engine.kind == "vllm" and engine.weight_transfer == "nccl":
        return {"GPU to GPU": nccl_seconds(recipe, shape, cluster), **fixed}
    size = NUMBER_BYTES[recipe.learner.dtype] * shape.parameters / GB
    if engine.lora == "adapter" and lora is not None:
        size = 4 * shape.adapter_parameters(lora.rank, lora.targets) / GB
    copied = {"copies to nodes": size / assume.weights_copy_gb} if cluster.nodes > 1 else {}
    return {
        "write": size / assume.weights_write_gb,
        **copied,
        "load": size / assume.weights_load_gb,
        **fixed,
    }


def nccl_seconds(recipe: Recipe, shape: ModelShape, cluster: Cluster) -> float:
    """Seconds of one copy of the weights from GPU to GPU."""
    return NUMBER_BYTES[recipe.model.dtype] * shape.parameters / GB / cluster.slowest_link_gb


def record_gb(recipe: Recipe, load: StageLoad, assume: Assumptions) -> float:
    """GB that one step of a stage writes: its rollouts and the learner's logprobs."""
    written = {"all": load.drawn, "kept": load.kept, "none": 0}[recipe.record.trajectories]
    size = written * load.mean_completion * assume.rollout_bytes
    if recipe.record.tokens and written:
        trained = load.kept * load.mean_completion * (1 - assume.tool_share)
        size += trained * assume.logprob_bytes
    return size / GB

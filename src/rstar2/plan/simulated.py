"""Generation time from the rollout simulator: the real scheduler over the plan's engine model.

Slower than `Roofline.decoding` and more accurate: the real scheduler admits rollouts, turns wait
for their tools, prefill runs alongside decoding, and groups share their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from rstar2.config import Recipe
from rstar2.model_config import ModelShape
from rstar2.plan.hardware import Cluster
from rstar2.plan.workload import Assumptions
from rstar2.rollout.simulate.model import EngineModel
from rstar2.rollout.simulate.simulation import simulate
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan, Workload

COMPUTE_SHARE = 0.6


def engine_model(
    recipe: Recipe,
    cluster: Cluster,
    shape: ModelShape,
    parallel: int,
    assume: Assumptions,
    kv_tokens: int,
) -> EngineModel:
    """The plan's roofline as the simulator's engine model."""
    bandwidth = parallel * cluster.gpu.bandwidth_tb * 1e12 * assume.decode_bandwidth
    flops = parallel * cluster.gpu.tflops * 1e12
    return EngineModel(
        name=f"{parallel}x{cluster.gpu.name}",
        kv_tokens=kv_tokens // 16 * 16,
        max_sequences=recipe.engine.max_sequences,
        step_s=assume.step_overhead_s + 2 * shape.parameters / bandwidth,
        sequence_s=2 * shape.parameters / (flops * COMPUTE_SHARE),
        context_s=2 * shape.kv_numbers / bandwidth,
        prefill_s=2 * shape.parameters / (flops * assume.prefill_mfu),
        pair_s=shape.attention_flops(1) / (flops * assume.prefill_mfu),
        source="data sheet and assumptions of the plan",
    )


def makespan(
    model: EngineModel, lengths: Sequence[int], limit: int, recipe: Recipe, assume: Assumptions
) -> float:
    """Seconds until one engine has finished rollouts of these completion lengths."""
    group = recipe.rl.roc.drawn
    rollouts = tuple(
        _rollout(f"{i // group}/{i % group}", length, limit, assume)
        for i, length in enumerate(lengths)
    )
    workload = Workload("plan", rollouts, (model,))
    return max(simulate(workload, recipe.scheduler).ends.values())


def _rollout(name: str, length: int, limit: int, assume: Assumptions) -> RolloutPlan:
    """Equal turns with a tool call after each but the last; longer rollouts make no more calls."""
    calls = min(round(assume.calls_per_rollout), max(0, length // 64))
    response = int(assume.tool_share * length / calls) if calls else 0
    sampled = max(1, (length - calls * response) // (calls + 1))
    turns = [TurnPlan(sampled, assume.call_s, response)] * calls
    return RolloutPlan(
        id=name,
        group=name.partition("/")[0],
        prompt=assume.prompt_tokens,
        turns=(*turns, TurnPlan(sampled)),
        limit=limit,
        truncated=length >= limit - assume.prompt_tokens,
    )

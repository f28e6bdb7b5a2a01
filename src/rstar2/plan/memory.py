"""Memory of one learner rank at the peak of a step, by component.

docs/reference/gpu-memory.md compares it with the learner's own step on fake GPUs
(`rstar2.learner.measure`).
"""

from __future__ import annotations

from rstar2.config import LearnerConfig
from rstar2.model_config import ModelShape
from rstar2.plan.lora import state_bytes, state_label

GB = 1e9
LOGITS_GB = 0.3
"""Maximum size of a chunk of logits in the learner, gradients included."""


def learner_memory(learner: LearnerConfig, shape: ModelShape, ranks: int) -> dict[str, float]:
    """Memory of one rank while it trains, its state first."""
    tokens = learner.tokens_per_microbatch
    table = shape.vocabulary * shape.hidden
    root = table if shape.tied else 2 * table
    layer = (shape.parameters - root) / shape.layers
    sharded, adapters = ranks > 1, learner.lora is not None
    # In numbers of 2 bytes per token. FSDP and frozen weights keep the residual stream in
    # bfloat16; autocast on one rank keeps it, and what the norms save, in float32.
    wide = not sharded and not adapters
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer_inputs = 2 * shape.hidden if wide else shape.hidden
    inner = (17 if wide else 8) * shape.hidden + 5 * (queries + keys) + 4 * shape.intermediate
    working = (24 if wide else 15) * shape.hidden + 6 * shape.intermediate
    if adapters:  # frozen norms keep no outputs for gradients of their weights
        inner -= 2 * shape.hidden + queries + keys
    if adapters and not sharded:  # inputs of the adapters in another number format
        inner += shape.hidden + shape.intermediate
        working += 2 * (5 * shape.hidden + queries + shape.intermediate)
    kept = layer_inputs if learner.activation_checkpointing else inner
    # With frozen weights a tied table was measured twice.
    gathered = root + (table if adapters and shape.tied else 0) + 2 * layer
    return {
        state_label(learner, ranks): state_bytes(shape, learner) / ranks / GB,
        "gathered weights": 2 * gathered / GB if sharded else 0.0,
        "gradients before they are sharded": (
            (2 * table + (2 + 4) * layer) / GB if sharded and not adapters else 0.0
        ),
        f"activations of {tokens} tokens": 2 * tokens * (shape.layers * kept + working) / GB,
        "logits": LOGITS_GB,
    }

"""Memory of a learner's state: all weights are trained, or LoRA adapters beside frozen weights.

While colocated engines generate (`engine.sleep`) the moments are in host memory and there are no
gradients: only the weights stay on the GPU.
"""

from __future__ import annotations

from rstar2.config import LearnerConfig
from rstar2.model_config import ModelShape

WEIGHT_BYTES = 4
ASLEEP_GB = 1.5
"""What a sleeping server keeps: CUDA's context and graphs. An estimate, not measured."""
CHECKPOINT_BYTES = 12
"""Bytes per trained parameter in a checkpoint: weight and two moments in float32."""
STATE_BYTES = 16
"""Bytes per trained parameter: weight, gradient and two moments in float32."""


def state_bytes(shape: ModelShape, learner: LearnerConfig) -> float:
    """Bytes on GPUs of weights, gradients and moments of all ranks together."""
    if learner.cpu_offload:
        return 0.0
    if learner.lora is None:
        return float(STATE_BYTES * shape.parameters)
    frozen = 4 if learner.dtype == "float32" else 2
    trained = shape.adapter_parameters(learner.lora.rank, learner.lora.targets)
    return float(frozen * shape.parameters + STATE_BYTES * trained)


def resident_bytes(shape: ModelShape, learner: LearnerConfig) -> float:
    """Bytes of the weights of all ranks together: what stays on the GPUs during generation."""
    if learner.cpu_offload:
        return 0.0
    if learner.lora is None:
        return float(WEIGHT_BYTES * shape.parameters)
    frozen = 4 if learner.dtype == "float32" else 2
    trained = shape.adapter_parameters(learner.lora.rank, learner.lora.targets)
    return float(frozen * shape.parameters + WEIGHT_BYTES * trained)


def checkpoint_bytes(shape: ModelShape, learner: LearnerConfig) -> float:
    """Bytes of one checkpoint on disk."""
    if learner.lora is None:
        return float(CHECKPOINT_BYTES * shape.parameters)
    trained = shape.adapter_parameters(learner.lora.rank, learner.lora.targets)
    return float(CHECKPOINT_BYTES * trained)


def state_label(learner: LearnerConfig, ranks: int) -> str:
    """What the state consists of, for the table of memory."""
    if learner.cpu_offload:
        return "state, in host memory"
    if learner.lora is None:
        return f"state, {STATE_BYTES} B per parameter / {ranks} ranks"
    return f"frozen weights and adapters / {ranks} ranks"

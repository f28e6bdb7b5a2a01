"""Memory of one learner rank, measured by running its own code on fake GPUs (`fake_cuda.py`).

A step with two micro-batches of the full token budget runs for a model with few layers, twice; all
of its layers are equal, so the rest is extrapolated.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.learner.fake_cuda import DEVICE, fake_cuda
from rstar2.learner.learner import Learner
from rstar2.model_config import ModelShape
from rstar2.types import Batch, Sample

FEW_LAYERS = (4, 6)
"""Layers of the models that run; with fewer, not all of FSDP's buffers exist at one time."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """GB on the GPU of one rank: while nothing runs, and at the peak of a step."""

    state: float
    peak: float


def measure_memory(shape: ModelShape, learner: LearnerConfig) -> LearnerMemory:
    """Memory of one rank that trains a model of this shape with micro-batches of full size."""
    layers = [min(few, shape.layers) for few in FEW_LAYERS]
    large = run_step(replace(shape, layers=layers[1]), learner)
    if layers[1] == shape.layers:
        return large
    small = run_step(replace(shape, layers=layers[0]), learner)
    missing = (shape.layers - layers[1]) / (layers[1] - layers[0])
    return LearnerMemory(
        state=large.state + missing * (large.state - small.state),
        peak=large.peak + missing * (large.peak - small.peak),
    )


def run_step(shape: ModelShape, learner: LearnerConfig) -> LearnerMemory:
    """Build the learner and run one RL step of two micro-batches."""
    with tempfile.TemporaryDirectory(prefix="rstar2-measure-") as directory:
        write_config(shape, Path(directory))
        with fake_cuda(learner.ranks) as trace:
            rank = Learner(
                directory,
                learner,
                OptimizerConfig(),
                total_steps=1,
                seed=0,
                device=DEVICE,
                read=lambda path: None,
            )
            state = trace.gb
            trace.reset_peak()
            rank.rl_step(full_batch(learner), LossConfig(), 1)
            return LearnerMemory(state, trace.peak_gb)


def full_batch(learner: LearnerConfig, microbatches: int = 2) -> Batch:
    """As many sequences as fill the micro-batches of all ranks, one sequence each."""
    length = learner.tokens_per_microbatch + 1
    ids, mask = (1,) * length, (0,) + (1,) * (length - 1)
    sample = Sample(ids, mask, (0.0,) * length, 1.0, "group", "0.0", 0)
    count = microbatches * learner.ranks
    return Batch(0, tuple(replace(sample, trajectory_id=f"0.{i}") for i in range(count)))


def write_config(shape: ModelShape, directory: Path) -> None:
    """Write the config.json of a Qwen3 model of this shape."""
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")

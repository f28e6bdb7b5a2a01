"""The speed and capacity of an engine as numbers, measured or derived from data sheets.

One step of an engine, which decodes a token of every running rollout and computes waiting prompts,
takes

    step_s + sequence_s * decoding + context_s * sum(context of the decoding)
           + prefill_s * prompt tokens + pair_s * (prompt token, earlier token) pairs

seconds. The five coefficients come from `fit_engine` over measured steps of a real engine, or from
`from_hardware`. The form is linear so that the lower bound (`lower_bound.py`) is exact; a fit
states its error.

The JSON file has either the coefficients (written by `EngineModel.to_json`) or measured steps:

    {"name": "vllm-tiny", "kv_tokens": 2048, "block_tokens": 32, "max_sequences": 64,
     "rows": [{"batch": 8, "context": 1024, "prefill": 0, "seconds": 0.0031}, ...]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import nnls

from rstar2.errors import DataError
from rstar2.types import EngineCapacity


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step, or the mean of several."""

    batch: float
    """Rollouts that decoded a token."""
    context: float
    """Sum of their tokens before the step."""
    seconds: float
    prefill: float = 0
    """Prompt tokens computed in the same step."""
    pairs: float = 0
    """Sum over the prompt tokens of the step of the number of tokens before each."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One engine. Times in seconds, sizes in tokens."""

    name: str
    kv_tokens: int
    block_tokens: int = 16
    max_sequences: int = 256
    batch_tokens: int = 8192
    """Most tokens computed in one step: decoding first, the rest for prompts."""
    step_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_s: float = 0.0
    pair_s: float = 0.0
    forgets: bool = False
    """Whether a released prefix is freed at once (embedded engine) or ages in the cache (vLLM)."""
    source: str = ""
    """Where the coefficients come from."""

    def capacity(self, max_length: int) -> EngineCapacity:
        """The capacity that the engine reports to the scheduler."""
        return EngineCapacity(self.kv_tokens, self.max_sequences, max_length, self.block_tokens)

    def step(self, batch: int, context: int, prefill: int = 0, pairs: int = 0) -> float:
        """Seconds of one step."""
        return (
            self.step_s
            + self.sequence_s * batch
            + self.context_s * context
            + self.prefill_s * prefill
            + self.pair_s * pairs
        )

    def slowed(self, factor: float) -> EngineModel:
        """The same engine, `factor` times slower."""
        return replace(
            self,
            name=f"{self.name}/{factor:g}",
            step_s=self.step_s * factor,
            sequence_s=self.sequence_s * factor,
            context_s=self.context_s * factor,
            prefill_s=self.prefill_s * factor,
            pair_s=self.pair_s * factor,
        )

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(asdict(self)), indent=2).decode()

    @staticmethod
    def from_json(path: Path) -> EngineModel:
        """Read coefficients, or fit them to the measured steps in the file."""
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            rows = msgspec.convert(values.pop("rows", None), list[MeasuredStep] | None)
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(f"{path}: cannot read an engine model: {error}") from error
        known = {field.name for field in fields(EngineModel)}
        if unknown := sorted(values.keys() - known):
            raise DataError(
                f"{path}: unknown key {unknown[0]!r}; an engine model has {sorted(known)}"
            )
        if missing := sorted({"name", "kv_tokens"} - values.keys()):
            raise DataError(f"{path}: {missing[0]!r} is missing")
        model = msgspec.convert(values, EngineModel)
        return fit_engine(model, rows).model if rows else model


@dataclass(frozen=True, slots=True)
class EngineFit:
    """A model fitted to measured steps, with its relative errors."""

    model: EngineModel
    median_error: float
    worst_error: float
    rows: int


def fit_engine(model: EngineModel, rows: Sequence[MeasuredStep]) -> EngineFit:
    """Non-negative least squares of relative errors; sizes are taken from the given model."""
    if len(rows) < 3:
        raise DataError(
            f"{model.name}: {len(rows)} measured steps cannot fit an engine's speed: give 3 or more"
        )
    if bad := next((r for r in rows if r.seconds <= 0), None):
        raise DataError(f"{model.name}: a step cannot take {bad.seconds} s: {bad}")
    seconds = np.array([row.seconds for row in rows])
    columns = np.array([[1, r.batch, r.context, r.prefill, r.pairs] for r in rows], dtype=float)
    scale = np.maximum(columns.max(axis=0), 1.0)  # so that coefficients of all magnitudes count
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(rows)))
    coefficients = [float(x) for x in solution / scale]
    errors = np.abs(columns @ np.array(coefficients) / seconds - 1)
    names = ("step_s", "sequence_s", "context_s", "prefill_s", "pair_s")
    fitted = replace(
        model,
        **dict(zip(names, coefficients, strict=True)),  # type: ignore[arg-type]
        source=model.source or f"fitted to {len(rows)} measured steps",
    )
    return EngineFit(fitted, float(np.median(errors)), float(errors.max()), len(rows))


# --------------------------------------------------------------------------- from data sheets


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a dense transformer that decide memory and speed."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    heads: int
    bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token: a key and a value per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU: data-sheet figures and the shares of them that inference reaches."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    bandwidth_reached: float = 0.6
    flops_reached: float = 0.4


QWEN3_14B = Transformer(parameters=14.8e9, layers=40, kv_heads=8, head_dim=128, heads=40)
MI300X = Accelerator("MI300X", memory_bytes=192e9, bandwidth=5.3e12, flops=1.307e15)
H100 = Accelerator("H100", memory_bytes=80e9, bandwidth=3.35e12, flops=0.989e15)

OVERHEAD_BYTES = 6e9
"""Activations, communication buffers and captured graphs per GPU (an estimate)."""
OVERHEAD_S = 0.003
"""Per step: kernel launches, sampling, 2 x layers all-reduces of tensor parallelism (estimate)."""


def from_hardware(
    model: Transformer = QWEN3_14B,
    gpu: Accelerator = MI300X,
    *,
    tensor_parallel: int = 4,
    memory_share: float = 0.9,
    max_sequences: int = 1024,
    block_tokens: int = 16,
) -> EngineModel:
    """An engine model from data sheets: KV capacity from memory, speed from the roofline.

    KV tokens = tp * (memory * share - weights / tp - overhead) / bytes per token. A step reads all
    weights once; a decoded token reads its context's KV and costs 2 FLOPs per parameter; a prompt
    token costs the same FLOPs, and attention 4 * heads * head_dim FLOPs per layer and pair.
    """
    weights = model.parameters * model.bytes
    kv_bytes = (
        tensor_parallel * (gpu.memory_bytes * memory_share - OVERHEAD_BYTES)
        - model.parameters * model.bytes
    )
    bandwidth = tensor_parallel * gpu.bandwidth * gpu.bandwidth_reached
    flops = tensor_parallel * gpu.flops * gpu.flops_reached
    kv_tokens = int(kv_bytes / model.kv_bytes) // block_tokens * block_tokens
    return EngineModel(
        name=f"{tensor_parallel}x{gpu.name}@{memory_share:g}",
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
        max_sequences=max_sequences,
        step_s=OVERHEAD_S + weights / bandwidth,
        sequence_s=2 * model.parameters / flops,
        context_s=model.kv_bytes / bandwidth,
        prefill_s=2 * model.parameters / flops,
        pair_s=4 * model.heads * model.head_dim * model.layers / flops,
        source=f"data sheet of {gpu.name}, {memory_share:.0%} of its memory, TP {tensor_parallel}",
    )

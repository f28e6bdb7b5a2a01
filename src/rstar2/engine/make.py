"""Creates the engines of a recipe, not yet started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rstar2.config import Recipe
from rstar2.engine.base import Engine
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.errors import RecipeError

MemoryShare = Callable[[float], float]
"""Memory of a GPU in GB -> the share of it that engines may take beside the learner."""
WHOLE_GPU = 0.9
"""Share of a GPU that holds nothing else; the rest is for activations and fragmentation."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU that this process may use."""

    name: str
    """Its entry in CUDA_VISIBLE_DEVICES."""
    memory_gb: float


def make_engines(
    recipe: Recipe, model_dir: Path | str, beside: MemoryShare | None = None
) -> list[Engine]:
    """`engine.count` engines, or one per entry of `engine.urls`.

    `beside` gives the share of a GPU's memory that the learner leaves; None: there is no learner.
    """
    if recipe.engine.kind == "vllm":
        return vllm_engines(recipe, model_dir, beside)
    if recipe.engine.kind != "embedded":
        raise RecipeError(
            f"engine.kind={recipe.engine.kind} cannot receive weights: use embedded or vllm"
        )
    names = [f"embedded-{index}" for index in range(recipe.engine.count)]
    return [embedded_engine(name, recipe, model_dir) for name in names]


def embedded_engine(name: str, recipe: Recipe, model_dir: Path | str) -> EmbeddedEngine:
    """One embedded engine of a recipe."""
    return EmbeddedEngine(
        model_dir,
        kv_tokens=recipe.engine.kv_tokens,
        max_sequences=recipe.engine.max_sequences,
        max_length=recipe.model.max_length,
        name=name,
        dtype=recipe.model.dtype,
        int8=recipe.engine.quantization == "int8",
    )


def vllm_engines(
    recipe: Recipe, model_dir: Path | str, beside: MemoryShare | None = None
) -> list[Engine]:
    """vLLM engines: the servers at `engine.urls`, or `engine.count` servers started here."""
    from rstar2.engine.vllm import VllmEngine
    from rstar2.engine.vllm_nccl import NcclTransfer

    config = recipe.engine

    def transfer() -> NcclTransfer | None:
        return NcclTransfer(recipe.model.dtype) if config.weight_transfer == "nccl" else None

    if config.urls:
        return [
            VllmEngine(
                f"vllm-{index}",
                url=url,
                max_sequences=config.max_sequences,
                max_length=recipe.model.max_length,
                transfer=transfer(),
                seeded=config.seeded,
            )
            for index, url in enumerate(config.urls)
        ]
    return [
        VllmEngine(
            f"vllm-{index}",
            server=server_settings(recipe, model_dir, index, gpus_here(), beside),
            transfer=transfer(),
            seeded=config.seeded,
        )
        for index in range(config.count)
    ]


def server_settings(
    recipe: Recipe,
    model_dir: Path | str,
    index: int,
    gpus: Sequence[GpuDevice],
    beside: MemoryShare | None = None,
) -> ServerSettings:
    """Settings of server number `index` on a machine with these GPUs, or on a CPU without any."""
    config = recipe.engine
    by_adapter = config.lora == "adapter"
    environment: dict[str, str] = {}
    share = config.gpu_memory_share
    if gpus:
        places = [placed(i, len(gpus)) for i in range(config.count)]
        gpu = gpus[places[index]]
        if len(gpus) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = gpu.name
        if share is None:
            shared = beside is not None and places[index] < recipe.learner.ranks
            whole = beside(gpu.memory_gb) if shared and beside is not None else WHOLE_GPU
            share = whole / places.count(places[index])
    return ServerSettings(
        model=str(model_dir),
        kv_tokens=None if gpus else config.kv_tokens,
        max_sequences=config.max_sequences,
        max_length=recipe.model.max_length,
        dtype=recipe.model.dtype,
        weight_backend="nccl" if config.weight_transfer == "nccl" else None,
        lora_rank=recipe.learner.lora.rank if by_adapter and recipe.learner.lora else None,
        sleep_mode=config.sleep and bool(gpus) and beside is not None,  # vLLM on CPUs cannot
        memory_share=share if gpus else None,
        arguments=config.arguments,
        environment=environment,
    )


def placed(index: int, gpus: int) -> int:
    """Number of the GPU of a server: round-robin, the learner's GPU 0 last (untested)."""
    return (index + 1) % gpus


def gpus_here() -> tuple[GpuDevice, ...]:
    """The GPUs that this process may use."""
    import torch

    count = torch.cuda.device_count()
    names = device_names(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    sizes = [torch.cuda.get_device_properties(i).total_memory / 1e9 for i in range(count)]
    return tuple(GpuDevice(name, size) for name, size in zip(names, sizes, strict=True))


def device_names(count: int, visible: str | None) -> list[str]:
    """Names of the visible GPUs for CUDA_VISIBLE_DEVICES: the user's own, also UUIDs."""
    listed = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return (listed or [str(number) for number in range(count)])[:count]

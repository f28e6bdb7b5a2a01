"""Creates the engines of a recipe, not yet started."""

from __future__ import annotations

from pathlib import Path

from rstar2.config import Recipe
from rstar2.engine.base import Engine
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.errors import RecipeError


def make_engines(recipe: Recipe, model_dir: Path | str) -> list[Engine]:
    """`engine.count` engines, or one per entry of `engine.urls`."""
    if recipe.engine.kind == "vllm":
        return vllm_engines(recipe, model_dir)
    if recipe.engine.kind != "embedded":
        raise RecipeError(
            f"engine.kind={recipe.engine.kind} cannot receive weights: use embedded or vllm"
        )
    return [
        EmbeddedEngine(
            model_dir,
            kv_tokens=recipe.engine.kv_tokens,
            max_sequences=recipe.engine.max_sequences,
            max_length=recipe.model.max_length,
            name=f"embedded-{index}",
        )
        for index in range(recipe.engine.count)
    ]


def vllm_engines(recipe: Recipe, model_dir: Path | str) -> list[Engine]:
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
            )
            for index, url in enumerate(config.urls)
        ]
    return [
        VllmEngine(
            f"vllm-{index}",
            server=server_settings(recipe, model_dir, index),
            transfer=transfer(),
        )
        for index in range(config.count)
    ]


def server_settings(recipe: Recipe, model_dir: Path | str, index: int) -> ServerSettings:
    """Settings of server number `index` on this machine, with or without GPUs.

    Several GPUs are assigned round-robin, the learner's GPU 0 last (untested).
    """
    import torch

    config = recipe.engine
    gpus = torch.cuda.device_count()
    return ServerSettings(
        model=str(model_dir),
        kv_tokens=None if gpus else config.kv_tokens,
        max_sequences=config.max_sequences,
        max_length=recipe.model.max_length,
        dtype=recipe.model.dtype,
        weight_backend="nccl" if config.weight_transfer == "nccl" else None,
        arguments=config.arguments,
        environment={"CUDA_VISIBLE_DEVICES": str((index + 1) % gpus)} if gpus > 1 else {},
    )

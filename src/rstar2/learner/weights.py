"""Publishing weights: to engines (each proven by a probe) and to disk, as a model directory.

Invariant 7: after an update no engine serves before its logprobs of a probe match the learner's.
`publish` returns only when every engine has the new version and agrees; otherwise it raises
WeightUpdateError, which names the engines and by how much they differ. Running requests
are held from the update to the proof, so no token is sampled under weights that were not proven.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from rstar2.engine.base import Engine, WeightUpdate
from rstar2.errors import WeightUpdateError
from rstar2.files import replacing_directory
from rstar2.types import WeightVersion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")

PROBE_TOLERANCE = 1e-3
"""Largest difference of a probe token's logprob, float32 on both sides."""
COARSE_TOLERANCE = 0.3
"""The same for a bfloat16 engine: an estimate, not measured."""

FAST_DIRECTORY = Path("/dev/shm")
"""Where weight files go if they fit; else the usual temporary directory."""


def probe_tolerance(dtype: str) -> float:
    """Largest allowed logprob difference of an engine of this number format."""
    return PROBE_TOLERANCE if dtype == "float32" else COARSE_TOLERANCE


class WeightSource(Protocol):
    """What publishing needs of a learner (one rank or a group of ranks)."""

    def state(self) -> dict[str, Tensor]: ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]: ...

    def export(
        self, path: str | Path, tokenizer: Any | None = None, stop_ids: Sequence[int] = ()
    ) -> None: ...

    def export_adapter(self, path: str | Path) -> None: ...


class InThread(Protocol):
    """Runs a blocking call in a thread, as `asyncio.to_thread` does."""

    def __call__(
        self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...


async def publish(
    learner: WeightSource,
    engines: Sequence[Engine],
    version: WeightVersion,
    probe_ids: Sequence[int],
    *,
    shared: Path | None = None,
    tolerance: float = PROBE_TOLERANCE,
    deadline_s: float = 600.0,
    in_thread: InThread = asyncio.to_thread,
) -> dict[str, float]:
    """Give all engines the learner's weights as `version` and prove each; returns metrics.

    Engines with `weight_transfer = "files"` get a safetensors directory, all others the tensors.
    `shared` is a directory that engines on other machines can read; without it all engines are on
    this machine. `in_thread` runs the learner's blocking calls.
    """
    started = time.monotonic()
    by_files = [e for e in engines if e.weight_transfer == "files"]
    by_adapter = [e for e in engines if e.weight_transfer == "adapter"]
    by_memory = [e for e in engines if e.weight_transfer == "memory"]
    expected = (await in_thread(learner.logprobs, [list(probe_ids)]))[0]

    async def send(update: WeightUpdate, targets: Sequence[Engine]) -> None:
        await asyncio.gather(*(_update(e, update, deadline_s) for e in targets))

    size = 0
    if by_memory or (by_files and shared is None):
        state = await in_thread(learner.state)
        size = sum({value.data_ptr(): value.nbytes for value in state.values()}.values())
        await send(WeightUpdate(version, state=state, hold=True), by_memory)
    if by_files:
        with _directory_for(size, shared) as directory:
            await in_thread(learner.export, directory / "model")
            size = sum(file.stat().st_size for file in directory.rglob("*.safetensors"))
            await send(WeightUpdate(version, path=directory / "model", hold=True), by_files)
    if by_adapter:
        with _directory_for(size, shared) as directory:
            await in_thread(learner.export_adapter, directory / "adapter")
            size += sum(file.stat().st_size for file in directory.rglob("*.safetensors"))
            await send(WeightUpdate(version, path=directory / "adapter", hold=True), by_adapter)
    gaps = await asyncio.gather(
        *(_prove(e, version, probe_ids, expected, deadline_s) for e in engines)
    )
    wrong = [
        f"{e.name} by {gap:.3g}"
        for e, gap in zip(engines, gaps, strict=True)
        if not gap <= tolerance
    ]
    if wrong:
        raise WeightUpdateError(
            f"version {version}: logprobs of the probe differ from the learner's beyond "
            f"{tolerance:g}: {', '.join(wrong)}"
        )
    await asyncio.gather(*(e.resume() for e in engines))
    return {
        "weights/version": float(version),
        "weights/megabytes": size / 1e6,
        "weights/probe_gap": max(gaps, default=0.0),
        "time/weights": time.monotonic() - started,
    }


async def _update(engine: Engine, update: WeightUpdate, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await engine.update_weights(update)
    except TimeoutError as error:
        raise WeightUpdateError(
            f"{engine.name} did not take version {update.version} within {deadline_s:g} s"
        ) from error


async def _prove(
    engine: Engine,
    version: WeightVersion,
    probe_ids: Sequence[int],
    expected: Sequence[float],
    deadline_s: float,
) -> float:
    """Largest difference between an engine's logprobs of the probe and the learner's."""
    try:
        async with asyncio.timeout(deadline_s):
            load = await engine.load()
            scores = await engine.score(probe_ids)
    except TimeoutError as error:
        raise WeightUpdateError(
            f"{engine.name} did not answer the probe within {deadline_s:g} s"
        ) from error
    if load.version != version:
        raise WeightUpdateError(f"{engine.name} serves version {load.version}, not {version}")
    if len(scores) != len(expected):
        raise WeightUpdateError(
            f"{engine.name} scored {len(scores)} tokens of the probe, not {len(expected)}"
        )
    return max((abs(a - b) for a, b in zip(scores, expected, strict=True)), default=0.0)


@contextmanager
def _directory_for(size: int, shared: Path | None) -> Iterator[Path]:
    """A temporary directory: where all machines see it, or in memory if twice the weights fit."""
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    elif FAST_DIRECTORY.is_dir() and shutil.disk_usage(FAST_DIRECTORY).free > 2 * size:
        shared = FAST_DIRECTORY
    with tempfile.TemporaryDirectory(prefix="rstar2-weights-", dir=shared) as name:
        yield Path(name)


def export(
    state: dict[str, Tensor],
    model: PreTrainedModel,
    path: Path,
    dtype: torch.dtype,
    tokenizer: Any | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write safetensors, config and, if given, the tokenizer with its chat template, atomically.

    `stop_ids` become the tokens that end a generation.
    """
    from huggingface_hub import save_torch_state_dict

    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    with replacing_directory(path) as temporary:
        narrow = {name: value.to(dtype) for name, value in _untied(state).items()}
        save_torch_state_dict(narrow, temporary, max_shard_size="5GB", metadata={"format": "pt"})
        config.save_pretrained(temporary)
        if model.can_generate():
            model.generation_config.save_pretrained(temporary)
        if stop_ids:
            write_generation_config(temporary, stop_ids)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _share(temporary)


def write_generation_config(directory: Path, stop_ids: Sequence[int]) -> None:
    """Make every one of these tokens end a generation of the model in a directory."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings.pop("_from_model_config", None)  # it lets transformers replace the file's values
    settings["eos_token_id"] = list(stop_ids)
    GenerationConfig.from_dict(settings).save_pretrained(directory)


def _share(directory: Path) -> None:
    """Give all files the mode that new files have here: safetensors makes its own private."""
    mode = (directory / "config.json").stat().st_mode
    for file in directory.iterdir():
        file.chmod(mode & 0o777)


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name: loading ties the others again."""
    seen: set[int] = set()
    return {
        name: value
        for name, value in state.items()
        if not (value.data_ptr() in seen or seen.add(value.data_ptr()))  # type: ignore[func-returns-value]
    }

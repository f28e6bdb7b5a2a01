"""Publishing weights: to engines, each proven, and to disk as a model directory.

Invariant 7: after an update no engine serves before two proofs.
- Its checksums: it holds the learner's weights, to the last bit of every tensor, in its own number
  format (`engine.checksums`). Weights of one optimizer step earlier are refused, in bfloat16 too.
- The probe: its logprobs of a fixed text match the learner's within a tolerance. So an engine that
  holds the right tensors but computes with others is refused.

`publish` returns the engines that were proven and, by name, why the others were not: they died, did
not answer in time, could not be reached from this machine for a minute, or have wrong weights. The
caller continues with the former and ends the latter. If none is proven and one has wrong weights,
WeightUpdateError names the engines and how they differ. Running requests are held from the update
to the proof, so no token is sampled under weights that were not proven.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rstar2.engine.base import Engine, WeightUpdate
from rstar2.engine.checksums import add, bit_sum, differing, fused_name
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, WeightUpdateError
from rstar2.files import replacing_directory
from rstar2.http_client import LocalResourceError, despite_local_errors
from rstar2.learner.tolerance import PROBE_TOLERANCE
from rstar2.tasks import all_but_stragglers, cancel_all
from rstar2.types import WeightVersion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transformers import PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")

STRAGGLER_S = 60.0
"""Once half of the engines are proven, the others have at least this much longer."""

OF_AN_ENGINE = EngineError, DeadlineError, WeightUpdateError, LocalResourceError
"""What may become of one engine's update; other errors are the learner's."""

SHOWN_TENSORS = 3

SHARD_BYTES = 5 * 10**9
"""Largest safetensors file of an export, unless one tensor is larger."""

FAST_DIRECTORY = Path("/dev/shm")
"""Where weight files go if they fit; else the usual temporary directory."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of a weight update."""

    metrics: dict[str, float]
    proven: tuple[Engine, ...]
    lost: Mapping[str, InfrastructureError]
    """Why the other engines were not proven, by name."""


class WeightSource(Protocol):
    """What publishing needs of a learner (one rank or a group of ranks)."""

    def state(self) -> dict[str, Tensor]: ...

    def weight_sums(self, dtype: str, exported: bool) -> dict[str, int]: ...

    def export_bytes(self) -> int: ...

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


Write = Callable[[Path], Awaitable[None]]
"""Writes an export as a directory, on the machine of the learner's rank 0."""


class Spread(Protocol):
    """Has an export written and brings it to engines: a path for each that it has reached."""

    def __call__(
        self, write: Write, size: int, engines: Sequence[Engine]
    ) -> AbstractAsyncContextManager[Mapping[str, Path]]: ...


async def publish(
    learner: WeightSource,
    engines: Sequence[Engine],
    version: WeightVersion,
    probe_ids: Sequence[int],
    *,
    spread: Spread | None = None,
    tolerance: float = PROBE_TOLERANCE,
    deadline_s: float = 600.0,
    straggler_s: float = STRAGGLER_S,
    in_thread: InThread = asyncio.to_thread,
) -> Publication:
    """Give engines the learner's weights as `version` and prove each.

    Engines with `weight_transfer = "files"` get a safetensors directory, all others the tensors.
    `spread` brings the directory to engines on other machines; without it all engines are on this
    machine. `in_thread` runs the learner's blocking calls.
    """
    started = time.monotonic()
    by_files = [e for e in engines if e.weight_transfer == "files"]
    by_adapter = [e for e in engines if e.weight_transfer == "adapter"]
    by_memory = [e for e in engines if e.weight_transfer == "memory"]
    expected = (await in_thread(learner.logprobs, [list(probe_ids)]))[0]
    proof = _Proof(learner, probe_ids, expected, tolerance, in_thread)
    outcomes: dict[str, float | InfrastructureError] = {}

    async def send(updates: Mapping[str, WeightUpdate], targets: Sequence[Engine]) -> None:
        tasks = {
            e.name: asyncio.ensure_future(proof.install(e, updates[e.name]))
            for e in targets
            if e.name in updates
        }
        outcomes.update(await _outcomes(tasks, deadline_s, straggler_s))

    async def write(path: Path) -> None:
        await in_thread(learner.export, path)

    size = 0
    if by_memory:
        state = await in_thread(learner.state)
        size = sum({value.data_ptr(): value.nbytes for value in state.values()}.values())
        update = WeightUpdate(version, state=state, hold=True)
        await send({e.name: update for e in by_memory}, by_memory)
    if by_files:
        size = await in_thread(learner.export_bytes)
        async with (spread or on_this_machine)(write, size, by_files) as paths:
            updates = {
                name: WeightUpdate(version, path=path, hold=True) for name, path in paths.items()
            }
            await send(updates, by_files)
        for engine in by_files:
            missing = EngineError(f"{engine.name}: the weights did not reach its node")
            outcomes.setdefault(engine.name, missing)
    if by_adapter:
        with _directory_for(size) as directory:
            await in_thread(learner.export_adapter, directory / "adapter")
            size += sum(file.stat().st_size for file in directory.rglob("*.safetensors"))
            update = WeightUpdate(version, path=directory / "adapter", hold=True)
            await send({e.name: update for e in by_adapter}, by_adapter)
    wrong = [str(o) for o in outcomes.values() if isinstance(o, WeightUpdateError)]
    gaps = [o for o in outcomes.values() if isinstance(o, float)]
    if wrong and not gaps:
        raise WeightUpdateError(f"version {version}: {'; '.join(wrong)}")
    return Publication(
        {
            "weights/version": float(version),
            "weights/megabytes": size / 1e6,
            "weights/probe_gap": max(gaps, default=0.0),
            "time/weights": time.monotonic() - started,
        },
        tuple(e for e in engines if isinstance(outcomes[e.name], float)),
        {name: o for name, o in outcomes.items() if isinstance(o, InfrastructureError)},
    )


async def _outcomes(
    tasks: Mapping[str, asyncio.Task[float]], deadline_s: float, straggler_s: float
) -> dict[str, float | InfrastructureError]:
    """What each engine's update came to; one that is much slower than half of them is given up."""
    started = time.monotonic()
    try:
        await all_but_stragglers(tasks.values(), within_s=deadline_s, straggler_s=straggler_s)
    finally:
        await cancel_all(tasks.values())
    waited = time.monotonic() - started
    outcomes: dict[str, float | InfrastructureError] = {}
    for name, task in tasks.items():
        error = DeadlineError(f"{name} had not taken the weights after {waited:.0f} s")
        failure = error if task.cancelled() else task.exception()
        if failure is None:
            outcomes[name] = task.result()
        elif isinstance(failure, OF_AN_ENGINE):
            outcomes[name] = failure
        else:
            raise failure
    return outcomes


class _Proof:
    """What the learner says of its weights, for the proof of every engine."""

    def __init__(
        self,
        learner: WeightSource,
        probe_ids: Sequence[int],
        expected: Sequence[float],
        tolerance: float,
        in_thread: InThread,
    ) -> None:
        self._learner, self._in_thread = learner, in_thread
        self._probe_ids, self._expected, self._tolerance = probe_ids, expected, tolerance
        self._sums: dict[tuple[str, bool], dict[str, int]] = {}
        self._summing = asyncio.Lock()

    async def install(self, engine: Engine, update: WeightUpdate) -> float:
        """Update an engine, prove it and let it continue; the gap of its probe."""
        await despite_local_errors(lambda: engine.update_weights(update))
        load = await despite_local_errors(engine.load)
        if load.version != update.version:
            raise WeightUpdateError(
                f"{engine.name} serves version {load.version}, not {update.version}"
            )
        if engine.weight_transfer != "adapter":  # its own weights never change: see `lora.rehearse`
            await self._check_sums(engine, exported=update.path is not None)
        gap = await self._probe(engine)
        await despite_local_errors(engine.resume)
        return gap

    async def _check_sums(self, engine: Engine, *, exported: bool) -> None:
        held = await despite_local_errors(engine.held_weights)
        key = held.dtype, exported
        async with self._summing:
            if key not in self._sums:
                self._sums[key] = await self._in_thread(self._learner.weight_sums, *key)
        wrong = differing(self._sums[key], held.sums)
        if wrong:
            shown = ", ".join(wrong[:SHOWN_TENSORS]) + (", ..." if wrong[SHOWN_TENSORS:] else "")
            raise WeightUpdateError(
                f"{engine.name} holds other weights than the learner: the checksums of "
                f"{len(wrong)} of {len(held.sums)} tensors differ ({shown})"
            )

    async def _probe(self, engine: Engine) -> float:
        """Largest difference between an engine's logprobs of the probe and the learner's."""
        scores = await despite_local_errors(lambda: engine.score(self._probe_ids))
        if len(scores) != len(self._expected):
            raise WeightUpdateError(
                f"{engine.name} scored {len(scores)} tokens of the probe, not {len(self._expected)}"
            )
        pairs = zip(scores, self._expected, strict=True)
        gap = max((abs(a - b) for a, b in pairs), default=0.0)
        if not gap <= self._tolerance:
            raise WeightUpdateError(
                f"logprobs of the probe differ from the learner's by {gap:.3g}, beyond "
                f"{self._tolerance:g}: {engine.name}"
            )
        return gap


@asynccontextmanager
async def on_this_machine(
    write: Write, size: int, engines: Sequence[Engine]
) -> AsyncIterator[Mapping[str, Path]]:
    """One directory for all engines."""
    with _directory_for(size) as directory:
        await write(directory / "model")
        yield {engine.name: directory / "model" for engine in engines}


@contextmanager
def _directory_for(size: int) -> Iterator[Path]:
    """A temporary directory, in memory if twice the weights fit."""
    fits = FAST_DIRECTORY.is_dir() and shutil.disk_usage(FAST_DIRECTORY).free > 2 * size
    parent = FAST_DIRECTORY if fits else None
    with tempfile.TemporaryDirectory(prefix="rstar2-weights-", dir=parent) as name:
        yield Path(name)


def export(
    tensors: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    path: Path,
    dtype: torch.dtype,
    tokenizer: Any | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write safetensors, config and, if given, the tokenizer with its chat template, atomically.

    Each of `tensors` has `dtype`; tied ones come once. `stop_ids` become the tokens that end a
    generation.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    with replacing_directory(path) as temporary:
        write_safetensors(tensors, temporary)
        config.save_pretrained(temporary)
        if model.can_generate():
            model.generation_config.save_pretrained(temporary)
        if stop_ids:
            write_generation_config(temporary, stop_ids)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _share(temporary)


def write_safetensors(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as they come: `model.safetensors`, or several files with an index.

    At most one file's tensors are held at a time.
    """
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        save_file(held, directory / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        file = file if len(parts) > 1 else "model.safetensors"
        (directory / f"part-{index}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index_file, indent=2, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


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


def shard_sums(named: Mapping[str, Tensor], casts: Sequence[torch.dtype]) -> dict[str, int]:
    """Checksums of parameters after casts; the ranks add up those of their shards."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sums = [
        bit_sum(value.to_local(), casts)
        if isinstance(value, DTensor)
        else bit_sum(value, casts) * (rank == 0)
        for value in named.values()
    ]
    total = torch.stack(sums)
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.SUM)
    fused: dict[str, int] = {}
    for name, value in zip(named, total.tolist(), strict=True):
        add(fused, fused_name(name), value)
    return fused


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name: loading ties the others again."""
    seen: set[int] = set()
    return {
        name: value
        for name, value in state.items()
        if not (value.data_ptr() in seen or seen.add(value.data_ptr()))  # type: ignore[func-returns-value]
    }

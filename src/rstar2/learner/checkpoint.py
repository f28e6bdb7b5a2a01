"""Checkpoints of the learner: whole or absent, a bounded number, restorable onto any ranks.

    step-00000012/
      state/        weights and optimizer moments by name (torch.distributed.checkpoint)
      meta.json     written last: format, model, optimizer and its step, RNG, the caller's state,
                    and the size of every file of state/

Invariants: a directory gets its name by one rename after all of its bytes are on disk, so a
process killed while writing leaves the previous checkpoint as the latest; what it left behind is
removed by the next save. A checkpoint whose files are missing or short is *torn*: skipped with a
warning. One that this code did not write, or of another model, is *foreign*: an error by name.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rstar2.config import OptimizerConfig
from rstar2.errors import CheckpointError
from rstar2.files import remove_unfinished, replacing_directory

if TYPE_CHECKING:
    from rstar2.learner.learner import Learner

FORMAT = "rstar2-checkpoint"
VERSION = 1
META = "meta.json"
STATE = "state"

logger = logging.getLogger("rstar2.checkpoint")


class TornError(CheckpointError):
    """A checkpoint that was not written to its end, or lost bytes since."""


class Saveable(Protocol):
    """What the store needs of a learner (one rank or a group of them)."""

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint: its step, where it is, and the caller's state."""

    step: int
    path: Path
    state: dict[str, Any]


class CheckpointStore:
    """The last `keep` checkpoints of a run, in one directory."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        self.directory, self.keep = Path(directory), keep

    def save(self, step: int, learner: Saveable, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove the oldest ones beyond `keep`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:08d}"
        learner.save(path, {"step": step, "state": state})
        for old in self._paths()[: -self.keep]:
            shutil.rmtree(old)
        return path

    def latest(self) -> Saved | None:
        """The newest complete checkpoint; torn ones are skipped with a warning."""
        for path in reversed(self._paths()):
            try:
                extra = read_meta(path)["extra"]
            except TornError as error:
                logger.warning("%s; the previous checkpoint is used", error)
                continue
            return Saved(int(extra["step"]), path, extra["state"])
        return None

    def _paths(self) -> list[Path]:
        """Checkpoints by step, oldest first."""
        return sorted(self.directory.glob("step-*")) if self.directory.is_dir() else []


# --------------------------------------------------------------------------- one checkpoint


def save(path: Path, learner: Learner, extra: dict[str, Any]) -> None:
    """Write a checkpoint; called by every rank."""
    if learner.rank == 0:
        remove_unfinished(path.parent)
    with replacing_directory(path) if learner.rank == 0 else nullcontext() as temporary:
        directory = _told_by_rank_0(temporary)
        with _one_process_is_meant():
            dcp.save(_tensors(learner), checkpoint_id=directory / STATE)
        if learner.rank == 0:
            meta = json.dumps(_meta(learner, directory, extra), indent=1)
            (directory / META).write_text(meta, encoding="utf-8")
    _told_by_rank_0(path)  # all ranks leave when the rename is done


def load(path: Path, learner: Learner) -> dict[str, Any]:
    """Restore a learner in place; called by every rank. Returns the caller's `extra`."""
    meta = read_meta(path)
    found = {name: list(p.shape) for name, p in learner._named().items()}
    if meta["model"] != found:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {_difference(meta['model'], found)}"
        )
    learner.reset_optimizer(OptimizerConfig(**meta["optimizer"]), meta["total_steps"])
    if meta["reference"]:
        learner._reference = {n: torch.empty_like(p) for n, p in learner._named().items()}
    try:
        with _one_process_is_meant():
            dcp.load(_tensors(learner), checkpoint_id=path / STATE)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise TornError(f"{path} cannot be read: {error}") from error
    learner._optimizers.steps = meta["optimizer_steps"]
    torch.set_rng_state(_from_base64(meta["rng"]["torch"]))
    version, internal, gauss = meta["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    extra: dict[str, Any] = meta["extra"]
    return extra


def read_meta(path: Path) -> dict[str, Any]:
    """The description of a complete checkpoint of this format; TornError if it is not complete."""
    try:
        meta = json.loads((path / META).read_bytes())
    except FileNotFoundError as error:
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint at {path}") from error
        raise TornError(f"{path} is torn: it has no {META}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TornError(f"{path} is torn: {META} is not JSON ({error})") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by rstar2; move it out of the way")
    if meta.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {meta.get('version')}, this rstar2 reads {VERSION}"
        )
    for name, size in meta["files"].items():
        part = path / STATE / name
        actual = part.stat().st_size if part.is_file() else -1
        if actual != size:
            raise TornError(
                f"{path} is torn: {name} has {actual} bytes instead of {size}"
                if actual >= 0
                else f"{path} is torn: {name} is missing"
            )
    return meta


def _meta(learner: Learner, aside: Path, extra: dict[str, Any]) -> dict[str, Any]:
    optimizers = learner._optimizers
    return {
        "format": FORMAT,
        "version": VERSION,
        "extra": extra,
        "optimizer": optimizers.config.model_dump(mode="json"),
        "optimizer_steps": optimizers.steps,
        "total_steps": optimizers.total_steps,
        "reference": learner._reference is not None,
        "ranks": learner.ranks,
        "rng": {"torch": _to_base64(torch.get_rng_state()), "python": random.getstate()},
        "files": {part.name: part.stat().st_size for part in sorted((aside / STATE).iterdir())},
        "model": {name: list(p.shape) for name, p in learner._named().items()},
    }


def _tensors(learner: Learner) -> dict[str, Any]:
    """Everything that is restored in place, by name."""
    tensors: dict[str, Any] = {f"model.{n}": p.detach() for n, p in learner._named().items()}
    tensors |= {f"optimizer.{name}": value for name, value in learner._optimizers.state().items()}
    for name, value in (learner._reference or {}).items():
        tensors[f"reference.{name}"] = value
    return tensors


def _difference(saved: dict[str, list[int]], found: dict[str, list[int]]) -> str:
    """The first parameter that tells two models apart."""
    for name in sorted(saved.keys() | found.keys()):
        if saved.get(name) != found.get(name):
            return f"{name} is {saved.get(name)} there and {found.get(name)} here"
    return "the order of its parameters differs"


# --------------------------------------------------------------------------- files


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it takes one process to be meant; it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _told_by_rank_0(path: Path | None) -> Path:
    """Rank 0's path on every rank: nobody goes on before rank 0 is here."""
    told: list[Any] = [str(path)]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return Path(told[0])


def _to_base64(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_base64(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

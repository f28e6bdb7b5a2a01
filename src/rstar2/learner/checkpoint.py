"""Checkpoints of the learner: complete or absent, bounded in number, for any number of ranks.

    step-00000012/
      state/        weights and optimizer moments by name (torch.distributed.checkpoint)
      meta.json     written last: format, model, optimizer and its step, RNG, the caller's state,
                    and the size and checksum of every file of state/

Invariants: a directory gets its name by one rename after all of its bytes are on disk, so the
previous checkpoint stays the latest if a process is killed while writing; the next save removes the
leftover. A checkpoint whose files are missing, short or changed is *torn*: the one before it is
used, with a warning, and if all are torn CheckpointError is raised. One that this code did not
write, or that belongs to another model, raises CheckpointError.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from rstar2.errors import CheckpointError
from rstar2.files import remove_unfinished, replacing_directory

FORMAT = "rstar2-checkpoint"
VERSION = 1
META = "meta.json"
STATE = "state"

logger = logging.getLogger("rstar2.checkpoint")


class TornError(CheckpointError):
    """A checkpoint that was not written completely, or that has lost bytes since."""


class Checkpointable(Protocol):
    """What one rank of a learner offers to `save` and `load`."""

    rank: int

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Shapes by parameter name: they identify the model."""
        ...

    def checkpoint_facts(self) -> dict[str, Any]:
        """Everything besides tensors that must be restored, as plain values."""
        ...

    def checkpoint_tensors(self) -> dict[str, Any]:
        """Live tensors by name; a checkpoint is loaded into them in place."""
        ...

    def prepare_restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts and allocate every tensor that the checkpoint has."""
        ...


class Saveable(Protocol):
    """What the store needs of a learner (one rank or a group of ranks)."""

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its step, its path and the caller's state."""

    step: int
    path: Path
    state: dict[str, Any]
    torn: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which are not used."""


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

    def latest(self, damaged: Collection[Path] = ()) -> SavedCheckpoint | None:
        """The newest complete checkpoint that is not among the `damaged` ones; None if none exists.

        Torn ones are skipped with a warning. CheckpointError if nothing else is left: a run must
        not start again at its first step because its checkpoints were lost.
        """
        paths, torn = self._paths(), [f"{path.name} cannot be read" for path in damaged]
        for path in reversed([p for p in paths if p not in damaged]):
            try:
                meta = read_meta(path)
                check_contents(path, meta)
            except TornError as error:
                logger.warning("%s; the previous checkpoint is used", error)
                torn.append(str(error))
                continue
            extra = meta["extra"]
            return SavedCheckpoint(int(extra["step"]), path, extra["state"], tuple(torn))
        if torn:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used ({'; '.join(torn)}): put one back "
                "from a copy, or start the run again with --fresh"
            )
        return None

    def _paths(self) -> list[Path]:
        """Checkpoints by step, oldest first."""
        return sorted(self.directory.glob("step-*")) if self.directory.is_dir() else []


# --------------------------------------------------------------------------- one checkpoint


def save(path: Path, learner: Checkpointable, extra: dict[str, Any]) -> None:
    """Write a checkpoint; called by every rank."""
    if learner.rank == 0:
        remove_unfinished(path.parent)
    with replacing_directory(path) if learner.rank == 0 else nullcontext() as temporary:
        directory = _path_of_rank_0(temporary)
        with _without_process_group_warning():
            try:
                state_dict_saver.save(learner.checkpoint_tensors(), checkpoint_id=directory / STATE)
            except CheckpointException as error:  # a BaseException with a traceback as its text
                failures = [failure for failure, _ in error.failures.values()]
                raise RuntimeError(f"{path} could not be written: {failures[0]!r}") from failures[0]
        if learner.rank == 0:
            meta = json.dumps(_meta(learner, directory, extra), indent=1)
            write_meta(directory / META, meta)
    _path_of_rank_0(path)  # all ranks return after the rename


def load(path: Path, learner: Checkpointable) -> dict[str, Any]:
    """Restore a learner in place; called by every rank. Returns the caller's `extra`."""
    meta = read_meta(path)
    shapes = learner.parameter_shapes()
    if meta["model"] != shapes:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {_difference(meta['model'], shapes)}"
        )
    learner.prepare_restore(meta)
    try:
        with _without_process_group_warning():
            state_dict_loader.load(learner.checkpoint_tensors(), checkpoint_id=path / STATE)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise TornError(f"{path} cannot be read: {error}") from error
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


def check_contents(path: Path, meta: Mapping[str, Any]) -> None:
    """Compare every file with its checksum; TornError names the first that has changed.

    Checkpoints of earlier versions have no checksums.
    """
    for name, expected in meta.get("checksums", {}).items():
        if checksum(path / STATE / name) != expected:
            raise TornError(f"{path} is torn: the contents of {name} have changed")


def checksum(path: Path) -> int:
    """CRC-32 of a file: it detects damage, not forgery, and takes less time than writing it."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _meta(learner: Checkpointable, directory: Path, extra: dict[str, Any]) -> dict[str, Any]:
    parts = sorted((directory / STATE).iterdir())
    return {
        "format": FORMAT,
        "version": VERSION,
        "extra": extra,
        **learner.checkpoint_facts(),
        "rng": {"torch": _to_base64(torch.get_rng_state()), "python": random.getstate()},
        "files": {part.name: part.stat().st_size for part in parts},
        "checksums": {part.name: checksum(part) for part in parts},
        "model": learner.parameter_shapes(),
    }


def write_meta(path: Path, text: str) -> None:
    """Write the description of a checkpoint, its last file."""
    path.write_text(text, encoding="utf-8")


def _difference(saved: Mapping[str, list[int]], shapes: Mapping[str, list[int]]) -> str:
    """The first parameter whose shape differs between two models."""
    for name in sorted(saved.keys() | shapes.keys()):
        if saved.get(name) != shapes.get(name):
            return f"{name} is {saved.get(name)} there and {shapes.get(name)} here"
    return "the order of its parameters differs"


# --------------------------------------------------------------------------- files


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Suppress torch's warning that there is no process group: one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _path_of_rank_0(path: Path | None) -> Path:
    """Rank 0's path on every rank; all ranks wait here for rank 0."""
    shared: list[Any] = [str(path)]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    return Path(shared[0])


def _to_base64(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_base64(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

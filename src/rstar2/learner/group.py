"""A learner of any number of ranks behind the methods of one.

One rank runs in this process. Several ranks run as separate processes (gloo on CPU, nccl on GPU):
every call goes to all ranks over their pipes, all must answer before the deadline, and rank 0's
answer is returned. All methods block and are not thread-safe: the caller makes one call at a time
(`pipeline.runtime.Runtime` makes all of them on one thread).

Invariants: a rank that dies, hangs (`heartbeat`) or does not answer ends the group with a named
error, and no other rank is left waiting for it; ranks end with their parent, however it dies (they
watch a pipe that only the parent holds open).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2.child import call_when_closed, describe_exit
from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.errors import (
    DeadlineError,
    DiskFullError,
    InfrastructureError,
    RankError,
    RstarError,
)
from rstar2.learner.heartbeat import LOOK_S, HangWatch, Heart, OwnTime, Pulse, PulseReader
from rstar2.learner.learner import Learner
from rstar2.learner.sft_loss import SftRow
from rstar2.malloc import keep_freed_memory
from rstar2.types import Batch, TokenValues

START_S = 300.0
CALL_S = 3600.0
CLOSE_S = 10.0


class Ranks(Protocol):
    """All ranks of one learner; a failure of one rank raises an InfrastructureError."""

    def start(self, args: tuple[Any, ...], options: dict[str, Any]) -> None: ...

    def call(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any: ...

    def close(self, grace_s: float = CLOSE_S) -> None: ...


class LearnerGroup:
    """The learner: `learner.ranks` ranks behind one interface."""

    def __init__(
        self,
        model_dir: str | Path,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        device: str = "cpu",
        call_deadline_s: float = CALL_S,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` replaces the local processes with ranks elsewhere; they are started here."""
        options = {"total_steps": total_steps, "seed": seed, "device": device}
        self._deadline_s = call_deadline_s
        self._local: Learner | None = None
        self._ranks: Ranks | None = None
        if ranks is not None:
            ranks.start((str(model_dir), learner, optimizer), options)
            self._ranks = ranks
        elif learner.ranks == 1:
            self._local = Learner(model_dir, learner, optimizer, **options)  # type: ignore[arg-type]
        else:
            self._ranks = LocalRanks(learner.ranks, learner.hang_s)
            self._ranks.start((str(model_dir), learner, optimizer), options)

    def _call(self, method: str, *args: Any) -> Any:
        if self._local is not None:
            return getattr(self._local, method)(*args)
        if self._ranks is None:
            raise RankError("the learner group is closed")
        try:
            return self._ranks.call(method, args, self._deadline_s)
        except InfrastructureError:
            self._ranks.close(grace_s=0.0)
            self._ranks = None
            raise

    def rl_step(
        self, batch: Batch, loss: LossConfig, minibatches: int, temperature: float = 1.0
    ) -> dict[str, float]:
        """Train on a batch: one optimizer step per mini-batch of whole groups."""
        metrics: dict[str, float] = self._call("rl_step", batch, loss, minibatches, temperature)
        return metrics

    def token_values(self) -> list[TokenValues]:
        """Logprobs of every token that the last RL step was trained on, per sample."""
        values: list[TokenValues] = self._call("token_values")
        return values

    def sft_step(self, rows: Sequence[SftRow]) -> dict[str, float]:
        """One optimizer step on the mean negative logprob of the masked-in tokens."""
        metrics: dict[str, float] = self._call("sft_step", rows)
        return metrics

    def sft_loss(self, rows: Sequence[SftRow]) -> float:
        """Mean negative logprob of the masked-in tokens; the weights stay as they are."""
        return float(self._call("sft_loss", rows))

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob of each token after the first of each sequence, at temperature 1."""
        logprobs: list[list[float]] = self._call("logprobs", token_ids)
        return logprobs

    def state(self) -> dict[str, Tensor]:
        """All weights by transformers name: whole, on the CPU, detached."""
        state: dict[str, Tensor] = self._call("state")
        return state

    def weight_sums(self, dtype: str, exported: bool) -> dict[str, int]:
        """Checksums of all weights in an engine's number format, without gathering them."""
        sums: dict[str, int] = self._call("weight_sums", dtype, exported)
        return sums

    def export_bytes(self) -> int:
        """Size of the weights of an export."""
        return int(self._call("export_bytes"))

    def reset_optimizer(
        self, config: OptimizerConfig | None = None, total_steps: int | None = None
    ) -> None:
        """Start a phase: new moments and step count; the current weights become the reference."""
        self._call("reset_optimizer", config, total_steps)

    def retune(self, config: OptimizerConfig, total_steps: int | None = None) -> None:
        """Change learning rates and schedule; moments, step count and reference stay."""
        self._call("retune", config, total_steps)

    def offload_optimizer(self) -> None:
        """Move the optimizer's state to host memory; no step is possible before `onload`."""
        self._call("offload_optimizer")

    def onload_optimizer(self) -> None:
        """Move the optimizer's state back to the device. Idempotent, as `offload_optimizer`."""
        self._call("onload_optimizer")

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write everything that is needed to resume, atomically."""
        self._call("save", path, extra)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint of any number of ranks; returns its `extra`."""
        extra: dict[str, Any] = self._call("load", path)
        return extra

    def export(
        self, path: str | Path, tokenizer: Any | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        """Write a model directory that transformers and vLLM can load."""
        self._call("export", path, tokenizer, stop_ids)

    def export_adapter(self, path: str | Path) -> None:
        """Write the LoRA adapter alone, as peft and vLLM read it."""
        self._call("export_adapter", path)

    def with_planted(self, scale: float, method: str, *args: Any) -> Any:
        """Call a method with a planted adapter in place of the trained one (`lora.rehearse`)."""
        return self._call("with_planted", scale, method, *args)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = self._local = None

    def __enter__(self) -> LearnerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# --------------------------------------------------------------------------- parent side


class LocalRanks:
    """Processes and pipes of a group."""

    def __init__(self, count: int, hang_s: float) -> None:
        self.count = count
        self._watch, self._time = HangWatch(hang_s), OwnTime()
        self._readers: list[PulseReader] = []
        self._rendezvous = tempfile.TemporaryDirectory(prefix="rstar2-ranks-")
        self._pipes: list[Connection] = []
        self._lifelines: list[Connection] = []
        self._processes: list[ForkServerProcess] = []

    def start(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Start the processes and wait until each has its learner."""
        # A clean process imports torch once and forks the ranks, instead of one import per rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        store = Path(self._rendezvous.name) / "store"
        try:
            for rank in range(self.count):
                self._readers.append(PulseReader(heart_file(store, rank)))
                ours, theirs = context.Pipe()
                watched, held = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve,
                    args=(rank, self.count, str(store), theirs, watched, args, options),
                    name=f"rstar2-learner-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                watched.close()
                self._pipes.append(ours)
                self._lifelines.append(held)
                self._processes.append(process)
            self._answers("start", START_S)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def call(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        """Send a command to all ranks; a rank that does not read it runs into the deadline."""
        command = bytes(ForkingPickler.dumps((method, args)))
        for pipe in self._pipes:
            threading.Thread(target=_send, args=(pipe, command), daemon=True).start()
        return self._answers(method, deadline_s)

    def _answers(self, method: str, deadline_s: float) -> Any:
        """Rank 0's answer once all ranks have answered."""
        ends = time.monotonic() + deadline_s
        self._watch.begin(method, self._time())
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            missing = [r for r in range(len(self._pipes)) if r not in answers]
            sources = {self._pipes[r]: r for r in missing}
            left = max(0.0, ends - time.monotonic())
            ready = wait(list(sources), min(left, LOOK_S))
            if not ready:
                if not left:
                    raise DeadlineError(
                        f"learner rank(s) {missing} did not answer {method} within {deadline_s:g} s"
                    )
                hang = self._watch.look({r: self._pulse(r) for r in missing}, self._time())
                if hang is not None:
                    raise RankError(f"{hang} in {method}")
            for pipe in ready:
                rank = sources[pipe]  # type: ignore[index]
                try:
                    failed, value = self._pipes[rank].recv()
                except (EOFError, OSError) as error:
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    how = "closed its pipe" if code is None else describe_exit(code)
                    raise RankError(f"learner rank {rank} died in {method}: it {how}") from error
                if failed:
                    self._raise(rank, method, value)
                answers[rank] = value
        self._watch.end(self._time())
        return answers[0]

    def _pulse(self, rank: int) -> Pulse:
        return self._readers[rank].read(self._processes[rank].pid or 0)

    def _raise(self, rank: int, method: str, value: tuple[BaseException | None, str]) -> None:
        """Raise a rank's own error if it is one of rstar2, else RankError with the traceback.

        A user error (a wrong checkpoint, a recipe that cannot work) is raised by all ranks alike
        before any collective, so the others' answers are awaited and the group stays usable.
        """
        error, trace = value
        if isinstance(error, DiskFullError):
            raise error  # new ranks would run into the same disk
        if error is None or isinstance(error, InfrastructureError):
            raise RankError(f"learner rank {rank} failed in {method}:\n{trace}")
        for other, pipe in enumerate(self._pipes):
            if other != rank and pipe.poll(CLOSE_S):
                pipe.recv()
        raise error

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Ask the ranks to exit, then kill those that have not exited after `grace_s`."""
        for pipe in self._pipes if grace_s else ():
            with contextlib.suppress(OSError):
                pipe.send(None)
        ends = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in (*self._pipes, *self._lifelines):
            pipe.close()
        self._pipes, self._lifelines, self._processes = [], [], []
        self._rendezvous.cleanup()


def _send(pipe: Connection, command: bytes) -> None:
    """Write a command; if the rank has died, waiting for its answer raises the error."""
    with contextlib.suppress(OSError):
        pipe.send_bytes(command)


# --------------------------------------------------------------------------- rank side


def _serve(
    rank: int,
    ranks: int,
    store: str,
    pipe: Connection,
    lifeline: Connection,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Main function of a rank: join the others, make the learner, answer calls until stopped."""
    call_when_closed(lifeline.fileno(), lambda: _leave(store))
    try:
        heart = Heart(heart_file(Path(store), rank))
        learner = _join(rank, ranks, store, args, options)
        learner.on_progress = heart.mark
        pipe.send((False, None))
    except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
        pipe.send((True, _described(error)))
        return
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            _leave(store)
        if command is None:
            break
        method, arguments = command
        try:
            heart.mark()
            value = getattr(learner, method)(*arguments)
            pipe.send((False, value if rank == 0 else None))
        except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
            pipe.send((True, _described(error)))
    dist.destroy_process_group()


def _join(
    rank: int, ranks: int, store: str, args: tuple[Any, ...], options: dict[str, Any]
) -> Learner:
    keep_freed_memory()
    cuda = str(options["device"]).startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
        options = {**options, "device": f"cuda:{rank}"}
    elif not args[1].threads:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(
        collectives(args[1], cuda=cuda),
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=CALL_S),
    )
    return Learner(*args, **options)


def collectives(config: LearnerConfig, *, cuda: bool) -> str:
    """The backend of a group's collectives; shards in host memory need one for the CPU too."""
    on_gpus = "cpu:gloo,cuda:nccl" if config.cpu_offload else "nccl"
    return on_gpus if cuda else "gloo"


def heart_file(store: Path, rank: int) -> Path:
    """The file of a rank's counters, beside the store at which the ranks meet."""
    return store.with_name(f"heart-{rank}")


def _leave(store: str) -> NoReturn:
    """The parent has died: remove the files that it cannot remove, and exit."""
    shutil.rmtree(Path(store).parent, ignore_errors=True)
    os._exit(1)


def _described(error: Exception) -> tuple[BaseException | None, str]:
    """An error of rstar2 as itself (it can be pickled), any other as text only."""
    return (error if isinstance(error, RstarError) else None), traceback.format_exc()

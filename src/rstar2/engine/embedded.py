"""The embedded engine: our own batched decoder in a worker process (or thread) on this machine.

Guarantees, beyond those of `base.Engine`:
- Every call sends a frame and awaits the reply, so the event loop is never blocked. With
  `process=True` (default) the model runs in a separate process; with `process=False` the same
  worker runs in a thread, and torch's thread count is not changed.
- With equal weights, prompt, cached prefix and sampling parameters, a request uses the same random
  numbers whatever else is in the batch. On a CPU with one thread its logprobs are also
  bit-identical, because other requests do not change the order of sums (a test checks this on the
  machine it runs on). Elsewhere logprobs agree to about 1e-6, and two runs differ only where a
  random number falls that close to the boundary between two tokens.
- `update_weights` does not wait for running requests: they keep their sampled tokens, their KV is
  recomputed under the new weights, and each token carries the version it was sampled under. With
  `hold`, sampling pauses until `resume`.
- When the worker dies, every pending call raises EngineError. `start()` then starts a new one, with
  the weights of the model directory and the version given at construction: stale until updated.
- Temperature 0 is greedy and reports the model's own logprobs (temperature 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rstar2.child import Child
from rstar2.engine import wire
from rstar2.engine.base import WeightTransfer, WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.worker import EngineWorker, WorkerSettings
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling

if TYPE_CHECKING:
    import torch

START_DEADLINE_S = 300.0
CONTROL_DEADLINE_S = 300.0
"""Deadline of load, score and update, which the worker handles between two steps."""
CLOSE_DEADLINE_S = 10.0

OnToken = Callable[[list[int]], None]


class EmbeddedEngine:
    """`base.Engine` over a worker that runs our decoder."""

    weight_transfer: WeightTransfer = "memory"

    def __init__(
        self,
        model: str | Path,
        *,
        kv_tokens: int,
        max_sequences: int,
        max_length: int,
        name: str = "embedded-0",
        version: int = 0,
        threads: int = 1,
        process: bool = True,
        dtype: str | None = None,
        int8: bool = False,
    ) -> None:
        self.name = name
        self._settings = WorkerSettings(
            model=str(model),
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
            max_length=max_length,
            version=version,
            threads=threads,
            dtype=dtype,
            int8=int8,
        )
        self._process = process
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, OnToken] = {}
        self._link: _Link | None = None
        self._reader: asyncio.Task[None] | None = None
        self._capacity = EngineCapacity(kv_tokens, max_sequences, max_length)
        self._updating = asyncio.Lock()

    # ------------------------------------------------------------------ lifecycle

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if there is none or it is a thread."""
        return None if self._link is None else self._link.pid

    async def start(self) -> None:
        """Start the worker and wait until it can serve; a no-op while one is alive."""
        if self._link is not None:
            if not self._link.lost:
                return
            await self.close()
        try:
            link = self._link = await _Link.open(self._settings, self._process)
        except OSError as error:
            raise LocalResourceError(f"{self.name}: no worker could be started: {error}") from error
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                first = await link.receive()
        except TimeoutError as error:
            await self.close()
            raise DeadlineError(f"{self.name}: not ready within {START_DEADLINE_S:g} s") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if not isinstance(first, wire.WorkerReady):
            failed = first if isinstance(first, wire.RequestFailed) else None
            reason = failed.message if failed else await link.post_mortem()
            await self.close()
            if failed is not None and failed.user:
                raise UserError(reason)
            raise EngineError(f"{self.name}: the worker ended before it was ready: {reason}")
        self._capacity = EngineCapacity(
            kv_tokens=first.kv_tokens,
            max_sequences=self._settings.max_sequences,
            max_length=self._settings.max_length,
            block_tokens=first.block_tokens,
        )
        self._reader = asyncio.create_task(self._read(link), name=f"{self.name}-reader")

    async def close(self) -> None:
        """Stop the worker and fail pending calls; leaves no process, thread or file."""
        link, self._link = self._link, None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        self._fail_pending(EngineError(f"{self.name}: closed"))
        if link is not None:
            await link.close()

    async def abort(self) -> None:
        """Kill the worker instead of asking it to stop; a thread cannot be killed."""
        if self._link is not None:
            self._link.kill()
        await self.close()

    async def _read(self, link: _Link) -> None:
        """Dispatch the worker's messages until it ends."""
        while (message := await link.receive()) is not None:
            match message:
                case wire.GenerationsEnded(results):
                    for result in results:
                        self._resolve(result.id, result)
                case wire.Tokens(id, tokens):
                    if (stream := self._streams.get(id)) is not None:
                        stream(tokens)
                case wire.RequestFailed(id, text, user):
                    kind = UserError if user else EngineError
                    self._reject(id, kind(f"{self.name}: {text}"))
                case wire.Load() | wire.Scored() | wire.Held() | wire.Updated():
                    self._resolve(message.id, message)
        self._fail_pending(EngineError(f"{self.name}: {await link.post_mortem()}"))

    def _resolve(self, call: int, value: Any) -> None:
        future = self._pending.get(call)
        if future is not None and not future.done():
            future.set_result(value)

    def _reject(self, call: int, error: Exception) -> None:
        future = self._pending.get(call)
        if future is not None and not future.done():
            future.set_exception(error)

    def _fail_pending(self, error: Exception) -> None:
        for call in list(self._pending):
            self._reject(call, error)

    # ------------------------------------------------------------------ calls

    def _alive(self) -> _Link:
        if self._link is None:
            raise EngineError(f"{self.name}: the engine is not started: call start() first")
        if self._link.lost:
            raise EngineError(f"{self.name}: its worker has ended; start() starts a new one")
        return self._link

    async def _call(self, message: Any, deadline_s: float, what: str) -> Any:
        """Send a message with an id and await its reply; an abandoned generation is cancelled."""
        link = self._alive()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[message.id] = future
        try:
            link.send(message)
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError as error:
            raise DeadlineError(f"{self.name}: {what} not done within {deadline_s:g} s") from error
        finally:
            del self._pending[message.id]
            answered = future.done() and not future.cancelled()
            if not answered and not link.lost and isinstance(message, wire.Submit):
                link.send(wire.Cancel(message.id))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        deadline_s: float,
        on_token: OnToken | None = None,
    ) -> Generation:
        """Sample a continuation; `on_token` receives new ids in order as they are sampled."""
        started = time.monotonic()
        call = next(self._ids)
        streamed = 0

        def stream(tokens: list[int]) -> None:
            nonlocal streamed
            streamed += len(tokens)
            if on_token is not None:
                on_token(tokens)

        if on_token is not None:
            self._streams[call] = stream
        message = wire.Submit(
            call, wire.pack_ids(prompt_ids), sampling, session, on_token is not None
        )
        try:
            result: wire.GenerationEnded = await self._call(message, deadline_s, "generation")
        finally:
            self._streams.pop(call, None)
        tokens = tuple(wire.unpack_ids(result.tokens).tolist())
        if on_token is not None and streamed < len(tokens):
            on_token(list(tokens[streamed:]))
        return Generation(
            token_ids=tokens,
            logprobs=wire.unpack_floats(result.logprobs),
            versions=tuple(result.versions),
            finish=result.finish,
            entropies=wire.unpack_floats(result.entropies),
            cached_tokens=result.cached_tokens,
            queue_s=result.queue_s,
            preempted_s=result.preempted_s,
            wall_s=time.monotonic() - started,
            engine=self.name,
        )

    async def release(self, session: str) -> None:
        """Free a session's cached prefix; a no-op if the worker has ended."""
        if self._link is not None and not self._link.lost:
            self._link.send(wire.Release(session))

    def capacity(self) -> EngineCapacity:
        """KV cache size and limits; exact (rounded down to blocks) once started."""
        return self._capacity

    async def load(self) -> EngineLoad:
        """Current load of the worker."""
        reply: wire.Load = await self._call(
            wire.AskLoad(next(self._ids)), CONTROL_DEADLINE_S, "load"
        )
        return reply.load

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, at temperature 1, under the current weights."""
        message = wire.AskScore(next(self._ids), wire.pack_ids(token_ids))
        reply: wire.Scored = await self._call(message, CONTROL_DEADLINE_S, "score")
        return reply.logprobs

    async def held_weights(self) -> HeldWeights:
        """Checksums of the tensors that the worker computes with."""
        message = wire.AskHeld(next(self._ids))
        reply: wire.Held = await self._call(message, CONTROL_DEADLINE_S, "checksums")
        return HeldWeights(reply.dtype, reply.sums)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Install new weights between two steps; raises UserError if they do not fit the model."""
        if (update.state is None) == (update.path is None):
            raise UserError("update: give either state or path")
        async with self._updating:  # the mailbox holds one update at a time
            link = self._alive()
            if update.state is not None:
                await asyncio.to_thread(_post, link.mailbox, update.state, self._settings.dtype)
            path = None if update.path is None else str(update.path)
            message = wire.Update(next(self._ids), update.version, path, update.hold)
            try:
                await self._call(message, CONTROL_DEADLINE_S, "weight update")
            finally:
                if update.state is not None and not link.closed:
                    os.ftruncate(link.mailbox, 0)

    async def sleep(self) -> None:
        """No-op: this engine's memory is the host's, and it has no other place."""

    async def wake(self) -> None:
        """No-op, as `sleep`."""

    async def resume(self) -> None:
        """Let running requests continue after an update with `hold`."""
        self._alive().send(wire.Resume())


def _post(mailbox: int, state: Mapping[str, torch.Tensor], dtype: str | None) -> None:
    """Write a state dict to the mailbox as safetensors, in the worker's number format."""
    data = memoryview(pack_state(state, dtype))
    os.ftruncate(mailbox, 0)
    offset = 0
    while offset < len(data):
        offset += os.pwrite(mailbox, data[offset:], offset)


def pack_state(state: Mapping[str, torch.Tensor], dtype: str | None = None) -> bytes:
    """A state dict as one safetensors file; tied tensors are written once.

    `dtype` is the number format of all tensors; None keeps theirs.
    """
    import torch
    from safetensors.torch import save

    narrow: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    unique: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name in sorted(state, key=lambda n: n == "lm_head.weight"):
        tensor = state[name].detach()
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if name == "lm_head.weight" and key in seen:
            continue
        seen.add(key)
        # A copy: safetensors refuses views of shared storage.
        unique[name] = tensor.to("cpu", narrow or tensor.dtype, copy=True).contiguous()
    return save(unique)


class _Link:
    """The socket to one worker, and the process or thread behind it."""

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        mailbox: int,
        worker: _Worker,
    ) -> None:
        self._reader, self._writer = streams
        self.mailbox = mailbox
        self._worker = worker
        self.lost = False
        self.closed = False

    @classmethod
    async def open(cls, settings: WorkerSettings, process: bool) -> _Link:
        with contextlib.ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            opened.callback(ours.close)
            mailbox = wire.open_mailbox()
            opened.callback(os.close, mailbox)
            run = _spawn if process else _thread
            worker = run(settings, theirs, mailbox)
            link = cls(await asyncio.open_unix_connection(sock=ours), mailbox, worker)
            opened.pop_all()
            return link

    @property
    def pid(self) -> int | None:
        return self._worker.pid if isinstance(self._worker, Child) else None

    def send(self, message: wire.WorkerMessage) -> None:
        self._writer.write(wire.frame(message))

    async def receive(self) -> wire.FromWorker | None:
        """The next message; None once the worker has ended."""
        try:
            header = await self._reader.readexactly(wire.HEADER.size)
            body = await self._reader.readexactly(wire.HEADER.unpack(header)[0])
        except (asyncio.IncompleteReadError, ConnectionResetError):
            self.lost = True
            return None
        return wire.read_for_engine(body)

    def kill(self) -> None:
        """Kill a worker process; a thread ends when the link is closed."""
        if isinstance(self._worker, Child):
            self._worker.kill()

    async def post_mortem(self) -> str:
        """One sentence on how the worker ended."""
        if isinstance(self._worker, threading.Thread):
            await asyncio.to_thread(self._worker.join, CLOSE_DEADLINE_S)
            return "worker thread ended"
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._worker.wait()
        except TimeoutError:
            self._worker.kill()
            await self._worker.wait()
        return f"worker {self._worker.post_mortem()}"

    async def close(self) -> None:
        try:
            if not self.lost:
                self.lost = True
                self.send(wire.StopWorker())
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        finally:
            if isinstance(self._worker, threading.Thread):
                await asyncio.to_thread(self._worker.join, CLOSE_DEADLINE_S)
            else:
                await self._worker.stop()
            self.closed = True
            os.close(self.mailbox)


_Worker = Child | threading.Thread


def _spawn(settings: WorkerSettings, theirs: socket.socket, mailbox: int) -> _Worker:
    """Start the worker process. The kernel kills it when the calling thread ends."""
    command = [sys.executable, "-m", "rstar2.engine.worker"]
    command += ["--socket", str(theirs.fileno()), "--mailbox", str(mailbox)]
    command += ["--settings", msgspec.json.encode(settings).decode()]
    threads = str(settings.threads)
    with theirs:
        return Child(
            "engine worker",
            command,
            parent_death_signal=signal.SIGKILL,
            grace_s=CLOSE_DEADLINE_S,
            descriptors=(theirs.fileno(), mailbox),
            environment=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )


def _thread(settings: WorkerSettings, theirs: socket.socket, mailbox: int) -> _Worker:
    def run() -> None:
        with theirs:
            EngineWorker(theirs, mailbox, settings).run()

    thread = threading.Thread(target=run, name="engine-worker", daemon=True)
    thread.start()
    return thread

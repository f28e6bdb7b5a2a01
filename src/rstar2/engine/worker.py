"""The worker of the embedded engine: holds the model, runs its steps and serves one socket.

Runs as a separate process (`python -m rstar2.engine.worker`) or as a thread with the same loop. A
reader thread decodes frames into messages; the loop handles them between two steps and blocks only
when idle. The worker ends on a stop message, or when its engine closes the socket. The kernel also
kills the process when its parent dies (see `rstar2.child`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rstar2.engine import wire
from rstar2.errors import RstarError, UserError
from rstar2.malloc import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from rstar2.engine.batcher import Batcher
    from rstar2.engine.sequences import EndedRequest


class WorkerSettings(msgspec.Struct, frozen=True):
    """Settings of one worker."""

    model: str
    kv_tokens: int
    max_sequences: int
    max_length: int
    version: int
    threads: int
    dtype: str | None = None
    """Number format; None: that of the model on a GPU, float32 on a CPU."""
    int8: bool = False
    """Layers multiply with weights and activations that are rounded to 8 bits."""


def build(settings: WorkerSettings) -> Batcher:
    """Load the model and create the batcher; torch is imported here."""
    import torch

    from rstar2.engine.batcher import Batcher
    from rstar2.engine.decoder import Decoder, read_decoder_config, read_weights

    path = Path(settings.model)
    config = read_decoder_config(path)
    cuda = torch.cuda.is_available()
    # Half precision is several times slower than float32 on CPUs without matrix units for it.
    usual = (config.dtype or "float32") if cuda else "float32"
    dtype = getattr(torch, settings.dtype or usual)
    decoder = Decoder(
        config,
        read_weights(path),
        max_length=settings.max_length,
        device=torch.device("cuda" if cuda else "cpu"),
        dtype=dtype,
        int8=settings.int8,
    )
    return Batcher(
        decoder,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
        max_length=settings.max_length,
        version=settings.version,
    )


class EngineWorker:
    """Serves one batcher over a socket."""

    def __init__(self, sock: socket.socket, mailbox: int, settings: WorkerSettings) -> None:
        self._sock = sock
        self._mailbox = mailbox
        self._settings = settings
        self._inbox: queue.SimpleQueue[wire.ToWorker | None] = queue.SimpleQueue()
        self._batcher: Batcher | None = None
        self._held = False

    def run(self) -> None:
        """Serve until a stop message arrives or the socket closes."""
        try:
            self._batcher = build(self._settings)
        except RstarError as error:
            self._send(wire.RequestFailed(0, str(error), isinstance(error, UserError)))
            return
        except Exception as error:
            self._send(wire.RequestFailed(0, f"{type(error).__name__}: {error}", False))
            raise
        reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        reader.start()
        blocks = self._batcher.blocks
        try:
            self._send(wire.WorkerReady(blocks.total * blocks.block, blocks.block))
            while self._handle_arrived():
                self._report(self._batcher.step())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the engine has ended; nobody reads the reply
        finally:
            # Wakes the reader, which would otherwise stay blocked in recv.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            reader.join()

    def _read(self) -> None:
        """Decode frames into messages; None marks the end of the socket."""
        with contextlib.suppress(ConnectionResetError):
            while (body := wire.receive(self._sock)) is not None:
                self._inbox.put(wire.read_for_worker(body))
        self._inbox.put(None)

    def _send(self, message: wire.WorkerMessage) -> None:
        self._sock.sendall(wire.frame(message))

    def _handle_arrived(self) -> bool:
        """Handle every message that has arrived, waiting for one when idle; False to stop."""
        assert self._batcher is not None
        while True:
            try:
                message = self._inbox.get(block=self._held or self._batcher.idle)
            except queue.Empty:
                return True
            if message is None or isinstance(message, wire.StopWorker):
                return False
            self._handle(self._batcher, message)

    def _handle(self, batcher: Batcher, message: wire.ToWorker) -> None:
        try:
            match message:
                case wire.Submit():
                    self._submit(batcher, message)
                case wire.Cancel(id):
                    batcher.cancel(id)
                case wire.Release(session):
                    batcher.release(session)
                case wire.AskLoad(id):
                    self._send(wire.Load(id, batcher.load()))
                case wire.AskScore(id, tokens):
                    ids = wire.unpack_ids(tokens).astype(np.int64)
                    self._send(wire.Scored(id, batcher.score(ids)))
                case wire.AskHeld(id):
                    held = batcher.decoder.held_weights()
                    self._send(wire.Held(id, held.dtype, held.sums))
                case wire.Update(id, version, path, hold):
                    batcher.install(self._weights(path), version)
                    self._held = hold
                    self._send(wire.Updated(id))
                case wire.Resume():
                    self._held = False
        except UserError as error:
            if isinstance(message, wire.Release | wire.Resume | wire.StopWorker):
                raise  # these messages have no reply
            self._send(wire.RequestFailed(message.id, str(error), user=True))

    def _submit(self, batcher: Batcher, message: wire.Submit) -> None:
        from rstar2.engine.sequences import EngineRequest

        batcher.submit(
            EngineRequest(
                id=message.id,
                prompt=wire.unpack_ids(message.prompt).astype(np.int64),
                sampling=message.sampling,
                session=message.session,
                arrived=time.monotonic(),
                stream=message.stream,
            )
        )

    def _weights(self, path: str | None) -> Mapping[str, torch.Tensor]:
        from safetensors.torch import load

        from rstar2.engine.decoder import read_weights

        if path is not None:
            return read_weights(Path(path))
        size = os.fstat(self._mailbox).st_size
        return load(os.pread(self._mailbox, size, 0))

    def _report(self, ended: list[EndedRequest]) -> None:
        assert self._batcher is not None
        for request, tokens in self._batcher.fresh_tokens():
            self._send(wire.Tokens(request.id, tokens))
        results = []
        for end in ended:
            request = end.request
            if end.error is not None:
                self._send(wire.RequestFailed(request.id, end.error, user=False))
                continue
            results.append(
                wire.GenerationEnded(
                    id=request.id,
                    tokens=wire.pack_ids(request.tokens),
                    logprobs=wire.pack_floats(request.logprobs),
                    entropies=wire.pack_floats(request.entropies),
                    versions=request.versions,
                    finish=end.finish,
                    cached_tokens=request.cached,
                    queue_s=(request.started or request.arrived) - request.arrived,
                    preempted_s=request.preempted_s,
                )
            )
        if results:
            self._send(wire.GenerationsEnded(results))


def main() -> None:
    """Entry point of the worker process."""
    parser = argparse.ArgumentParser(prog="rstar2.engine.worker")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--mailbox", type=int, required=True)
    parser.add_argument("--settings", required=True)
    args = parser.parse_args()
    keep_freed_memory()
    settings = msgspec.json.decode(args.settings, type=WorkerSettings)
    import torch

    torch.set_num_threads(settings.threads)
    with socket.socket(fileno=args.socket) as sock:
        EngineWorker(sock, args.mailbox, settings).run()
    # Skip the teardown of torch and its threads: there is nothing to save.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

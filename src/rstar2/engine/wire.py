"""Protocol between the embedded engine and its worker: length-prefixed msgpack frames.

Token ids are sent as int32 bytes, logprobs as float32 bytes. Weights are not sent in frames: they
are written to an anonymous shared file (`mailbox`) that both sides hold open, so no file is left
behind when either side dies.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rstar2.token_arrays import TokenArray
from rstar2.types import EngineLoad, Finish, Sampling, VersionSpan

HEADER = struct.Struct("<I")


class WorkerMessage(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Base of all messages."""


# ----------------------------------------------------------------- engine to worker


class Submit(WorkerMessage, frozen=True):
    id: int
    prompt: bytes
    sampling: Sampling
    session: str
    stream: bool


class Cancel(WorkerMessage, frozen=True):
    id: int


class Release(WorkerMessage, frozen=True):
    session: str


class AskLoad(WorkerMessage, frozen=True):
    id: int


class AskScore(WorkerMessage, frozen=True):
    id: int
    tokens: bytes


class AskHeld(WorkerMessage, frozen=True):
    id: int


class Update(WorkerMessage, frozen=True):
    """New weights: a safetensors directory, or (path None) a safetensors file in the mailbox."""

    id: int
    version: int
    path: str | None
    hold: bool = False
    """Compute nothing but scores until Resume."""


class Resume(WorkerMessage, frozen=True):
    pass


class StopWorker(WorkerMessage, frozen=True):
    pass


# ----------------------------------------------------------------- worker to engine


class WorkerReady(WorkerMessage, frozen=True):
    kv_tokens: int
    block_tokens: int


class GenerationEnded(WorkerMessage, frozen=True):
    id: int
    tokens: bytes
    logprobs: bytes
    entropies: bytes
    versions: list[VersionSpan]
    finish: Finish
    cached_tokens: int
    queue_s: float
    preempted_s: float = 0.0


class GenerationsEnded(WorkerMessage, frozen=True):
    """All requests that ended in one step."""

    results: list[GenerationEnded]


class Tokens(WorkerMessage, frozen=True):
    id: int
    tokens: list[int]


class Load(WorkerMessage, frozen=True):
    id: int
    load: EngineLoad


class Scored(WorkerMessage, frozen=True):
    id: int
    logprobs: list[float]


class Held(WorkerMessage, frozen=True):
    id: int
    dtype: str
    sums: dict[str, int]


class Updated(WorkerMessage, frozen=True):
    id: int


class RequestFailed(WorkerMessage, frozen=True):
    """A request failed (id 0: the worker could not start). `user`: the request was invalid."""

    id: int
    message: str
    user: bool


ToWorker = Submit | Cancel | Release | AskLoad | AskScore | AskHeld | Update | Resume | StopWorker
FromWorker = (
    WorkerReady | GenerationsEnded | Tokens | Load | Scored | Held | Updated | RequestFailed
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def frame(message: WorkerMessage) -> bytes:
    """Encode one message with its length prefix."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def read_for_worker(body: bytes) -> ToWorker:
    return _to_worker.decode(body)


def read_for_engine(body: bytes) -> FromWorker:
    return _from_worker.decode(body)


def receive(sock: socket.socket) -> bytes | None:
    """Read one frame from a blocking socket; None once it is closed."""
    header = _exactly(sock, HEADER.size)
    return None if header is None else _exactly(sock, HEADER.unpack(header)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, dtype=np.int32)


def pack_floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype=np.float32).tobytes()


def unpack_floats(data: bytes) -> TokenArray[float]:
    return TokenArray(array("f", data))


def open_mailbox() -> int:
    """Create an anonymous file in memory; returns its descriptor."""
    return os.memfd_create("rstar2-weights")

"""Recorded lines in compact form: token ids and their numbers are binary columns.

A line of trajectories/ and tokens/ is a JSON object with the fields by which readers choose lines
(`stage`, `step`, the id of the group) and `data`: base64 of zlib of a `_Contents`. In its JSON text
a NUL byte, which JSON never contains, stands for each array of numbers. All arrays of a kind are
one column, its bytes sorted by significance: the high bytes of ids and logprobs hardly differ.

Invariant: `plain_line(pack(value, ...))` is `types.encode(value)`, byte for byte. Lines of earlier
versions are plain JSON; `plain_line` returns them as they are.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from itertools import chain, zip_longest
from typing import Any

import msgspec
import numpy as np

from rstar2.token_arrays import TokenArray, plain

LEVEL = 1
"""Of zlib. Level 6 saves 16% more and takes 1.7 times as long."""
DECIMALS = "m"
"""The kind of floats with at most six decimals: millionths as four-byte integers."""
MILLION = 1e6
NEGATIVE_ZERO = -(2**31)
"""The millionths of -0.0."""
_HOLE = b"\0"
_HEAD = 64
"""Bytes of the contents that are decompressed first. They include the length of the text."""
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Number of bytes of a length by the type of a byte string in MessagePack."""
_START = b'{"form":"packed"'


class RecordedId(msgspec.Struct, frozen=True):
    """The id of a group."""

    id: str


class PackedLine(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="form", tag="packed", kw_only=True
):
    """A line on disk."""

    stage: str
    step: int
    group: RecordedId | None = None
    data: bytes


class _Contents(msgspec.Struct, frozen=True, array_like=True):
    """The contents of `data`: the arrays of each hole of the text, in order, and the columns."""

    text: bytes
    kinds: str
    lengths: bytes
    columns: dict[str, bytes]


class _Columns:
    """Takes the arrays out of a value while it is encoded."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.lengths = array("I")
        self.parts: dict[str, list[bytes]] = {}

    def take(self, value: object) -> object:
        """Keep an array and leave a hole; what msgspec calls for values that it does not know."""
        if not isinstance(value, TokenArray) or not len(value):
            return plain(value)
        kind, data = _column(value.held)
        self.kinds.append(kind)
        self.lengths.append(len(value))
        self.parts.setdefault(kind, []).append(data)
        return msgspec.Raw(_HOLE)

    def contents(self, text: bytes) -> _Contents:
        columns = {kind: _sorted(kind, b"".join(parts)) for kind, parts in self.parts.items()}
        return _Contents(text, "".join(self.kinds), _little(self.lengths).tobytes(), columns)


def pack(value: Any, stage: str, step: int, group: str | None = None) -> bytes:
    """The compact line of a value, without a newline."""
    columns = _Columns()
    text = msgspec.json.encode(value, enc_hook=columns.take)
    contents = msgspec.msgpack.encode(columns.contents(text))
    return msgspec.json.encode(
        PackedLine(
            stage=stage,
            step=step,
            group=None if group is None else RecordedId(group),
            data=zlib.compress(contents, LEVEL),
        )
    )


def plain_line(line: bytes, values_of: str | None = None) -> bytes:
    """The JSON text of a recorded line. Raises msgspec.DecodeError if the line is damaged.

    With `values_of`, only the compact arrays of this field have their numbers; zeros stand for the
    numbers of all others. This is much faster.
    """
    if not line.startswith(_START):
        return line
    try:
        data = zlib.decompress(_data(line))
    except zlib.error as error:
        raise _damaged(error) from error
    contents = msgspec.msgpack.decode(data, type=_Contents)
    texts = contents.text.split(_HOLE)
    lists = _lists(contents, texts, values_of)
    return b"".join(chain.from_iterable(zip_longest(texts, lists, fillvalue=b"")))


def line_text(line: bytes) -> bytes:
    """The text of a recorded line, to search it: a NUL byte stands for each compact array.

    The text is the first field of `_Contents`, and only this part is decompressed: an array with
    four fields begins with one byte, then come the type of the text, its length and the text.
    """
    if not line.startswith(_START):
        return line
    inflate = zlib.decompressobj()
    try:
        head = inflate.decompress(_data(line), _HEAD)
        width = _LENGTH_BYTES[head[1]]
        size = int.from_bytes(head[2 : 2 + width], "big")
        left = 2 + width + size - len(head)
        rest = inflate.decompress(inflate.unconsumed_tail, left) if left > 0 else b""
    except (zlib.error, LookupError) as error:
        raise _damaged(error) from error
    text = (head + rest)[2 + width : 2 + width + size]
    if len(text) != size:
        raise _damaged("its text is too short")
    return text


def _data(line: bytes) -> bytes:
    return msgspec.json.decode(line, type=PackedLine).data


def _damaged(why: object) -> msgspec.DecodeError:
    return msgspec.DecodeError(f"the packed line is damaged: {why}")


def _lists(contents: _Contents, texts: list[bytes], values_of: str | None) -> list[bytes]:
    """The JSON text of each array, in order. `texts` are those before the arrays."""
    wanted = b"" if values_of is None else f'"{values_of}":'.encode()
    columns: dict[str, np.ndarray[Any, Any]] = {}
    taken = dict.fromkeys(contents.columns, 0)
    lists = []
    lengths = _read("I", contents.lengths)
    for text, kind, length in zip(texts[:-1], contents.kinds, lengths, strict=True):
        start = taken[kind]
        taken[kind] = end = start + length
        if not text.endswith(wanted):
            lists.append(b"[0" + b",0" * (length - 1) + b"]")
            continue
        if kind not in columns:
            columns[kind] = _values(kind, contents.columns[kind])
        lists.append(msgspec.json.encode(columns[kind][start:end].tolist()))
    return lists


# --------------------------------------------------------------------------- columns


def _column(values: array[Any]) -> tuple[str, bytes]:
    """The kind and the bytes of an array."""
    if values.typecode == "d":
        exact = np.array(values)
        millionths = np.rint(exact * MILLION)
        if np.array_equal(millionths / MILLION, exact) and np.abs(millionths).max() < 2**31:
            millionths[np.signbit(exact) & (exact == 0)] = NEGATIVE_ZERO
            return DECIMALS, millionths.astype("<i4").tobytes()
    return values.typecode, _little(values).tobytes()


def _values(kind: str, data: bytes) -> np.ndarray[Any, Any]:
    """The numbers of a column."""
    flat = np.frombuffer(data, np.uint8).reshape(_width(kind), -1).T.tobytes()
    if kind != DECIMALS:
        return np.asarray(_read(kind, flat))
    millionths = np.frombuffer(flat, "<i4")
    return np.where(millionths == NEGATIVE_ZERO, -0.0, millionths / MILLION)


def _sorted(kind: str, data: bytes) -> bytes:
    """All first bytes of the numbers, then all second ones, and so on."""
    size = _width(kind)
    return b"".join(data[place::size] for place in range(size))


def _width(kind: str) -> int:
    return 4 if kind == DECIMALS else array(kind).itemsize


def _read(kind: str, data: bytes) -> array[Any]:
    values = array(kind)
    values.frombytes(data)
    return _little(values)


def _little(values: array[Any]) -> array[Any]:
    """Files are little endian."""
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped

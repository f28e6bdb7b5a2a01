"""Rows of a data set, streamed: JSON lines, a JSON array, Parquet, or a Hugging Face data set.

| given as                                         | read                                     |
|--------------------------------------------------|------------------------------------------|
| FILE.jsonl, FILE.json, also with .gz             | line by line, or the elements of an array|
| FILE.parquet                                     | in batches of rows, with the data extra  |
| hub:NAME[#CONFIG][@REVISION][:SPLIT]             | streamed by `datasets`; NAME may be a    |
|                                                  | local directory; SPLIT defaults to train |

Only the current row is in memory (JSON array: the current piece; Parquet: the current batch). Every
row has its position, so that errors can name it. A line that is not a JSON object is a `BadRow`,
not an exception: the caller decides whether to stop or to count it. If the rest of a file cannot be
read (a torn array, gzip or Parquet file), a DataError says how far reading got, so a truncated file
is never mistaken for a short one.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from rstar2.errors import DataError, UserError

T = TypeVar("T")

HUB = "hub:"
FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
BATCH_ROWS = 256
UNKNOWN_ROWS = 20
"""If this many first rows are not recognised, it is another data set, not broken rows."""
PIECE = 1 << 20
"""Characters of a JSON array that are read at once."""

_HUB_NAME = re.compile(
    r"(?P<name>[^#@:]+)(?:#(?P<config>[^@:]+))?(?:@(?P<revision>[^:]+))?(?::(?P<split>.+))?"
)


@dataclass(frozen=True, slots=True)
class DataRow:
    """One record with its publisher's own field names."""

    where: str
    """file:line or data set:index."""
    number: int
    """Line or index, from 1."""
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is not a record, with the reason and its text."""

    where: str
    number: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class HubName:
    """Name, configuration, revision and split of a data set on the hub."""

    name: str
    config: str | None
    revision: str | None
    split: str


def read_rows(source: str) -> Iterator[DataRow | BadRow]:
    """Stream `source`, a file or a name on the hub (see the table above)."""
    if source.startswith(HUB):
        yield from _read_hub(source)
        return
    path = Path(source)
    if not path.name.endswith(FILES):
        raise DataError(f"data {source!r}: not a {', '.join(FILES[:-1])} or {FILES[-1]} file")
    if not path.is_file():
        raise DataError(
            f"data {source!r} does not exist (a file, or hub:NAME[#CONFIG][@REVISION][:SPLIT])"
        )
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        yield from _read_json(path)


def known_rows(
    source: str, known: T | None, recognise: Callable[[Mapping[str, Any]], T]
) -> Iterator[tuple[DataRow, T] | BadRow]:
    """Rows with their reader: `known`, or what `recognise` returns for the first row it knows.

    Broken rows come as `BadRow`. If the first rows are all unknown, it is another data set and not
    a file of broken rows: a UserError. A source without a row is a DataError.
    """
    count = 0
    unknown: list[tuple[DataRow, UserError]] = []
    for row in read_rows(source):
        count += 1
        if isinstance(row, BadRow):
            yield row
            continue
        if known is None:
            try:
                known = recognise(row.fields)
            except UserError as error:
                unknown.append((row, error))
                if len(unknown) == UNKNOWN_ROWS:
                    break
                continue
            for early, why in unknown:
                yield BadRow(early.where, early.number, str(why), shown(early))
            unknown = []
        yield row, known
    if unknown:
        first, why = unknown[0]
        raise UserError(f"{first.where}: {why}") from why
    if not count:
        raise DataError(f"{source}: contains no row")


def shown(row: DataRow, limit: int = 1000) -> str:
    """The beginning of a row as JSON, for people."""
    fields = {str(name): value for name, value in row.fields.items()}
    return json.dumps(fields, ensure_ascii=False, default=str)[:limit]


def parse_hub(source: str) -> HubName:
    """Parse hub:NAME[#CONFIG][@REVISION][:SPLIT]."""
    match = _HUB_NAME.fullmatch(source.removeprefix(HUB))
    if match is None:
        raise DataError(f"data {source!r}: expected hub:NAME[#CONFIG][@REVISION][:SPLIT]")
    return HubName(match["name"], match["config"], match["revision"], match["split"] or "train")


# --------------------------------------------------------------------------- JSON


def _read_json(path: Path) -> Iterator[DataRow | BadRow]:
    number = 0
    try:
        with path.open("rb") as raw:
            zipped = path.suffix == ".gz"
            file: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if zipped else raw
            array = ".json" in path.suffixes and _is_array(file)
            for row in _elements(path, file) if array else _lines(path, file):
                number = row.number
                yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: torn or not a gzip file after row {number}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read after row {number}: {error}") from error


def _is_array(file: IO[bytes] | gzip.GzipFile) -> bool:
    while (start := file.read(1)).isspace():
        pass
    file.seek(0)
    return start == b"["


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[DataRow | BadRow]:
    decode = msgspec.json.Decoder().decode
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        where = f"{path}:{number}"
        try:
            fields = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield BadRow(where, number, f"not JSON: {error}", _shown(line))
            continue
        if isinstance(fields, dict):
            yield DataRow(where, number, fields)
        else:
            yield BadRow(where, number, _no_object(fields), _shown(line))


def _elements(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[DataRow | BadRow]:
    """The elements of one JSON array, with no more than a few of them in memory."""
    text = _Text(path, file)
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    text.skip("[")
    number = 0
    while not text.at("]"):
        if number:
            text.skip(",")
        number += 1
        where = f"{path}:{number}"
        fields = text.decode(decoder, where)
        if isinstance(fields, dict):
            yield DataRow(where, number, fields)
        else:
            yield BadRow(where, number, _no_object(fields), json.dumps(fields)[:500])
    text.skip("]")
    if not text.ended():
        raise DataError(f"{path}: text after the end of the array, after element {number}")


class _Text:
    """A window onto a text that is read in pieces."""

    def __init__(self, path: Path, file: IO[bytes] | gzip.GzipFile) -> None:
        self._path, self._file = path, file
        self._text, self._place, self._done = "", 0, False
        self._rest = b""
        """Bytes of a character that the next piece completes."""

    def at(self, mark: str) -> bool:
        """Whether this character comes next, after white space."""
        return not self.ended() and self._text[self._place] == mark

    def skip(self, mark: str) -> None:
        if not self.at(mark):
            next_mark = "the end of the file" if self.ended() else repr(self._text[self._place])
            raise DataError(f"{self._path}: expected {mark!r} in the JSON array, found {next_mark}")
        self._place += 1

    def ended(self) -> bool:
        """Step over white space; whether nothing is left."""
        while True:
            while self._place < len(self._text) and self._text[self._place].isspace():
                self._place += 1
            if self._place < len(self._text):
                return False
            if not self._more():
                return True

    def decode(self, decoder: json.JSONDecoder, where: str) -> Any:
        """The next JSON value; reads more text while it is incomplete."""
        self.ended()
        while True:
            try:
                value, stop = decoder.raw_decode(self._text, self._place)
            except (ValueError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError) and self._more():
                    continue
                raise DataError(
                    f"{where}: not JSON: {error}; an array cannot be read beyond it"
                ) from error
            if stop < len(self._text) or not self._more():  # a number may continue there
                self._place = stop
                return value

    def _more(self) -> bool:
        """Read another piece, as large as what is still unread."""
        if self._done:
            return False
        left = self._text[self._place :]
        data = self._file.read(max(PIECE, len(left)))
        self._done = not data
        data = self._rest + data
        try:
            piece, self._rest = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if self._done or error.start < len(data) - 4:
                raise DataError(f"{self._path}: not UTF-8: {error.reason}") from error
            piece, self._rest = data[: error.start].decode("utf-8"), data[error.start :]
        self._text, self._place = left + piece, 0
        return True


def refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not a JSON number")


def _no_object(value: object) -> str:
    return f"a JSON {type(value).__name__}, not an object"


def _shown(line: bytes, limit: int = 500) -> str:
    return line[:limit].decode("utf-8", "backslashreplace").rstrip()


# --------------------------------------------------------------------------- with the data extra


def _read_parquet(path: Path) -> Iterator[DataRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: Parquet needs the data extra: pip install 'rstar2[data]'"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield DataRow(f"{path}:{number}", number, fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: torn or not a Parquet file after row {number}: {error}"
        ) from error


def _read_hub(source: str) -> Iterator[DataRow]:
    try:
        import datasets
        import httpx
    except ModuleNotFoundError as error:
        raise DataError(f"{source} needs the data extra: pip install 'rstar2[data]'") from error
    hub = parse_hub(source)
    number = 0
    try:
        stream = datasets.load_dataset(
            hub.name, hub.config, split=hub.split, revision=hub.revision, streaming=True
        )
        for number, fields in enumerate(stream, start=1):
            yield DataRow(f"{source}:{number}", number, fields)
    except (
        OSError,
        ValueError,
        httpx.HTTPError,
        datasets.exceptions.DatasetsError,
    ) as error:
        said = " ".join(str(error).split())[:500]
        raise DataError(
            f"{source}: {type(error).__name__} after row {number}: {said} "
            f"(config {hub.config or 'default'}, revision {hub.revision or 'main'}, "
            f"split {hub.split})"
        ) from error

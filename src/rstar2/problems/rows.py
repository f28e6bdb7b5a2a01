"""Rows of a data set, streamed: JSON lines (plain or .gz), Parquet, or a Hugging Face data set.

Nothing is held but the current row (Parquet: the current row group). Every row knows where it
stands, so that whatever is wrong with it can be named. A line that is not a JSON object is a
`BadRow`, not an exception: the caller decides whether to stop or to count it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from rstar2.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One record with its publisher's own field names."""

    where: str
    """file:line or data set:index."""
    number: int
    """Line or index, from 1."""
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no record, with the reason and the text itself."""

    where: str
    number: int
    reason: str
    text: str


def read_rows(source: str) -> Iterator[Row | BadRow]:
    """Stream `source`: a file (.jsonl, .jsonl.gz, .parquet) or `hub:NAME[@REVISION][:SPLIT]`."""
    if source.startswith("hub:"):
        yield from _read_hub(source.removeprefix("hub:"))
        return
    path = Path(source)
    if not path.exists():
        raise DataError(f"data {source!r} does not exist (a file, or hub:NAME[@REVISION][:SPLIT])")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz", ".json")):
        yield from _read_jsonl(path)
    else:
        raise DataError(f"data {source!r}: not a .jsonl, .jsonl.gz or .parquet file")


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as raw:
        lines: IO[bytes] | gzip.GzipFile = (
            gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        )
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield BadRow(where, number, f"not JSON: {error}", _shown(line))
                continue
            if isinstance(fields, dict):
                yield Row(where, number, fields)
            else:
                reason = f"a JSON {type(fields).__name__}, not an object"
                yield BadRow(where, number, reason, _shown(line))


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: Parquet needs the data extra: pip install 'rstar2[data]'"
        ) from error
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path}:{number}", number, fields)


def _read_hub(name: str) -> Iterator[Row]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"hub:{name} needs the data extra: pip install 'rstar2[data]'") from error
    name, _, split = name.partition(":")
    name, _, revision = name.partition("@")
    stream = datasets.load_dataset(
        name, split=split or "train", revision=revision or None, streaming=True
    )
    for number, fields in enumerate(stream, start=1):
        yield Row(f"hub:{name}:{number}", number, fields)


def _shown(line: bytes, limit: int = 500) -> str:
    return line[:limit].decode("utf-8", "backslashreplace").rstrip()

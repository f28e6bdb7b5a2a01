"""Convert public data sets to SFT conversations: convert, filter, measure, mix, and count.

Every input row becomes a conversation, a line of `dropped.jsonl` with the step and the reason, or
counts as not drawn by the mixture. Rows stream; memory is a few bytes per row (offsets, lengths,
hashes). The output directory appears complete or not at all.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np

from rstar2.errors import UserError
from rstar2.problems.card import (
    DROPPED,
    Card,
    DataFilter,
    Dropped,
    DroppedRows,
    Lengths,
    StepCount,
    check_names,
    output_directory,
)
from rstar2.problems.rows import BadRow, DataRow, known_rows, shown
from rstar2.problems.sft.calls import BadCall
from rstar2.problems.sft.checks import CALLS, ValidCalls
from rstar2.problems.sft.converters import (
    CONVERTERS,
    Converter,
    ParsedConversation,
    UnusableRow,
    recognise,
    to_conversation,
)
from rstar2.seeds import derive_seed
from rstar2.types import Conversation, encode

CONVERSATIONS = "conversations.jsonl"
READ, CONVERTED, FITS, MIXED = "read", "converted", "fits the length", "drawn by the mixture"
CHUNK = 512

Measure = Callable[[Conversation], tuple[int, int]]
"""(length, part of it that enters the loss) of a conversation."""


@dataclass(frozen=True, slots=True)
class SftSource:
    """One data set: its path, its name and its converter (None: recognised by its fields)."""

    path: str
    name: str
    converter: Converter | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """How much to draw of each source, and the longest conversation."""

    weights: Mapping[str, float] | None = None
    total: int | None = None
    seed: int = 0
    max_length: int | None = None


def characters(conversation: Conversation) -> tuple[int, int]:
    """Measure a conversation in characters, without a tokenizer."""
    size = sum(len(m.content) for m in conversation.messages)
    said = sum(len(m.content) for m in conversation.messages if m.role == "assistant")
    return size, said


@dataclass(slots=True)
class _Store:
    """The converted rows of one source on disk, with their lengths."""

    file: IO[bytes]
    ends: array[int] = field(default_factory=lambda: array("Q", [0]))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    trained: array[int] = field(default_factory=lambda: array("I"))

    def add(self, conversation: Conversation, length: int, trained: int) -> None:
        self.ends.append(self.ends[-1] + self.file.write(encode(conversation) + b"\n"))
        self.lengths.append(length)
        self.trained.append(trained)

    def read(self, row: int) -> bytes:
        self.file.seek(self.ends[row])
        return self.file.read(self.ends[row + 1] - self.ends[row])

    def __len__(self) -> int:
        return len(self.lengths)


def prepare_sft(
    sources: Sequence[SftSource],
    checks: Sequence[DataFilter[ParsedConversation]],
    out: Path,
    *,
    mixture: Mixture,
    measure: Measure = characters,
    unit: str = "characters",
    progress: Callable[[int, int], None] | None = None,
) -> Card:
    """Convert every source and mix them into the directory `out`; returns the data card."""
    check_names([source.name for source in sources])
    checks = [ValidCalls(), *checks]  # always checked
    names = [READ, CONVERTED, *(check.name for check in checks)]
    names += [FITS] * (mixture.max_length is not None)
    card = Card(noun="conversations", steps=[StepCount(name) for name in names])
    with output_directory(out) as temporary, ExitStack() as files:
        dropped = files.enter_context((temporary / DROPPED).open("wb"))
        conversion = _Conversion(checks, card, DroppedRows(dropped), measure, mixture.max_length)
        stores: dict[str, _Store] = {}
        for index, source in enumerate(sources):
            file = files.enter_context((temporary / f"{index}.rows").open("w+b"))
            stores[source.name] = store = _Store(file)
            for conversation, length, trained in conversion.run(source):
                store.add(conversation, length, trained)
                if progress is not None and len(store) % CHUNK == 0:
                    progress(card.steps[0].entered, sum(map(len, stores.values())))
        card.notes += [f"{count:,} x {note}" for note, count in conversion.notes.items()]
        _write_mixture(stores, mixture, card, temporary / CONVERSATIONS, unit)
        for index in range(len(sources)):
            (temporary / f"{index}.rows").unlink()
        dropped.flush()
        card.write(temporary)
    return card


# --------------------------------------------------------------------------- mixture
#
# The weights give the shares, the scarcest source limits the size, and no row is drawn twice.


def plan_mixture(
    available: Mapping[str, int], weights: Mapping[str, float] | None, total: int | None
) -> dict[str, int]:
    """Rows to draw per source; without weights all of them, or `total` in proportion."""
    shares = dict(weights) if weights else {name: float(count) for name, count in available.items()}
    if missing := sorted(available.keys() - shares.keys()):
        raise UserError(f"--weight: {', '.join(missing)} have none; give every source a weight")
    if unknown := sorted(shares.keys() - available.keys()):
        raise UserError(f"--weight: no source is called {', '.join(unknown)}: {sorted(available)}")
    if weights and (bad := [name for name, share in shares.items() if not share > 0]):
        raise UserError(f"--weight: {', '.join(bad)}: a weight is a number above 0")
    if weights and (empty := [name for name, count in available.items() if not count]):
        raise UserError(
            f"no row of {', '.join(empty)} passed the filters: leave it out of the mixture"
        )
    sizes = [count / shares[name] for name, count in available.items() if shares[name]]
    scale = min(sizes, default=0.0)
    if total is not None:
        scale = min(scale, total / sum(shares.values()))
    # Slightly more than the product, so that rounding does not lose a row: 1/3 of 3 rows is one.
    return {name: min(available[name], int(scale * shares[name] + 1e-6)) for name in available}


def draw_mixture(
    available: Mapping[str, int], counts: Mapping[str, int], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(source, row) of every drawn row, shuffled; deterministic in its arguments."""
    sources, rows = [], []
    for index, (name, count) in enumerate(counts.items()):
        rng = np.random.default_rng(derive_seed("mix", name, seed))
        chosen = rng.permutation(available[name])[:count]
        rows.append(chosen.astype(np.uint32))
        sources.append(np.full(count, index, dtype=np.uint16))
    order = np.random.default_rng(derive_seed("mix", seed)).permutation(sum(counts.values()))
    if not sources:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint32)
    return np.concatenate(sources)[order], np.concatenate(rows)[order]


def _write_mixture(
    stores: Mapping[str, _Store], mixture: Mixture, card: Card, path: Path, unit: str
) -> None:
    available = {name: len(store) for name, store in stores.items()}
    counts = plan_mixture(available, mixture.weights, mixture.total)
    drawn_sources, drawn_rows = draw_mixture(available, counts, mixture.seed)
    listed = list(stores.items())
    for name, count in counts.items():
        card.kept_by_source[name] = count
    card.kept = len(drawn_rows)
    if mixture.weights or mixture.total is not None:
        card.steps.append(StepCount(MIXED, sum(available.values()), card.kept))
    with path.open("wb") as file:
        for source, row in zip(drawn_sources.tolist(), drawn_rows.tolist(), strict=True):
            file.write(listed[source][1].read(row))
    everything: list[tuple[np.ndarray, np.ndarray]] = []
    for index, (name, store) in enumerate(listed):
        rows = drawn_rows[drawn_sources == index]
        lengths = np.array(store.lengths, dtype=np.int64)[rows]
        trained = np.array(store.trained, dtype=np.int64)[rows]
        everything.append((lengths, trained))
        if len(rows):
            card.lengths[name] = summarise(lengths, trained, unit)
    if len(card.lengths) > 1:
        lengths, trained = (np.concatenate(parts) for parts in zip(*everything, strict=True))
        card.lengths["all"] = summarise(lengths, trained, unit)


def summarise(lengths: np.ndarray, trained: np.ndarray, unit: str) -> Lengths:
    """Length statistics for the data card."""
    p50, p90, p99 = (int(np.quantile(lengths, q, method="higher")) for q in (0.5, 0.9, 0.99))
    share = float(trained.sum() / max(1, lengths.sum()))
    return Lengths(
        unit, len(lengths), float(lengths.mean()), p50, p90, p99, int(lengths.max()), share
    )


@dataclass(slots=True)
class _Conversion:
    """All filters with their counts. One for all sources, because duplicates span sources."""

    checks: Sequence[DataFilter[ParsedConversation]]
    card: Card
    dropped_rows: DroppedRows
    measure: Measure
    max_length: int | None
    notes: Counter[str] = field(default_factory=Counter)

    def run(self, source: SftSource) -> Iterator[tuple[Conversation, int, int]]:
        """The conversations of a source that pass every filter, with their lengths."""
        for row, talk in self._parsed_rows(source):
            if not self._passes(row, source.name, talk):
                continue
            conversation = to_conversation(talk, source.name)
            length, trained = self.measure(conversation)
            if self.max_length is not None:
                count = self.card.steps[-1]
                count.entered += 1
                if length > self.max_length:
                    reason = f"{length} is longer than {self.max_length}"
                    self.dropped_rows.drop(count, Dropped(FITS, reason, row.where, _asked(talk)))
                    continue
                count.left += 1
            self.notes.update(f"{source.name}: {note}" for note in talk.notes)
            yield conversation, length, trained

    def _parsed_rows(self, source: SftSource) -> Iterator[tuple[DataRow, ParsedConversation]]:
        reading, converting, calls = self.card.steps[:3]
        self.card.sources[source.name] = 0
        rows = known_rows(
            source.path, source.converter, lambda fields: CONVERTERS[recognise(fields)]
        )
        for recognised in rows:
            reading.entered += 1
            self.card.sources[source.name] += 1
            if isinstance(recognised, BadRow):
                dropped = Dropped(READ, recognised.reason, recognised.where, recognised.text)
                self.dropped_rows.drop(reading, dropped)
                continue
            row, converter = recognised
            reading.left += 1
            converting.entered += 1
            try:
                talk = converter(row.fields)
            except UnusableRow as error:
                converting.count(f"{source.name}: {error.kind}")
                self._drop(converting, str(error), row)
                continue
            except BadCall as error:
                # Only its calls are wrong, so it counts where calls are checked.
                converting.left += 1
                calls.entered += 1
                calls.count(f"{source.name}: does not parse")
                self._drop(calls, str(error), row)
                continue
            converting.left += 1
            yield row, replace(talk, id=f"{source.name}-{row.number}")

    def _passes(self, row: DataRow, source: str, talk: ParsedConversation) -> bool:
        for check, count in zip(self.checks, self.card.steps[2:], strict=False):
            count.entered += 1
            reason = check.drop(talk)
            if reason is not None:
                if check.name == CALLS:
                    count.count(f"{source}: does not fit its signature")
                self.dropped_rows.drop(count, Dropped(check.name, reason, row.where, _asked(talk)))
                return False
            count.left += 1
        return True

    def _drop(self, count: StepCount, reason: str, row: DataRow) -> None:
        self.dropped_rows.drop(count, Dropped(count.name, reason, row.where, shown(row)))


def _asked(talk: ParsedConversation) -> str:
    return next((said.text for said in talk.messages if said.role == "user"), "")

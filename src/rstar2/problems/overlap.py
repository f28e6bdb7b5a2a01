"""Overlap between problems: n-gram decontamination and near-duplicate detection.

Words are normalised: spacing, case, Unicode forms and LaTeX mark-up do not matter, so that
`What is $\\frac{1}{2}+\\,x$?` and `what is 1/2 + x` give the same words. Numbers are kept: the
same sentence with other numbers is another problem.

- `Contamination`: the n-grams (8 words) of the evaluation sets; a training problem that shares one
  is dropped. A text shorter than n words counts as one gram.
- `Duplicates`: exact (the same words) and near (the same numbers in the same order, and about two
  thirds of the word pairs in common, estimated with MinHash: one word in twenty may differ). Memory
  is about 300 bytes per row, in flat arrays.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, Self, TypeVar

import numpy as np

from rstar2.types import Problem

T = TypeVar("T")

_COMMANDS = {
    "times": "*",
    "cdot": "*",
    "div": "/",
    "le": "<=",
    "leq": "<=",
    "ge": ">=",
    "geq": ">=",
}
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_FRACTION = re.compile(rf"\\[dt]?frac\s*(?:{_GROUP}|(\d))\s*(?:{_GROUP}|(\d))")
_SPACING = re.compile(
    r"\\(?:(?:left|right|big|displaystyle|quad|qquad|text|mathrm|mathbf)(?![a-z])|[,;!: ])"
)
_COMMAND = re.compile(r"\\([a-z]+)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[-+*/^=<>%]")
_NESTED = 4
"""Depth of nested fractions that are normalised."""


def words(text: str) -> list[str]:
    """The words, numbers and operators of a text, free of case, spacing and LaTeX mark-up."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if "\\" in text:
        text = _SPACING.sub(" ", text)
        for _ in range(_NESTED):
            text, replaced = _FRACTION.subn(_divided, text)
            if not replaced:
                break
        text = _COMMAND.sub(lambda match: f" {_COMMANDS.get(match[1], match[1])} ", text)
    return _WORDS.findall(_THOUSANDS.sub("", text))


def _divided(match: re.Match[str]) -> str:
    return f" {match[1] or match[2] or ''} / {match[3] or match[4] or ''} "


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def text_hash(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    return _hash(text.encode("utf-8", "surrogatepass"))


_word_hash = lru_cache(maxsize=1 << 16)(text_hash)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The hashes of a text's words, in order, and of its numbers alone."""

    words_T: np.ndarray
    numbers: int

    def grams(self, n: int) -> np.ndarray:
        """One hash per run of n words; a shorter text is one run."""
        n = min(n, len(self.words_T))
        count = len(self.words_T) - n + 1 if n else 0
        if n & (n - 1) == 0 and n:  # runs of 8 from runs of 4 from runs of 2: the same sums
            total, width = self.words_T, 1
            while width < n:
                total = total[:-width] * _POWERS[width] + total[width:]
                width *= 2
            return total
        total = np.zeros(count, dtype=np.uint64)
        for place in range(n):
            total = total * _MULTIPLIER + self.words_T[place : place + count]
        return total


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_POWERS = {1 << i: np.uint64(pow(int(_MULTIPLIER), 1 << i, 1 << 64)) for i in range(8)}
"""The multiplier to the power of 1, 2, 4 ..., modulo 2^64."""


@lru_cache(maxsize=4)
def fingerprint(text: str) -> Fingerprint:
    """The hashes of a text; cached, because both filters look at the same text in turn."""
    listed = words(text)
    hashes = np.fromiter(map(_word_hash, listed), dtype=np.uint64, count=len(listed))
    numbers = " ".join([word for word in listed if "0" <= word[0] <= "9"])
    return Fingerprint(hashes, _word_hash(numbers))


class Contamination:
    """An index of the n-grams of texts that must not appear in training data."""

    def __init__(self, n: int = 8) -> None:
        self.n = n
        self._grams: dict[int, str] = {}

    @classmethod
    def of(cls, problems: Iterable[Problem], n: int = 8) -> Self:
        """The index of evaluation problems."""
        index = cls(n)
        for problem in problems:
            index.add(problem.prompt, problem.id)
        return index

    def add(self, text: str, name: str) -> None:
        """Protect a text; `name` is reported when something overlaps with it."""
        for gram in fingerprint(text).grams(self.n).tolist():
            self._grams.setdefault(gram, name)

    def overlap(self, text: str) -> str | None:
        """Name of a protected text that shares an n-gram with this one, or None."""
        grams = fingerprint(text).grams(self.n).tolist()
        if self._grams.keys().isdisjoint(grams):
            return None
        return next(self._grams[gram] for gram in grams if gram in self._grams)

    def __len__(self) -> int:
        return len(self._grams)


@dataclass(frozen=True, slots=True)
class Decontaminated(Generic[T]):
    """A filter: no text of an item shares an n-gram with an evaluation set."""

    index: Contamination
    texts: Callable[[T], Iterable[str]]
    """The texts of an item that are compared."""
    name: str = "decontaminated"

    def drop(self, item: T) -> str | None:
        for text in self.texts(item):
            if (name := self.index.overlap(text)) is not None:
                return f"shares {self.index.n} words in a row with {name}"
        return None


class HashTable:
    """uint64 -> row number in two flat arrays (open addressing): 18 to 36 bytes per entry."""

    def __init__(self) -> None:
        self._resize(1 << 12)
        self._count = 0

    def first(self, key: int, row: int) -> int:
        """The first row with this key; `row` itself if the key is new."""
        if self._count * 3 >= len(self._keys) * 2:
            self._grow()
        key = key or 1  # 0 marks a free slot
        mask = len(self._keys) - 1
        place = key & mask
        while (stored := self._keys[place]) != 0:
            if stored == key:
                return self._rows[place]
            place = (place + 1) & mask
        self._keys[place], self._rows[place] = key, row
        self._count += 1
        return row

    def __len__(self) -> int:
        return self._count

    def _resize(self, size: int) -> None:
        self._keys = array("Q", bytes(8 * size))
        self._rows = array("I", bytes(4 * size))

    def _grow(self) -> None:
        keys, rows = self._keys, self._rows
        self._resize(2 * len(keys))
        mask = len(self._keys) - 1
        for key, row in zip(keys, rows, strict=True):
            if key:
                place = key & mask
                while self._keys[place]:
                    place = (place + 1) & mask
                self._keys[place], self._rows[place] = key, row


class Names:
    """Short texts by number, in flat arrays: about ten bytes each in addition to the text."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("Q", [0])

    def append(self, name: str) -> None:
        self._text += name.encode()
        self._ends.append(len(self._text))

    def __getitem__(self, number: int) -> str:
        return self._text[self._ends[number] : self._ends[number + 1]].decode()

    def __len__(self) -> int:
        return len(self._ends) - 1


class Duplicates:
    """Detects texts that duplicate an earlier text."""

    HASHES, BANDS = 15, 5
    SIMILAR = 0.65

    def __init__(self) -> None:
        self._exact, self._near = HashTable(), HashTable()
        self._signatures = array("I")
        draws = np.random.default_rng(20250828)
        self._a = draws.integers(1, 1 << 61, self.HASHES, dtype=np.uint64) | np.uint64(1)
        self._b = draws.integers(0, 1 << 61, self.HASHES, dtype=np.uint64)
        self._rows = 0

    def check(self, text: str) -> tuple[str, int] | None:
        """("exact" or "near", number of the earlier text from 0), or None if this one is new."""
        row, text_print = self._rows, fingerprint(text)
        self._rows += 1
        signature = self._signature(text_print)
        self._signatures.frombytes(signature.tobytes())
        if (earlier := self._exact.first(_hash(text_print.words_T.tobytes()), row)) != row:
            return "exact", earlier
        near = None
        for key in self._band_keys(signature, text_print.numbers):
            earlier = self._near.first(key, row)
            if near is None and earlier != row and self._similar(signature, earlier):
                near = earlier
        return None if near is None else ("near", near)

    def _band_keys(self, signature: np.ndarray, numbers: int) -> list[int]:
        """One key per band of the signature, combined with the numbers of the text."""
        parts = signature.reshape(self.BANDS, -1).astype(np.uint64)
        keys = self._a[: self.BANDS] * np.uint64(numbers)
        for column in parts.T:
            keys = (keys ^ column) * _MULTIPLIER
            keys ^= keys >> np.uint64(29)
        listed: list[int] = keys.tolist()
        return listed

    def _signature(self, text_print: Fingerprint) -> np.ndarray:
        pairs = text_print.grams(2)
        if not len(pairs):
            return np.zeros(self.HASHES, dtype=np.uint32)
        mixed = (pairs[:, None] * self._a + self._b) >> np.uint64(32)
        smallest: np.ndarray = mixed.min(axis=0).astype(np.uint32)
        return smallest

    def _similar(self, signature: np.ndarray, earlier: int) -> bool:
        start = earlier * self.HASHES
        other = np.array(self._signatures[start : start + self.HASHES], dtype=np.uint32)
        return bool((signature == other).mean() >= self.SIMILAR)

"""Statistics over many trajectories: the share of each class in the tokens, in the summed entropy
and in the high-entropy tokens, with intervals over trajectories. Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rstar2.entropy.classes import AFTER_ERROR, AFTER_OK, CLASSES, REASONING, Token

GRAMS = (1, 2, 3)
MOST_GRAMS = 12
RESAMPLES = 400
MARKERS = re.compile(
    r"\s*(?:but|wait|before|however|instead|actually|alternatively|maybe|hmm|again|recheck|"
    r"double|check|verify|confirm|rerun|retry|try|fix|correct|let)\b",
    re.I,
)
"""How the paper's forking tokens begin: words with which a model reconsiders its own work."""
FREE = (REASONING, AFTER_OK, AFTER_ERROR)


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class of tokens. Shares are 0..1; None where there is no such token."""

    name: str
    tokens: int
    share: float
    """Of all sampled tokens."""
    entropy: float | None
    """Mean, nats per token, with its 95% interval over trajectories."""
    low: float | None
    high: float | None
    entropy_share: float
    """Of the summed entropy."""
    top_share: float
    """Of the high-entropy tokens (the top 20% of each trajectory)."""
    top_rate: float | None
    """Share of its tokens in the top 20%; 0.2 if entropy were independent of the class."""


@dataclass(frozen=True, slots=True)
class Gram:
    """Consecutive tokens of which the first is a high-entropy token."""

    text: str
    count: int
    entropy: float
    """Mean entropy of the first of them."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The statistics of one set of trajectories."""

    label: str
    trajectories: int
    tokens: int
    entropy: float
    """Mean over sampled tokens."""
    cut: float
    """Mean over trajectories of the lowest entropy in the top 20%."""
    rows: tuple[ClassRow, ...]
    grams: Mapping[str, Mapping[int, tuple[Gram, ...]]]
    """By class and length, most frequent first."""
    markers: float | None
    """Share of the high-entropy tokens in free text that begin a phrase of MARKERS."""
    markers_base: float | None
    """The same share of all tokens in free text."""

    def row(self, name: str) -> ClassRow:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class Point:
    """One step of training."""

    stage: str
    step: int
    analysis: Analysis


def analyse(label: str, trajectories: Iterable[Sequence[Token]]) -> Analysis:
    """The statistics of a set of trajectories."""
    counts, sums, tops, grams, cuts, marked = [], [], [], _Grams(), [], Counter[str]()
    for tokens in trajectories:
        if not tokens:
            continue
        place = {name: index for index, name in enumerate(CLASSES)}
        count, total, top = (np.zeros(len(CLASSES)) for _ in range(3))
        for index, token in enumerate(tokens):
            at = place[token.kind]
            count[at] += 1
            total[at] += token.entropy
            top[at] += token.top
            if token.kind in FREE:
                opens = bool(MARKERS.match(_phrase(tokens, index)))
                marked["all"] += 1
                marked["all_open"] += opens
                marked["top"] += token.top
                marked["top_open"] += token.top and opens
        grams.add(tokens)
        counts.append(count)
        sums.append(total)
        tops.append(top)
        cuts.append(min((t.entropy for t in tokens if t.top), default=0.0))
    n, e, t = (np.array(a).reshape(-1, len(CLASSES)) for a in (counts, sums, tops))
    return Analysis(
        label=label,
        trajectories=len(n),
        tokens=int(n.sum()),
        entropy=float(e.sum() / max(1.0, n.sum())),
        cut=float(np.mean(cuts)) if cuts else 0.0,
        rows=tuple(_row(name, index, n, e, t) for index, name in enumerate(CLASSES)),
        grams=grams.most(),
        markers=marked["top_open"] / marked["top"] if marked["top"] else None,
        markers_base=marked["all_open"] / marked["all"] if marked["all"] else None,
    )


def _row(name: str, index: int, n: np.ndarray, e: np.ndarray, t: np.ndarray) -> ClassRow:
    tokens, total, top = float(n[:, index].sum()), float(e[:, index].sum()), t[:, index].sum()
    low, high = _interval(e[:, index], n[:, index])
    return ClassRow(
        name=name,
        tokens=int(tokens),
        share=tokens / max(1.0, float(n.sum())),
        entropy=total / tokens if tokens else None,
        low=low,
        high=high,
        entropy_share=total / max(1e-12, float(e.sum())),
        top_share=float(top / max(1.0, float(t.sum()))),
        top_rate=float(top / tokens) if tokens else None,
    )


def _interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float | None, float | None]:
    """95% interval of a ratio of sums, by drawing whole trajectories again (seeded)."""
    used = counts > 0
    sums, counts = sums[used], counts[used]
    if len(counts) < 2:
        return None, None
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    ratios = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


class _Grams:
    """Counts n-grams that begin at a high-entropy token and stay within its class and turn."""

    def __init__(self) -> None:
        self._count: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self._entropy: defaultdict[tuple[str, int, str], float] = defaultdict(float)

    def add(self, tokens: Sequence[Token]) -> None:
        for start, token in enumerate(tokens):
            if not token.top:
                continue
            for length in GRAMS:
                part = tokens[start : start + length]
                whole = all(t.turn == token.turn and t.kind == token.kind for t in part)
                text = "".join(t.piece for t in part).strip()
                if len(part) == length and whole and text:
                    self._count[token.kind, length][text] += 1
                    self._entropy[token.kind, length, text] += token.entropy

    def most(self) -> dict[str, dict[int, tuple[Gram, ...]]]:
        most: dict[str, dict[int, tuple[Gram, ...]]] = {}
        for (kind, length), counter in sorted(self._count.items()):
            ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:MOST_GRAMS]
            most.setdefault(kind, {})[length] = tuple(
                Gram(text, count, self._entropy[kind, length, text] / count)
                for text, count in ordered
            )
        return most


def _phrase(tokens: Sequence[Token], start: int, length: int = 4) -> str:
    """The text from a token on, if a word begins there."""
    if start and tokens[start - 1].turn == tokens[start].turn:
        before = tokens[start - 1].piece[-1:]
        if before.isalnum() and not tokens[start].piece[:1].isspace():
            return ""
    return "".join(t.piece for t in tokens[start : start + length])

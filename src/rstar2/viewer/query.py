"""Lists of rollouts: filtered by what they came to, searched by text, sorted, page by page.

Columns are filtered at once. Text is looked for in the recorded lines, in the order of the result,
for a bounded time: the answer then says where to go on, so that a search through everything is
many short requests and never one long one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec
import numpy as np

from rstar2.errors import UserError
from rstar2.viewer.catalog import OUTCOMES, STOPS, Catalog, GroupRef, Ints, Rows, named_bits
from rstar2.viewer.run import Run

PAGE, MOST_PAGE = 50, 200
SEARCH_S = 1.0
_PLAIN = re.compile(r"[\x20-\x7e]*")
_KEPT = {"yes": 1, "no": 0, "unused": -1}
_SORTS = {
    "newest": None,
    "oldest": None,
    "longest": "tokens",
    "entropy": "entropy",
    "failed": "failed",
    "turns": "turns",
    "slowest": "wall",
}


@dataclass(frozen=True, slots=True)
class Filter:
    """What is looked for; empty fields let everything through."""

    stage: str = ""
    step: int | None = None
    kind: str = ""
    reward: str = ""
    """`1` right, `0` wrong, `none` not graded."""
    kept: str = ""
    stop: str = ""
    outcome: str = ""
    """An outcome, or `failed` for any that is the model's fault."""
    least: int | None = None
    """Tokens of the completion."""
    most: int | None = None
    text: str = ""
    sort: str = "newest"
    start: int = 0
    limit: int = PAGE

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Filter:
        """From a query string; a value that makes no sense is named."""
        known = {name: query.get(name, "").strip() for name in cls.__dataclass_fields__}
        numbers = {n: _whole(n, known[n]) for n in ("step", "least", "most", "start", "limit")}
        chosen = {
            "reward": ("0", "1", "none"),
            "kept": tuple(_KEPT),
            "stop": STOPS,
            "outcome": ("failed", *OUTCOMES),
            "sort": tuple(_SORTS),
        }
        for name, values in chosen.items():
            if known[name] and known[name] not in values:
                raise UserError(f"{name}={known[name]!r}: must be one of {', '.join(values)}")
        return cls(
            stage=known["stage"],
            step=numbers["step"],
            kind=known["kind"],
            reward=known["reward"],
            kept=known["kept"],
            stop=known["stop"],
            outcome=known["outcome"],
            least=numbers["least"],
            most=numbers["most"],
            text=known["text"],
            sort=known["sort"] or "newest",
            start=numbers["start"] or 0,
            limit=min(MOST_PAGE, numbers["limit"] or PAGE),
        )


def rollouts(run: Run, wanted: Filter) -> dict[str, Any]:
    """One page: rows, how many match, and where the next page starts (None: there is none)."""
    matches = _Matches(list(_ordered(run, wanted)))
    column = _SORTS[wanted.sort]
    if column is not None:
        matches.sort(column)
    if not wanted.text:
        page = matches.part(wanted.start, wanted.start + wanted.limit)
        return _answer(page, matches, wanted.start + len(page), wanted, searched=None)
    page, after = _search(matches, wanted)
    return _answer(page, matches, after, wanted, searched=after)


class _Matches:
    """Rollouts in the order of a result, as two columns: which stage, and which number there."""

    def __init__(self, places: list[tuple[Catalog, Ints]]) -> None:
        self.catalogs = [catalog for catalog, _ in places]
        sizes = [len(numbers) for _, numbers in places]
        self._stage = np.repeat(np.arange(len(places)), sizes)
        empty: Ints = np.zeros(0, dtype=np.int64)
        self._number: Ints = np.concatenate([empty, *(numbers for _, numbers in places)])

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, place: int) -> tuple[Catalog, int]:
        return self.catalogs[self._stage[place]], int(self._number[place])

    def part(self, start: int, end: int) -> list[tuple[Catalog, int]]:
        return [self[place] for place in range(start, min(end, len(self)))]

    def sort(self, column: str) -> None:
        """By a column, highest first; equal ones stay in their order, unknown ones come last."""
        values = np.zeros(len(self))
        for stage, catalog in enumerate(self.catalogs):
            mine = self._stage == stage
            values[mine] = catalog.rollouts.rows[column][self._number[mine]]
        order = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable")
        self._stage, self._number = self._stage[order], self._number[order]


def facets(run: Run) -> dict[str, list[str]]:
    """The values that filters can take in this run."""
    kinds = dict.fromkeys(k for c in run.catalogs.values() for k in c.kinds.names if k)
    stops: set[int] = set()
    bits = 0
    for catalog in run.catalogs.values():
        rows = catalog.rollouts.rows
        stops |= {int(s) for s in np.unique(rows["stop"])}
        bits |= int(np.bitwise_or.reduce(rows["outcomes"])) if len(rows) else 0
    return {
        "stages": list(run.catalogs),
        "kinds": list(kinds),
        "stops": [name for code, name in enumerate(STOPS) if code in stops],
        "outcomes": named_bits(bits),
    }


def row(catalog: Catalog, number: int) -> dict[str, Any]:
    """One rollout as a list shows it."""
    values = catalog.rollouts.rows[number]
    group = catalog.groups[int(values["group"])]
    return {
        "id": catalog.name_of(number),
        "group": group.id,
        "stage": catalog.stage,
        "prompt": group.prompt,
        "kind": group.kind,
        **cells(values),
    }


def cells(values: Any) -> dict[str, Any]:
    """The columns of one rollout as JSON has them."""
    reward, entropy = float(values["reward"]), float(values["entropy"])
    stop = int(values["stop"])
    return {
        "member": int(values["member"]),
        "step": int(values["step"]),
        "reward": None if np.isnan(reward) else reward,
        "stop": STOPS[stop] if stop < len(STOPS) else "unknown",
        "kept": {1: True, 0: False}.get(int(values["kept"])),
        "outcomes": named_bits(int(values["outcomes"])),
        "tokens": int(values["tokens"]),
        "sampled": int(values["sampled"]),
        "turns": int(values["turns"]),
        "calls": int(values["calls"]),
        "failed": int(values["failed"]),
        "entropy": None if np.isnan(entropy) else round(entropy, 4),
        "wall": round(float(values["wall"]), 3),
    }


# --------------------------------------------------------------------------- columns


def _ordered(run: Run, wanted: Filter) -> Iterator[tuple[Catalog, Ints]]:
    """Matching rollouts of each stage, newest first unless asked otherwise."""
    catalogs = [c for c in run.catalogs.values() if wanted.stage in ("", c.stage)]
    order = {name: place for place, name in enumerate(_stage_order(run))}
    catalogs.sort(key=lambda c: order.get(c.stage, -1), reverse=wanted.sort != "oldest")
    for catalog in catalogs:
        numbers = np.flatnonzero(_matching(catalog, wanted))
        yield catalog, numbers if wanted.sort == "oldest" else _newest_first(catalog, numbers)


def _stage_order(run: Run) -> list[str]:
    from rstar2.viewer.overview import stages

    return [stage["name"] for stage in stages(run)]


def _newest_first(catalog: Catalog, numbers: Ints) -> Ints:
    """Latest groups first, the rollouts of each in their own order."""
    rows = catalog.rollouts.rows[numbers]
    return numbers[np.lexsort((rows["member"], -rows["group"]))]


def _matching(catalog: Catalog, wanted: Filter) -> Any:
    rows: Rows = catalog.rollouts.rows
    mask = np.ones(len(rows), dtype=bool)
    if wanted.step is not None:
        mask &= rows["step"] == wanted.step
    if wanted.kind:
        mask &= rows["kind"] == catalog.kinds.find(wanted.kind)
    if wanted.reward == "none":
        mask &= np.isnan(rows["reward"])
    elif wanted.reward:
        mask &= (rows["reward"] > 0.5) == (wanted.reward == "1")
        mask &= ~np.isnan(rows["reward"])
    if wanted.kept:
        mask &= rows["kept"] == _KEPT[wanted.kept]
    if wanted.stop:
        mask &= rows["stop"] == STOPS.index(wanted.stop)
    if wanted.outcome == "failed":
        mask &= rows["failed"] > 0
    elif wanted.outcome:
        mask &= (rows["outcomes"] >> OUTCOMES.index(wanted.outcome) & 1) > 0
    if wanted.least is not None:
        mask &= rows["tokens"] >= wanted.least
    if wanted.most is not None:
        mask &= rows["tokens"] <= wanted.most
    return mask


# --------------------------------------------------------------------------- text


class _Call(msgspec.Struct):
    code: str = ""


class _Turn(msgspec.Struct):
    calls: tuple[_Call, ...] = ()


class _Trajectory(msgspec.Struct):
    id: str
    text: str = ""
    turns: tuple[_Turn, ...] = ()


class _Problem(msgspec.Struct):
    prompt: str


class _Group(msgspec.Struct):
    problem: _Problem
    trajectories: tuple[_Trajectory, ...]


class _Line(msgspec.Struct):
    group: _Group


_LINE = msgspec.json.Decoder(_Line)


def _search(matches: _Matches, wanted: Filter) -> tuple[list[tuple[Catalog, int]], int]:
    """Matches from `start` on, and the place in the list up to which was looked."""
    needle = wanted.text.casefold()
    deadline = monotonic() + SEARCH_S
    found: list[tuple[Catalog, int]] = []
    seen: tuple[tuple[str, int], dict[str, str] | None] = (("", -1), None)
    place = wanted.start
    while place < len(matches) and len(found) < wanted.limit and monotonic() < deadline:
        catalog, number = matches[place]
        group = catalog.groups[int(catalog.rollouts.rows[number]["group"])]
        key = (catalog.stage, group.at)
        if seen[0] != key:  # rollouts of a group mostly stand together
            seen = (key, _texts(catalog, group, needle))
        texts = seen[1]
        if texts is not None and needle in texts.get(catalog.name_of(number), ""):
            found.append((catalog, number))
        place += 1
    return found, place


def _texts(catalog: Catalog, group: GroupRef, needle: str) -> dict[str, str] | None:
    """What can be searched of each rollout; None if the line cannot contain the needle."""
    line = catalog.line(group)
    plain = _PLAIN.fullmatch(needle) and json.dumps(needle)[1:-1] == needle
    if plain and needle.encode() not in line.lower():
        return None
    try:
        read = _LINE.decode(line).group
    except msgspec.MsgspecError:
        return None
    prompt = read.problem.prompt.casefold()
    return {
        t.id: "\n".join(
            (prompt, t.text.casefold(), *(c.code.casefold() for n in t.turns for c in n.calls))
        )
        for t in read.trajectories
    }


# --------------------------------------------------------------------------- answers


def _answer(
    page: list[tuple[Catalog, int]],
    matches: _Matches,
    after: int,
    wanted: Filter,
    *,
    searched: int | None,
) -> dict[str, Any]:
    return {
        "rows": [row(catalog, number) for catalog, number in page],
        "total": len(matches),
        "start": wanted.start,
        "next": after if after < len(matches) else None,
        "searched": searched,
    }


def _whole(name: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"{name}={text!r}: must be a whole number")
    return int(text)

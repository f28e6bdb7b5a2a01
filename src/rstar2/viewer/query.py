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
    places = list(_ordered(run, wanted))
    total = sum(len(numbers) for _, numbers in places)
    flat = [(catalog, int(number)) for catalog, numbers in places for number in numbers]
    if wanted.sort not in ("newest", "oldest"):
        flat = _sorted(flat, _SORTS[wanted.sort])
    if not wanted.text:
        page = flat[wanted.start : wanted.start + wanted.limit]
        after = wanted.start + len(page)
        return _answer(page, total, after if after < total else None, wanted, searched=None)
    page, after = _search(run, flat, wanted)
    return _answer(page, total, after if after < total else None, wanted, searched=after)


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


def _sorted(flat: list[tuple[Catalog, int]], column: str | None) -> list[tuple[Catalog, int]]:
    assert column is not None
    columns = {id(c): np.nan_to_num(c.rollouts.rows[column], nan=-1.0) for c, _ in flat}
    values = np.array([columns[id(c)][n] for c, n in flat])
    return [flat[i] for i in np.argsort(-values, kind="stable")]


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


def _search(
    run: Run, flat: list[tuple[Catalog, int]], wanted: Filter
) -> tuple[list[tuple[Catalog, int]], int]:
    """Matches from `start` on, and the place in the list up to which was looked."""
    needle = wanted.text.casefold()
    deadline = monotonic() + SEARCH_S
    found: list[tuple[Catalog, int]] = []
    seen: dict[tuple[str, int], dict[str, str] | None] = {}
    place = wanted.start
    while place < len(flat) and len(found) < wanted.limit and monotonic() < deadline:
        catalog, number = flat[place]
        group = catalog.groups[int(catalog.rollouts.rows[number]["group"])]
        key = (catalog.stage, group.at)
        if key not in seen:
            seen.clear()  # rollouts of a group mostly stand together
            seen[key] = _texts(catalog, group, needle)
        texts = seen[key]
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
    total: int,
    after: int | None,
    wanted: Filter,
    *,
    searched: int | None,
) -> dict[str, Any]:
    return {
        "rows": [row(catalog, number) for catalog, number in page],
        "total": total,
        "start": wanted.start,
        "next": after,
        "searched": searched,
    }


def _whole(name: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"{name}={text!r}: must be a whole number")
    return int(text)

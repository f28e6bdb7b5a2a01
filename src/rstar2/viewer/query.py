"""Lists of rollouts: filtered by their figures, searched by text, sorted, one page at a time.

SQL does the filtering and sorting. Text is searched in the recorded lines, in the order of the
result and for a bounded time. The answer then says where to continue, so a search through a whole
run is many short requests instead of a long one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from rstar2.errors import UserError
from rstar2.record.index import decode_without_tokens
from rstar2.record.packed import line_text
from rstar2.report.latex import formulas
from rstar2.types import StopReason
from rstar2.viewer.catalog import OUTCOMES, rollout_cells
from rstar2.viewer.run import ViewedRun

PAGE, MOST_PAGE = 50, 200
SEARCH_S = 1.0
STOPS = tuple(stop.value for stop in StopReason)

_PLAIN = re.compile(r"[\x20-\x7e]*")
_REWARDS = {"1": "reward > 0.5", "0": "reward <= 0.5", "none": "reward IS NULL"}
_KEPT = {"yes": "kept = 1", "no": "kept = 0", "unused": "kept IS NULL"}
_NEWEST = "stage DESC, at DESC, member"
_ORDERS = {
    "newest": _NEWEST,
    "oldest": "stage, at, member",
    "longest": f"tokens DESC, {_NEWEST}",
    "entropy": f"entropy DESC, {_NEWEST}",
    "failed": f"failed DESC, {_NEWEST}",
    "turns": f"turns DESC, {_NEWEST}",
    "slowest": f"wall DESC, {_NEWEST}",
}
"""SQL puts NULL last in descending order. Equal rollouts are listed newest first."""

RolloutKey = tuple[int, int, int]
"""Stage, offset of the group, and member: the primary key of a rollout."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The rollouts to list; an empty field matches all."""

    stage: str = ""
    step: int | None = None
    kind: str = ""
    reward: str = ""
    """`1` correct, `0` wrong, `none` not graded."""
    kept: str = ""
    stop: str = ""
    outcome: str = ""
    """An outcome, or `failed` for any that counts as a tool error."""
    least: int | None = None
    """Bounds of the completion's length in tokens."""
    most: int | None = None
    text: str = ""
    sort: str = "newest"
    start: int = 0
    limit: int = PAGE

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Filter:
        """From a query string; raises UserError naming an invalid value."""
        values = {name: query.get(name, "").strip() for name in cls.__dataclass_fields__}
        numbers = {
            n: whole_number(n, values[n]) for n in ("step", "least", "most", "start", "limit")
        }
        choices = {
            "reward": tuple(_REWARDS),
            "kept": tuple(_KEPT),
            "stop": STOPS,
            "outcome": ("failed", *OUTCOMES),
            "sort": tuple(_ORDERS),
        }
        for name, allowed in choices.items():
            if values[name] and values[name] not in allowed:
                raise UserError(f"{name}={values[name]!r}: must be one of {', '.join(allowed)}")
        return cls(
            stage=values["stage"],
            step=numbers["step"],
            kind=values["kind"],
            reward=values["reward"],
            kept=values["kept"],
            stop=values["stop"],
            outcome=values["outcome"],
            least=numbers["least"],
            most=numbers["most"],
            text=values["text"],
            sort=values["sort"] or "newest",
            start=numbers["start"] or 0,
            limit=min(MOST_PAGE, numbers["limit"] or PAGE),
        )

    def where(self, stage: int | None) -> tuple[str, list[Any]]:
        """The SQL condition and its parameters; `stage` is the number of the stage to list."""
        conditions: list[tuple[str, Any]] = [
            ("stage = ?", stage if self.stage else None),
            ("step = ?", self.step),
            ("kind = ?", self.kind or None),
            ("stop = ?", self.stop or None),
            ("tokens >= ?", self.least),
            ("tokens <= ?", self.most),
            ("instr(outcomes, ?)", f" {self.outcome} " if self.outcome in OUTCOMES else None),
        ]
        used = [(sql, value) for sql, value in conditions if value is not None]
        plain = [
            "failed > 0" if self.outcome == "failed" else "",
            _REWARDS.get(self.reward, ""),
            _KEPT.get(self.kept, ""),
            "0" if self.stage and stage is None else "",
        ]
        all_conditions = [*(sql for sql, _ in used), *filter(None, plain)]
        return " AND ".join(all_conditions) or "1", [value for _, value in used]


def rollouts(run: ViewedRun, wanted: Filter) -> dict[str, Any]:
    """One page: rows, the number of matches, and where the next page starts (None: the end)."""
    condition, values = wanted.where(run.catalog.number_of(wanted.stage))
    counted = run.catalog.db.execute(f"SELECT count(*) FROM rollouts WHERE {condition}", values)
    (total,) = counted.fetchone()
    # Sorting only keys is several times faster than sorting whole rows. LIMIT -1 is no limit.
    keys = run.catalog.db.execute(
        f"SELECT stage, at, member FROM rollouts WHERE {condition} "
        f"ORDER BY {_ORDERS[wanted.sort]} LIMIT ? OFFSET ?",
        [*values, -1 if wanted.text else wanted.limit, wanted.start],
    )
    if wanted.text:
        page, after = _search(run, wanted, keys)
    else:
        page = [(stage, at, member) for stage, at, member in keys]
        after = wanted.start + len(page)
    return {
        "rows": [_row(run, key) for key in page],
        "total": total,
        "start": wanted.start,
        "next": after if after < total else None,
        "searched": after if wanted.text else None,
    }


def facets(run: ViewedRun) -> dict[str, list[str]]:
    """The values that filters can take in this run."""
    db = run.catalog.db
    kinds = [kind for (kind,) in db.execute("SELECT DISTINCT kind FROM groups") if kind]
    recorded = db.execute("SELECT DISTINCT stop, outcomes FROM rollouts").fetchall()
    stops = {stop for stop, _ in recorded}
    outcomes = {name for _, names in recorded for name in names.split()}
    return {
        "stages": [reader.stage for reader in run.catalog.readers.values()],
        "kinds": kinds,
        "stops": [name for name in STOPS if name in stops],
        "outcomes": [name for name in OUTCOMES if name in outcomes],
    }


def _row(run: ViewedRun, key: RolloutKey) -> dict[str, Any]:
    """One rollout as a list shows it."""
    query = (
        "SELECT rollouts.*, groups.id AS group_id, prompt FROM rollouts JOIN groups "
        "USING (stage, at) WHERE stage = ? AND at = ? AND member = ?"
    )
    row = run.catalog.db.execute(query, key).fetchone()
    return {
        "id": f"{row['group_id']}/{row['name']}",
        "group": row["group_id"],
        "stage": run.catalog.readers[row["stage"]].stage,
        "prompt": row["prompt"],
        "prompt_math": formulas(row["prompt"]),
        "kind": row["kind"],
        **rollout_cells(row),
    }


# --------------------------------------------------------------------------- text


def _search(
    run: ViewedRun, wanted: Filter, keys: Iterator[RolloutKey]
) -> tuple[list[RolloutKey], int]:
    """Matches among `keys`, and the position up to which the list was searched."""
    needle = wanted.text.casefold()
    is_plain = _PLAIN.fullmatch(needle) and json.dumps(needle)[1:-1] == needle
    in_line = needle.encode() if is_plain else b""
    deadline = monotonic() + SEARCH_S
    matches: list[RolloutKey] = []
    position = wanted.start
    texts: dict[int, str] = {}
    last_stage, last_at = 0, -1
    for stage, at, member in keys:
        if at != last_at or stage != last_stage:  # rollouts of a group are mostly neighbours
            if monotonic() > deadline:
                break
            last_stage, last_at = stage, at
            texts = _texts(run.catalog.line_at(stage, at), in_line)
        position += 1
        if texts and needle in texts.get(member, ""):
            matches.append((stage, at, member))
            if len(matches) == wanted.limit:
                break
    return matches, position


def _texts(line: bytes, needle: bytes) -> dict[int, str]:
    """The text of each rollout of a group by member; empty if the line has no needle in it."""
    try:
        if needle and needle not in line_text(line).lower():
            return {}
        recorded = decode_without_tokens(line).group
    except msgspec.MsgspecError:
        return {}
    prompt = recorded.problem.prompt.casefold()
    return {
        member: "\n".join(
            (prompt, t.text.casefold(), *(c.shown.casefold() for n in t.all_turns for c in n.calls))
        )
        for member, t in enumerate(recorded.trajectories)
    }


def whole_number(name: str, text: str) -> int | None:
    """The value of a parameter; None if it is empty, a UserError if it is not a whole number."""
    if not text:
        return None
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"{name}={text!r}: must be a whole number")
    return int(text)

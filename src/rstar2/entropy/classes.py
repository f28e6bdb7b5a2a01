"""The class of each sampled token, from the text alone. Pure.

| class       | tokens                                                                        |
|-------------|-------------------------------------------------------------------------------|
| reasoning   | free text, except the next two                                                |
| after_ok    | the first WINDOW tokens of free text after tool responses that all succeeded   |
| after_error | the same after a response that failed                                         |
| code        | the value of `code` in a tool call                                            |
| answer      | inside <answer>                                                               |
| format      | tags, special tokens, white space between them, the JSON around the code       |

The first character of a token that is not white space decides its class. Every sampled token has
exactly one class; prompts and tool responses have none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rstar2.types import Trajectory

WINDOW = 48
"""Tokens of free text after a tool response that count as reflection on it."""
TOP_SHARE = 0.2

TokenEntropies = list[list[float]]
"""The entropy of each sampled token, by turn."""

REASONING, AFTER_OK, AFTER_ERROR = "reasoning", "after_ok", "after_error"
CODE, ANSWER, FORMAT = "code", "answer", "format"
CLASSES = (REASONING, AFTER_OK, AFTER_ERROR, CODE, ANSWER, FORMAT)

_TAG = re.compile(r"</?(?:reason|tool_call|tool_response|answer)>|<\|[^<>|]{1,40}\|>")
_CODE = re.compile(r'"code"\s*:\s*"')
_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.S)


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    turn: int
    index: int
    """Its position in the turn."""
    piece: str
    kind: str
    entropy: float
    logprob: float
    top: bool = False
    """Among the 20% of the trajectory with the highest entropy."""


def classify(texts: Sequence[Sequence[str]], failures: Sequence[bool | None]) -> list[list[str]]:
    """The class of every token of every turn.

    `texts` holds the text of each token of each turn. `failures` holds for each turn whether a tool
    response before it failed; None if there was no response.
    """
    return [_turn(pieces, failed) for pieces, failed in zip(texts, failures, strict=True)]


def failures_before(trajectory: Trajectory) -> list[bool | None]:
    """For each turn, whether a tool response just before it failed; None if there was none."""
    before: list[bool | None] = [None]
    for turn in trajectory.all_turns:
        outcomes = [result.outcome for result in turn.results]
        before.append(any(o.failed for o in outcomes) if outcomes else None)
    return before[:-1]


def recorded_entropies(trajectory: Trajectory) -> TokenEntropies | None:
    """The entropies that the engine reported; None unless it did for all turns."""
    if any(turn.entropies is None for turn in trajectory.all_turns):
        return None
    return [list(turn.entropies or ()) for turn in trajectory.all_turns]


def tokens_of(
    trajectory: Trajectory,
    texts: Sequence[Sequence[str]],
    entropies: Sequence[Sequence[float]],
    share: float = TOP_SHARE,
) -> list[Token]:
    """All sampled tokens of a trajectory with their class; the top 20% are marked."""
    kinds = classify(texts, failures_before(trajectory))
    tokens = [
        Token(number, index, piece, kind, float(entropy), float(logprob))
        for number, (turn, pieces, values, names) in enumerate(
            zip(trajectory.all_turns, texts, entropies, kinds, strict=True)
        )
        for index, (piece, kind, entropy, logprob) in enumerate(
            zip(pieces, names, values, turn.logprobs, strict=True)
        )
    ]
    marked = top_tokens([token.entropy for token in tokens], share)
    return [
        Token(t.turn, t.index, t.piece, t.kind, t.entropy, t.logprob, i in marked)
        for i, t in enumerate(tokens)
    ]


def top_tokens(entropies: Sequence[float], share: float = TOP_SHARE) -> frozenset[int]:
    """Positions of the given share of tokens with the highest entropy; earlier ones win ties."""
    count = round(share * len(entropies))
    order = sorted(range(len(entropies)), key=lambda i: (-entropies[i], i))
    return frozenset(order[:count])


# --------------------------------------------------------------------------- one turn


def _turn(pieces: Sequence[str], failed: bool | None) -> list[str]:
    text = "".join(pieces)
    spans = _spans(text)
    free = REASONING if failed is None else AFTER_ERROR if failed else AFTER_OK
    left = WINDOW
    kinds, at, cursor = [], 0, 0
    for piece in pieces:
        start = at + len(piece) - len(piece.lstrip())
        start = min(start, at + max(0, len(piece) - 1))
        while cursor < len(spans) and spans[cursor][1] <= start:
            cursor += 1
        inside = cursor < len(spans) and spans[cursor][0] <= start
        if inside:
            kinds.append(spans[cursor][2])
        elif left > 0 or free == REASONING:
            kinds.append(free)
            left -= 1
        else:
            kinds.append(REASONING)
        at += len(piece)
    return kinds


def _spans(text: str) -> list[tuple[int, int, str]]:
    """(start, end, class) of everything that is not free text, in order, without overlap."""
    spans: list[tuple[int, int, str]] = []
    opened: tuple[str, int] | None = None
    for match in _TAG.finditer(text):
        tag = match[0]
        if opened is not None and (tag == f"</{opened[0]}>" or tag.startswith("<|")):
            spans += _inner(text, opened[0], opened[1], match.start())
            opened = None
        elif opened is not None:
            continue  # text within a call or an answer, even if it looks like a tag
        spans.append((match.start(), match.end(), FORMAT))
        if tag in ("<tool_call>", "<answer>"):
            opened = (tag[1:-1], match.end())
    if opened is not None:
        spans += _inner(text, opened[0], opened[1], len(text))
    spans.sort()
    return sorted([*spans, *_blanks(text, spans)])


def _blanks(text: str, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """White space between two tags: part of the format."""
    edges = [0, *(edge for start, end, _ in spans for edge in (start, end)), len(text)]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(a, b, FORMAT) for a, b in gaps if spans and a < b and not text[a:b].strip()]


def _inner(text: str, tag: str, start: int, end: int) -> list[tuple[int, int, str]]:
    """The spans between an opening tag and its end."""
    if tag == "answer":
        return [(start, end, ANSWER)] if start < end else []
    opening = _CODE.search(text, start, end)
    if opening is None:
        return [(start, end, FORMAT)] if start < end else []
    code = opening.end()
    string = _STRING.match(text, code, end)
    close = string.end() if string else code
    parts = [(start, code, FORMAT), (code, close, CODE), (close, end, FORMAT)]
    return [part for part in parts if part[0] < part[1]]

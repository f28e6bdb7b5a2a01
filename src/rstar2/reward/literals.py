"""Answers that need no algebra: integers and choices, compared at once, in any process."""

from __future__ import annotations

import re

_SEPARATOR = r"(?:,|\{,\}|\\[,!;: ]|~|\s)+"
_INTEGER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<digits>[0-9]+|[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+)(?:\.0*)?"
)
_CHOICE = re.compile(r"[({\[]?\s*([A-Ja-j])\s*[)}\].:]*")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def as_integer(text: str) -> str | None:
    """An integer literal in canonical form ("-12"), of any size; None if it is anything else.

    Takes what people write around integers: $...$, thousands separators, spaces, "7.0".
    """
    bare = text.replace("\u2212", "-").strip().removeprefix("$").removesuffix("$").strip()
    match = _INTEGER.fullmatch(bare)
    if match is None:
        return None
    digits = "".join(c for c in match["digits"] if c.isdigit()).lstrip("0") or "0"
    return f"-{digits}" if match["sign"] == "-" and digits != "0" else digits


def integer_equal(answer: str, truth: str) -> bool:
    """Both are integer literals, and the same integer."""
    left, right = as_integer(answer), as_integer(truth)
    return left is not None and left == right


def as_choice(text: str) -> str | None:
    """The letter of a multiple-choice answer: "C", "(c)", "\\text{C}." -> "C"."""
    bare = _TEXT.sub(r"\1", text.strip().strip("$")).strip()
    match = _CHOICE.fullmatch(bare)
    return match[1].upper() if match else None


def choice_equal(answer: str, truth: str) -> bool:
    """Both name a letter, and the same one."""
    left, right = as_choice(answer), as_choice(truth)
    return left is not None and left == right

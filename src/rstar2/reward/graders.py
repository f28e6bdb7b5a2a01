"""Is an answer equal to the truth? Pure functions, no torch; `math_equal` runs in the pool.

math-verify's own time-outs are signals: they work in no thread and stop no C code. They are off
here; whoever calls `math_equal` must be able to kill it (the code environment's pool does). So
it must not be called from the event loop or a thread: an answer such as 9^{9^{9^9}} never ends.
"""

from __future__ import annotations

import logging
import re

_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.0*)?")
_PLAIN = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_SPACING = re.compile(r"\\[,!;: ]|\{,\}(?=[0-9]{3})|~|\s")
_CHOICE = re.compile(r"[({\[]?\s*([A-Ja-j])\s*[)}\].:]*")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def as_integer(text: str) -> str | None:
    """An integer literal in canonical form ("-12"), of any size; None if it is anything else.

    Takes what people write around integers: $...$, thousands separators, spaces, "7.0".
    """
    bare = text.strip().replace("\u2212", "-").removeprefix("$").removesuffix("$")
    bare = _SPACING.sub(lambda match: "," if match[0] == "{,}" else "", bare)
    if not (_PLAIN.fullmatch(bare) or _GROUPED.fullmatch(bare)):
        return None
    bare = bare.split(".", 1)[0].replace(",", "")
    digits = bare.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if bare.startswith("-") and digits != "0" else digits


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


def math_equal(answer: str, truth: str) -> bool:
    """Mathematical equivalence by math-verify. May run for ever: call it where it can be killed.

    Only the whole of each text is read, so that an answer cannot pass by containing the truth.
    An answer that cannot be read is wrong; an exception while comparing is the grader's failure
    and is raised.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):  # "time-outs are off": we know
        logging.getLogger(name).setLevel(logging.ERROR)
    config = [LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)]
    left, right = (
        parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)
        for text in (truth, answer)
    )
    return bool(verify(left, right, timeout_seconds=None, raise_on_error=True))

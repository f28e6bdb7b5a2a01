"""Mathematical equivalence of two LaTeX texts, by math-verify. Runs in the code environment.

math-verify's own time-outs use signals, which work only in the main thread and do not stop C code,
so they are off here. The caller must be able to kill `math_equal`, as the code environment does;
never call it from the event loop or a thread: comparing with 9^{9^{9^9}} does not end.

Importing this module takes seconds on purpose: it runs the parser's first-time initialisation, so
that processes forked afterwards answer in milliseconds.
"""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify

_BASED = re.compile(r"([0-9a-zA-Z]+)_\{?([0-9]{1,2})\}?")
_DECIMALS = re.compile(r"\.([0-9]+)")
_WHOLE = [LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)]

for _name in ("math_verify.parser", "math_verify.grader"):  # it warns that time-outs are off
    logging.getLogger(_name).setLevel(logging.ERROR)


def math_equal(answer: str, truth: str) -> bool:
    """Whether two LaTeX texts are equivalent. May never return: call it where it can be killed.

    Each text is read as a whole, so that an answer cannot pass by containing the truth. An answer
    that cannot be parsed is wrong; an exception during the comparison is the grader's failure and
    is raised.
    """
    value, written = _based(truth), _BASED.fullmatch(answer.strip())
    if value is not None and written is not None:  # math-verify drops the base
        return value == _based(answer)
    gold, given = (
        parse(f"\\boxed{{{text}}}", extraction_config=_WHOLE, parsing_timeout=None)
        for text in (truth, answer)
    )
    decimals = max(map(len, _DECIMALS.findall(truth)), default=0)
    return bool(
        verify(
            gold,
            given,
            float_rounding=max(6, decimals),
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


def _based(text: str) -> int | None:
    """The value of a number written with its base, such as 52_8."""
    match = _BASED.fullmatch(text.strip())
    if match is None or not 2 <= int(match[2]) <= 36 or len(match[1]) > 100:
        return None
    try:
        return int(match[1], int(match[2]))
    except ValueError:  # a digit that the base does not have
        return None


_WARM_UP = (
    ("\\frac{84}{2}", "42"),
    ("\\dfrac{3}{7}", "\\frac37"),
    ("5/7", "0.714"),
    ("-\\frac{85}{3}", "-28.3"),
    ("x^2+2x+1", "(x+1)^2"),
    ("7\\sqrt{3}", "\\sqrt{5}+1"),
    ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,-4)"),
    ("(-\\infty, 2) \\cup [3, 5]", "[1, 2)"),
    ("x < 3", "-2 \\le x \\le 7"),
    ("\\{1, 2\\}", "1, -2"),
    ("x = 5", "y = 2x + 3"),
    ("x \\in [-2, 7]", "[-2,7]"),
    ("\\begin{pmatrix} 1 \\\\ -2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"),
    ("12 \\text{ cm}", "\\text{Evelyn}"),
    ("50\\%", "\\$18.90"),
    ("90^\\circ", "2^{10}"),
    ("6 - 5i", "e^{i\\pi}"),
    ("\\cos x", "\\log_2 8"),
    ("10!", "\\binom{5}{2}"),
    ("1 \\pm \\sqrt{2}", "12"),
)
for _pair in _WARM_UP:
    math_equal(*_pair)

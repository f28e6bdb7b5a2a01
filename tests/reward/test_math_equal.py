"""`math_equal` on hand-picked pairs and on the golds of public problem sets.

It runs in worker processes, as in production: it may hang, and its import is slow.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rstar2.reward.grade import as_integer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        yield executor


def verdicts(pool: ProcessPoolExecutor, pairs: list[tuple[str, str]]) -> list[bool]:
    from rstar2.reward.math_equal import math_equal

    answers, truths = zip(*pairs, strict=True)
    return list(pool.map(math_equal, answers, truths, timeout=120, chunksize=16))


SAME = [
    ("\\frac{84}{2}", "42"),
    ("\\dfrac12", "\\frac{1}{2}"),
    ("0.5", "\\frac{1}{2}"),
    ("x=5", "5"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("\\left(3,\\frac{\\pi}{2}\\right)", "(3, \\pi/2)"),
    ("x < 3", "(-\\infty, 3)"),
    ("\\{2, 1\\}", "\\{1, 2\\}"),
    ("\\$18.90", "18.90"),
    ("50\\%", "50"),
    ("52_8", "52_{8}"),
    ("42_{10}", "52_8"),
    ("52", "52_8"),
    ("\\text{Evelyn}", "\\text{Evelyn}"),
    ("12 \\text{ cm}", "12"),
]
DIFFERENT = [
    ("43", "42"),
    ("-42", "42"),
    ("52_9", "52_8"),
    ("59_8", "52_8"),
    (".0000673", ".0000672"),
    ("(3, 4)", "(4, 3)"),
    ("42 \\text{ or } 43", "42"),
    ("41, 42, 43", "42"),
    ("\\text{the answer is } 42 \\text{ or } 7", "42"),
    ("x", "42"),
    ("", "42"),
    ("\\frac{1}", "1"),
    ("\\text{Evelyn}", "\\text{Angela}"),
    ("[1, 2)", "[1, 2]"),
]


@pytest.mark.parametrize(("pairs", "verdict"), [(SAME, True), (DIFFERENT, False)])
def test_pairs(pairs: list[tuple[str, str]], verdict: bool, pool: ProcessPoolExecutor) -> None:
    got = verdicts(pool, pairs)
    wrong = [pair for pair, same in zip(pairs, got, strict=True) if same != verdict]
    assert not wrong


def test_nonsense_as_truth_is_an_error_and_not_a_verdict(pool: ProcessPoolExecutor) -> None:
    from rstar2.reward.math_equal import math_equal

    with pytest.raises(ValueError, match="nan or zoo"):
        pool.submit(math_equal, "5", "\\frac{1}{0}").result(60)


# --------------------------------------------------------------------------- real golds


def read(path: Path, field: str) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [str(row[field]).rpartition("####")[2].strip() for row in rows]


def perturbed(gold: str) -> str:
    """Another number: one digit of the value changed (no exponent, no unit), else the sign."""
    digits = [m for m in re.finditer("[0-9]", gold) if not gold[: m.start()].endswith(("^", "^{"))]
    if not digits:
        return f"-({gold})"
    digit = digits[0]
    return f"{gold[: digit.start()]}{(int(digit[0]) + 1) % 10}{gold[digit.end() :]}"


def test_math500_golds(shared_data: Path, pool: ProcessPoolExecutor) -> None:
    golds = read(shared_data / "math500.jsonl", "answer")
    own = verdicts(pool, [(gold, gold) for gold in golds])
    rejected = [gold for gold, accepted in zip(golds, own, strict=True) if not accepted]
    assert len(rejected) <= 0.01 * len(golds), rejected
    changed = [(perturbed(gold), gold) for gold in golds]
    got = verdicts(pool, changed)
    assert [pair for pair, accepted in zip(changed, got, strict=True) if accepted] == []


@pytest.mark.parametrize("name", ["aime24.jsonl", "gsm8k/test.jsonl"])
def test_integer_golds(name: str, shared_data: Path, pool: ProcessPoolExecutor) -> None:
    golds = read(shared_data / name, "answer")
    rejected = [gold for gold in golds if as_integer(gold) is None]
    assert len(rejected) <= 0.01 * len(golds), rejected
    assert [gold for gold in golds if as_integer(perturbed(gold)) == as_integer(gold)] == []
    sample = [(as_integer(gold) or gold, gold) for gold in golds[:: len(golds) // 30]]
    assert all(verdicts(pool, sample))

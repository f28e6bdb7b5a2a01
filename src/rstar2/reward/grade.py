"""Trajectory -> Reward: 1 if the boxed content of its last <answer> equals the truth, else 0.

There is no shaping and no partial credit. Integer literals and choices are compared in this
process; mathematical equivalence runs in the code environment, which can stop it
(`math_equal.py`). The grader `integer` only requires that the truth is an integer: an answer in
another notation (`\\$42`, `x = 42`, `\\frac{84}{2}`) is left to math-verify, as with `math`, so
an operation that is left to do (`40 + 2`) is right too. `number` wants a number literal.
Decisions that the paper leaves open:

- no <answer>, or no \\boxed{} in it: reward 0;
- cut by the length limit: reward 0 even with a right answer (as in the paper);
- stopped by an infrastructure failure: returned unchanged, without a reward;
- the grader died, timed out or raised: a Failure named `grader...`, never a 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Protocol

from rstar2.codeenv.protocol import VerifyRequest, VerifyResult
from rstar2.errors import DataError, InfrastructureError
from rstar2.types import Failure, Problem, Reward, StopReason, Trajectory

GRACE_S = 5.0
"""The grader waits this much longer than the client's own deadline."""
MAX_ANSWER_CHARS = 2000
"""Longer answers are wrong: no truth is that long, and parsing could take minutes."""


# --------------------------------------------------------------------------- numbers and choices

_SEPARATOR = r"(?:,|\{,\}|\\[,!;: ]|~|\s)+"
_INTEGER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<digits>[0-9]+|[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+)(?:\.0*)?"
)
_DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]+")
_CHOICE = re.compile(r"[({\[]?\s*([A-Ja-j])\s*[)}\].:]*")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def as_integer(text: str) -> str | None:
    """An integer literal in canonical form ("-12"), of any size; None if it is anything else.

    Accepts common notation around integers: $...$, thousands separators, spaces, "7.0".
    """
    bare = text.replace("\u2212", "-").strip().removeprefix("$").removesuffix("$").strip()
    match = _INTEGER.fullmatch(bare)
    if match is None:
        return None
    digits = "".join(c for c in match["digits"] if c.isdigit()).lstrip("0") or "0"
    return f"-{digits}" if match["sign"] == "-" and digits != "0" else digits


def as_number(text: str) -> Fraction | None:
    """The value of an integer literal or a decimal ("-3.50"); None if it is anything else."""
    if (integer := as_integer(text)) is not None:
        return Fraction(int(integer))
    bare = text.replace("\u2212", "-").strip().removeprefix("$").removesuffix("$").strip()
    return Fraction(bare) if _DECIMAL.fullmatch(bare) else None


def as_choice(text: str) -> str | None:
    """The letter of a multiple-choice answer: "C", "(c)", "\\text{C}." -> "C"."""
    bare = _TEXT.sub(r"\1", text.strip().strip("$")).strip()
    match = _CHOICE.fullmatch(bare)
    return match[1].upper() if match else None


def choice_equal(answer: str, truth: str) -> bool:
    """Whether both name the same letter."""
    left, right = as_choice(answer), as_choice(truth)
    return left is not None and left == right


def number_equal(answer: str, truth: str) -> bool:
    """Whether both are literals of the same number."""
    left, right = as_number(answer), as_number(truth)
    return left is not None and left == right


# --------------------------------------------------------------------------- graders


class Verifier(Protocol):
    """The method of the code environment's client that grading needs."""

    async def verify(self, request: VerifyRequest) -> VerifyResult: ...


@dataclass(frozen=True, slots=True)
class Grader:
    """How answers of one kind are checked."""

    in_process: Callable[[str, str], bool | None]
    """(answer, truth) -> verdict without I/O; None: `function` decides."""
    readable: Callable[[str], object | None]
    """truth -> None if this grader cannot read it."""
    expects: str
    """What a truth must be, for messages."""
    function: str | None = None
    """Name in the code environment's table of trusted functions."""


def _fast_path(answer: str, truth: str) -> bool | None:
    """Decide what needs no algebra: empty answers, equal texts and pairs of integer literals."""
    if not answer.strip():
        return False
    if answer.strip() == truth.strip():
        return True
    left, right = as_integer(answer), as_integer(truth)
    return left == right if left is not None and right is not None else None


GRADERS = {
    "integer": Grader(_fast_path, as_integer, "an integer literal such as 42", "math"),
    "number": Grader(number_equal, as_number, "a number such as 42 or 3.5"),
    "choice": Grader(choice_equal, as_choice, "a letter from A to J"),
    "math": Grader(_fast_path, lambda truth: truth.strip() or None, "LaTeX or plain text", "math"),
}
"""`Problem.grader` is a key of this table."""


def check_gold(problem: Problem, where: str = "") -> None:
    """Refuse a problem that no answer can satisfy; called when problems are loaded.

    `where` is the problem's place, such as `problems.jsonl:7`, for the message.
    """
    place = f"{where}: problem {problem.id}" if where else f"problem {problem.id}"
    grader = GRADERS.get(problem.grader)
    if grader is None:
        close = get_close_matches(problem.grader, GRADERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"{place}: grader = {problem.grader!r} is unknown: {hint}The graders are "
            f"{', '.join(sorted(GRADERS))}"
        )
    if len(problem.answer) > MAX_ANSWER_CHARS:
        raise DataError(
            f"{place}: answer has {len(problem.answer)} characters, and longer ones than "
            f"{MAX_ANSWER_CHARS} are never accepted: shorten it or remove the problem"
        )
    if grader.readable(problem.answer) is None:
        raise DataError(
            f"{place}: answer = {problem.answer[:80]!r} cannot be checked by grader = "
            f"{problem.grader!r}, which expects {grader.expects}: correct the answer, choose "
            f"another grader ({', '.join(sorted(GRADERS))}) or remove the problem"
        )


async def rejected_golds(
    problems: Iterable[Problem], verifier: Verifier, deadline_s: float
) -> list[tuple[Problem, str]]:
    """Problems whose own truth is not accepted as an answer, each with the reason."""

    async def check(problem: Problem) -> str | None:
        grader = GRADERS[problem.grader]
        if grader.function is None or grader.readable is as_integer:
            return None if grader.in_process(problem.answer, problem.answer) else "not accepted"
        verdict = await _verify(
            f"gold/{problem.id}", grader.function, problem.answer, problem.answer, verifier,
            deadline_s,
        )  # fmt: skip
        if isinstance(verdict, Failure):
            return f"{verdict.name}: {verdict.message}"
        return None if verdict else "not accepted"

    listed = list(problems)
    reasons = await asyncio.gather(*map(check, listed))
    return [(p, why) for p, why in zip(listed, reasons, strict=True) if why is not None]


async def grade(
    trajectory: Trajectory, problem: Problem, verifier: Verifier, deadline_s: float
) -> Trajectory:
    """The trajectory with its Reward, or with the Failure of the grader."""
    if trajectory.stop.infrastructure:
        return trajectory
    started = time.perf_counter()
    value: float | Failure = 0.0
    answer = trajectory.answer
    if answer is not None and trajectory.stop is not StopReason.MAX_LENGTH:
        value = await judge(answer, problem, verifier, deadline_s, id=trajectory.id)
    if isinstance(value, Failure):
        return replace(trajectory, reward=None, failure=value)
    reward = Reward(value, answer, problem.grader, time.perf_counter() - started)
    return replace(trajectory, reward=reward, failure=None)


async def judge(
    answer: str, problem: Problem, verifier: Verifier, deadline_s: float, *, id: str
) -> float | Failure:
    """The reward of one answer (1.0 if it is right, else 0.0), or the Failure of the grader."""
    grader = GRADERS.get(problem.grader)
    if grader is None:
        return Failure("grader_unknown", f"there is no grader {problem.grader!r}")
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    verdict: bool | Failure | None = grader.in_process(answer, problem.answer)
    if verdict is None and grader.function is not None:
        truth = as_integer(problem.answer) or problem.answer  # "1,000" could be read as a pair
        verdict = await _verify(id, grader.function, answer, truth, verifier, deadline_s)
    return verdict if isinstance(verdict, Failure) else float(bool(verdict))


async def _verify(
    id: str, function: str, answer: str, truth: str, verifier: Verifier, deadline_s: float
) -> bool | Failure:
    # The id includes the contents, because a server remembers results by id.
    digest = hashlib.blake2b(f"{answer}\x1f{truth}".encode("utf-8", "replace"), digest_size=8)
    request = VerifyRequest(
        id=f"{id}/grade-{digest.hexdigest()}",
        function=function,
        arguments={"answer": answer, "truth": truth},
        deadline_s=deadline_s,
    )
    try:
        async with asyncio.timeout(deadline_s + GRACE_S):
            result = await verifier.verify(request)
    except TimeoutError:
        return Failure("grader_deadline", f"no verdict within {deadline_s + GRACE_S:.0f} s")
    except (InfrastructureError, OSError) as error:
        name = error.name if isinstance(error, InfrastructureError) else "connection"
        return Failure(f"grader_{name}", str(error) or type(error).__name__)
    if result.error is not None:
        return Failure(f"grader_{result.error}", result.message)
    if result.id != request.id or not isinstance(result.value, bool):
        return Failure(
            "grader_nonsense", f"requested {request.id}, got {result.id}: {result.value!r}"
        )
    return result.value

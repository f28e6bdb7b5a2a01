"""The embedded task: eight kinds of two-argument integer problems that need the Python tool.

- Problems have two or three wordings, always with `a` before `b`. They are split by the unordered
  pair {a, b}: a held-out pair appears in no training text of any kind.
- `sft_conversations` teaches only the format. A conversation computes one of four operations: the
  right one in 26%, the usual mistake in 36%, so the most likely operation is wrong. Clean code is
  rarer than code with a slip, and one slip is the most frequent single form. This leaves room for
  exploration: RL must learn which operation is right and to write clean code.
- Tool responses in SFT text come from running the code and match those of the code environment.

Everything is a pure function of its arguments.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rstar2.codeenv.jail import frames, runner
from rstar2.errors import DataError
from rstar2.paper_format import TOOL_NAME
from rstar2.tool_text import tool_text
from rstar2.types import Conversation, Message, Outcome, Problem, Split, ToolResult

HELDOUT_SHARE = 8
"""One pair of arguments in this many is held out."""

MAX_REPEATS = 2000
"""A kind is exhausted after this many draws in a row without a new problem."""

CALL_HEAD = f'<tool_call>\n{{"name": "{TOOL_NAME}", "arguments": {{"code": "'
CALL_TAIL = '", "input": ""}}\n</tool_call>'
ANSWER_HEAD = "<answer>\n\\boxed{"
ANSWER_TAIL = "}\n</answer>"
"""The text around the code of every call and around every answer in SFT text."""


# --------------------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class Operation:
    """An expression in `{a}` and `{b}`, and the same one with an API that does not exist."""

    expression: str
    misspelt: str

    @property
    def imports(self) -> bool:
        return "math." in self.expression


OPERATIONS = {
    "product": Operation("{a} * {b}", "math.mul({a}, {b})"),
    "gcd": Operation("math.gcd({a}, {b})", "math.hcf({a}, {b})"),
    "lcm": Operation("math.lcm({a}, {b})", "math.multiple({a}, {b})"),
    "range_sum": Operation("sum(range({a}, {b} + 1))", "range({a}, {b} + 1).sum()"),
    "binomial": Operation("math.comb({a}, {b})", "math.choose({a}, {b})"),
    "remainder": Operation("{a} % {b}", "math.mod({a}, {b})"),
    "digit_sum": Operation("sum(map(int, str({a} ** {b})))", "sum(str({a} ** {b}))"),
    "multiples": Operation("{a} // {b}", "math.div({a}, {b})"),
    "addition": Operation("{a} + {b}", "math.add({a}, {b})"),
    "difference": Operation("{a} - {b}", "math.sub({a}, {b})"),
}


# --------------------------------------------------------------------------- kinds


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem: its wordings, the distribution of its arguments and its solution.

    `mistake` is the operation that SFT most often computes instead. Each kind's right operation is
    the mistake of exactly one other kind, so all operations are right and wrong equally often.
    """

    wordings: tuple[str, ...]
    draw: Callable[[random.Random], tuple[int, int]]
    solve: Callable[[int, int], int]
    mistake: str

    @property
    def distractors(self) -> tuple[str, str, str]:
        """What SFT computes instead of the right operation; the first is the most frequent."""
        return (self.mistake, "addition", "difference")


def _between(a: tuple[int, int], b: tuple[int, int]) -> Callable[[random.Random], tuple[int, int]]:
    return lambda rng: (rng.randint(*a), rng.randint(*b))


def _sharing_a_factor(top: int) -> Callable[[random.Random], tuple[int, int]]:
    """Pairs with a common divisor other than their difference, so that product differs from lcm
    and gcd from difference."""

    def draw(rng: random.Random) -> tuple[int, int]:
        while True:
            factor = rng.randint(2, top // 12)
            a, b = rng.sample(range(2, top // factor + 1), 2)
            if abs(a - b) != math.gcd(a, b):
                return a * factor, b * factor

    return draw


def _range(rng: random.Random) -> tuple[int, int]:
    """Bounds whose sum stays below 10^6: the tiny model miscopies longer numbers."""
    first = rng.randint(1, 699)
    return first, first + rng.randint(3, 699)


_LARGEST_SET = {2: 1414, 3: 182, 4: 71, 5: 43, 6: 32}
"""Binomials up to here stay below 10^6, as short as other answers; about 1,700 of them."""


def _choice(rng: random.Random) -> tuple[int, int]:
    b = min(rng.randint(2, 6), rng.randint(2, 6))
    return rng.randint(b + 3, _LARGEST_SET[b]), b


def _digit_sum(a: int, b: int) -> int:
    return sum(map(int, str(a**b)))


_KINDS = {
    "product": Kind(
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "Find the product of {a} and {b}."),
        _between((11, 9999), (3, 99)),
        lambda a, b: a * b,
        "multiples",
    ),
    "gcd": Kind(
        (
            "What is the greatest common divisor of {a} and {b}?",
            "Find gcd({a}, {b}).",
            "Find the largest integer that divides both {a} and {b}.",
        ),
        _sharing_a_factor(4999),
        math.gcd,
        "lcm",
    ),
    "lcm": Kind(
        (
            "What is the least common multiple of {a} and {b}?",
            "Find lcm({a}, {b}).",
            "Find the smallest positive integer that both {a} and {b} divide.",
        ),
        _sharing_a_factor(999),
        math.lcm,
        "gcd",
    ),
    "range_sum": Kind(
        ("Add up all integers from {a} to {b}.", "What is the sum of the integers {a} to {b}?"),
        _range,
        lambda a, b: (a + b) * (b - a + 1) // 2,
        "product",
    ),
    "binomial": Kind(
        (
            "From {a} things, how many ways are there to choose {b}?",
            "What is {a} choose {b}?",
            "A set has {a} elements. How many subsets have {b} elements?",
        ),
        _choice,
        math.comb,
        "range_sum",
    ),
    "remainder": Kind(
        (
            "What is the remainder when {a} is divided by {b}?",
            "Find {a} modulo {b}.",
            "Of {a} things packed in boxes of {b}, how many are left over?",
        ),
        _between((100, 9999), (5, 99)),
        lambda a, b: a % b,
        "digit_sum",
    ),
    "digit_sum": Kind(
        (
            "What is the sum of the digits of {a} to the power {b}?",
            "Add the digits of {a}^{b}.",
        ),
        _between((2, 99), (2, 60)),
        _digit_sum,
        "binomial",
    ),
    "multiples": Kind(
        (
            "Up to {a}, how many positive integers are multiples of {b}?",
            "Among the first {a} positive integers, how many are divisible by {b}?",
        ),
        _between((100, 9999), (3, 99)),
        lambda a, b: a // b,
        "remainder",
    ),
}

KINDS: tuple[str, ...] = tuple(_KINDS)

EXAMPLES: tuple[str, ...] = (
    "What is 48 times 57?",
    "Find gcd(84, 36).",
    "What is the least common multiple of 12 and 18?",
    "Add up all integers from 10 to 40.",
    "What is 30 choose 4?",
    "Find 1234 modulo 56.",
    "Add the digits of 12^9.",
    "Up to 500, how many positive integers are multiples of 7?",
)
"""One question of each kind, in the order of KINDS."""

_QUESTIONS = re.compile(
    "|".join(
        re.sub(r"\\{[ab]\\}", r"\\d+", re.escape(wording))
        for kind in _KINDS.values()
        for wording in kind.wordings
    )
)


def is_known_question(text: str) -> bool:
    """Whether a text is a question of one of the kinds, in one of their wordings."""
    return _QUESTIONS.fullmatch(text.strip()) is not None


def heldout(a: int, b: int) -> bool:
    """The split depends only on the unordered pair, so no kind leaks the answers of another."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low},{high}".encode()).digest()
    return digest[0] % HELDOUT_SHARE == 0


def _draw(kind: str, split: Split, rng: random.Random) -> tuple[int, int]:
    while True:
        a, b = _KINDS[kind].draw(rng)
        if heldout(a, b) == (split == "heldout"):
            return a, b


def _problem(kind: str, a: int, b: int, wording: int) -> Problem:
    return Problem(
        id=f"{kind}-{a}-{b}-w{wording}",
        prompt=_KINDS[kind].wordings[wording].format(a=a, b=b),
        answer=str(_KINDS[kind].solve(a, b)),
        grader="integer",
        kind=kind,
        source="arithmetic",
        meta={"a": a, "b": b},
    )


def make_problems(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems with distinct (kind, a, b), balanced over the kinds, in shuffled order."""
    rng = random.Random(f"arithmetic {split} {seed}")
    seen: set[tuple[str, int, int]] = set()
    problems: list[Problem] = []
    repeats = 0
    while len(problems) < count:
        kind = KINDS[len(problems) % len(KINDS)]
        a, b = _draw(kind, split, rng)
        if (kind, a, b) in seen:
            repeats += 1
            if repeats > MAX_REPEATS:
                raise DataError(
                    f"count={count}: the {split} split has too few distinct {kind} problems; "
                    f"ask for fewer than {len(problems)}"
                )
            continue
        repeats = 0
        seen.add((kind, a, b))
        problems.append(_problem(kind, a, b, rng.randrange(len(_KINDS[kind].wordings))))
    rng.shuffle(problems)
    return problems


# --------------------------------------------------------------------------- SFT text

CURRICULUM_SHARE = 3 / 16
"""This share of the stream, at its start, is only copying turns."""
COPY_SHARE = 0.35
"""Share of copying turns after that; a small model learns to copy numbers last."""

RIGHT_SHARE = 0.26
DISTRACTOR_SHARES = (0.36, 0.19, 0.19)

RETRY_SHARE = 0.9
"""Probability of a retry after a failed or silent call; otherwise the answer is a guess."""
MAX_CALLS = 3
UNTAGGED_SHARE = 0.05
DOUBLED_SHARE = 0.05

FIRST_FORMS = {
    "print": 0.16,
    "x": 0.13,
    "result": 0.13,
    "python2": 0.28,
    "open_parenthesis": 0.05,
    "missing_import": 0.06,
    "missing_print": 0.06,
    "wrong_name": 0.05,
    "wrong_api": 0.05,
    "wrong_module": 0.03,
}
"""Forms of the first call: 42% clean (the first three); the most frequent form is a slip."""
RETRY_FORMS = {
    "print": 0.34,
    "x": 0.20,
    "result": 0.20,
    "python2": 0.10,
    "open_parenthesis": 0.04,
    "missing_import": 0.04,
    "missing_print": 0.02,
    "wrong_name": 0.03,
    "wrong_api": 0.03,
}

CALL_REASONS = ("Run code.", "Use Python.")
RETRY_REASONS = ("Try again.",)
ANSWER_REASONS = ("Done.",)
GUESS_REASONS = ("A guess.",)


def write_code(operation: str, form: str, a: int, b: int) -> str:
    """The program that computes an operation in a given form, including its slip."""
    spec = OPERATIONS[operation]
    expression = spec.expression.format(a=a, b=b)
    if form == "wrong_api":
        expression = spec.misspelt.format(a=a, b=b)
    head = "import math\n" if "math." in expression else ""
    if not spec.imports and form in ("missing_import", "wrong_module"):
        form = "wrong_name"  # nothing to import: use the other NameError
    if form == "missing_import":
        head, form = "", "print"
    elif form == "wrong_module":
        head, form = "import maths\n", "print"
        expression = expression.replace("math.", "maths.")
    bodies = {
        "x": f"x = {expression}\nprint(x)",
        "result": f"result = {expression}\nprint(result)",
        "python2": f"print {expression}",
        "open_parenthesis": f"print({expression}",
        "missing_print": f"x = {expression}",
        "wrong_name": f"x = {expression}\nprint(y)",
    }
    return head + bodies.get(form, f"print({expression})")


def run_trusted(code: str) -> ToolResult:
    """Run a program of `write_code` in this process; the result equals that of a real call."""
    printed: list[str] = []
    names = {"print": lambda value: printed.append(f"{value}\n"), "__name__": "__main__"}
    record = runner.execute(code, names, limit=10_000)
    stdout = "".join(printed)
    outcome = {
        frames.NOTHING: Outcome.OK if stdout else Outcome.NO_OUTPUT,
        frames.EXCEPTION: Outcome.EXCEPTION,
        frames.SYNTAX: Outcome.SYNTAX_ERROR,
    }[record.kind]
    return ToolResult("", outcome, stdout=stdout, traceback=record.text, message=record.message)


def sft_conversations(count: int, seed: int) -> Iterator[Conversation]:
    """A stream to train on in this order: only copying first, then copying mixed with tool use."""
    rng = random.Random(f"arithmetic sft {seed}")
    opening = int(count * CURRICULUM_SHARE)
    for index in range(count):
        if index < opening or rng.random() < COPY_SHARE:
            yield copy_turn(index, rng)
        else:
            yield _tool_conversation(index, rng)


def copy_turn(index: int, rng: random.Random) -> Conversation:
    """Repeat numbers as they are, as a JSON list or as an answer; no mathematics."""
    form = rng.choice(("plain", "json", "answer", "answer"))
    if form == "answer":
        number = rng.randrange(10 ** rng.randint(1, 9))
        question = f"<tool_response>\n{number}\n</tool_response>"
        answer = (
            f"<reason>{rng.choice(ANSWER_REASONS)}</reason>\n{ANSWER_HEAD}{number}{ANSWER_TAIL}"
        )
    else:
        numbers = [rng.randrange(10 ** rng.randint(1, 6)) for _ in range(rng.randint(2, 6))]
        plain = " ".join(map(str, numbers))
        question = f"Repeat: {plain}" if form == "plain" else f"JSON list: {plain}"
        answer = plain if form == "plain" else json.dumps(numbers)
    return Conversation(
        id=f"copy-{index}",
        messages=(Message("user", question), Message("assistant", answer)),
        source="arithmetic/copy",
    )


def _tool_conversation(index: int, rng: random.Random) -> Conversation:
    kind = rng.choice(KINDS)
    a, b = _draw(kind, "train", rng)
    wording = rng.randrange(len(_KINDS[kind].wordings))
    operation = rng.choices((kind, *_KINDS[kind].distractors), (RIGHT_SHARE, *DISTRACTOR_SHARES))[0]
    messages = [Message("user", _problem(kind, a, b, wording).prompt)]
    output: str | None = None
    for call in range(MAX_CALLS):
        forms, reasons = (RETRY_FORMS, RETRY_REASONS) if call else (FIRST_FORMS, CALL_REASONS)
        code = write_code(operation, rng.choices(list(forms), list(forms.values()))[0], a, b)
        result = run_trusted(code)
        messages += (
            Message("assistant", f"<reason>{rng.choice(reasons)}</reason>\n{call_text(code)}"),
            Message("user", f"<tool_response>\n{tool_text(result)}\n</tool_response>"),
        )
        output = result.stdout.strip() or None
        if output is not None or rng.random() > RETRY_SHARE:
            break
    messages.append(Message("assistant", answer_text(output, rng)))
    return Conversation(f"tool-{index}", tuple(messages), source="arithmetic/tool")


def call_text(code: str) -> str:
    """A tool call as the model should write it."""
    return f"{CALL_HEAD}{json.dumps(code)[1:-1]}{CALL_TAIL}"


def answer_text(output: str | None, rng: random.Random) -> str:
    """The last turn: the output, or a guess if there is none; sometimes with wrong tags."""
    reason = rng.choice(ANSWER_REASONS if output is not None else GUESS_REASONS)
    number = output if output is not None else rng.randrange(10 ** rng.randint(1, 5))
    tagged = f"{ANSWER_HEAD}{number}{ANSWER_TAIL}"
    draw = rng.random()
    if draw < UNTAGGED_SHARE:
        tagged = f"\\boxed{{{number}}}"
    elif draw < UNTAGGED_SHARE + DOUBLED_SHARE:
        tagged = f"{tagged}\n{tagged}"
    return f"<reason>{reason}</reason>\n{tagged}"

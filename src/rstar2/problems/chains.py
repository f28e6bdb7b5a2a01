"""Level 2 of the embedded task: two to four steps, each a call on the output of the one before.

    Take 37. Multiply by 12. Add 45. Find modulo 97.

Level 1 punishes a failed call, because SFT teaches guesses after it. Here a failed call costs only
tokens, as in the paper: SFT always repeats it, Python's message names the fix, and the steps are
few. `ChainText` says what SFT text teaches; its fields are arguments of the environment.

Everything is a pure function of its arguments.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rstar2.errors import DataError
from rstar2.problems.arithmetic import (
    COPY_SHARE,
    CURRICULUM_SHARE,
    HELDOUT_SHARE,
    OPERATIONS,
    RETRY_REASONS,
    answer_text,
    call_text,
    copy_turn,
    run_trusted,
    write_code,
)
from rstar2.tool_text import tool_text
from rstar2.types import Conversation, Message, Problem, Split

RETRY_SLIPS = 0.2
"""Slips in repeated calls, relative to first calls."""
MAX_ATTEMPTS = 4
"""SFT text writes clean code at the latest in this call of a step."""

LENGTHS = {2: 0.9, 3: 0.07, 4: 0.03}
"""Number of steps, and its share of the problems."""
LARGEST = 999
"""No output exceeds this: the tiny model miscopies longer numbers."""

CLEAN_FORM = "print"
SLIP_FORMS = {"python2": 0.5, "open_parenthesis": 0.3, "missing_import": 0.2}


@dataclass(frozen=True, slots=True)
class StepKind:
    """One operation on the running value: its wording, the range of its argument, its result."""

    wording: str
    argument: tuple[int, int]
    apply: Callable[[int, int], int]


STEP_KINDS = {
    "product": StepKind("Multiply by {b}.", (2, 99), lambda a, b: a * b),
    "addition": StepKind("Add {b}.", (2, 99), lambda a, b: a + b),
    "difference": StepKind("Subtract {b}.", (2, 99), lambda a, b: a - b),
    "remainder": StepKind("Find modulo {b}.", (2, 99), lambda a, b: a % b),
    "gcd": StepKind("Find gcd with {b}.", (2, 99), math.gcd),
}

FIXES = {
    "Missing parentheses": "Print needs parentheses.",
    "unsupported operand": "Print needs parentheses.",  # `print -5 * 2` subtracts from print
    "never closed": "Close the parenthesis.",
    "name 'math'": "Import math.",
}
"""A part of Python's message, and the reflection on it."""


@dataclass(frozen=True, slots=True)
class ChainText:
    """What SFT text of level 2 teaches."""

    slips: float = 0.5
    """Share of first calls with a slip."""
    wrong: float = 0.1
    """Share of steps that compute another operation than the one asked for."""
    calls: bool = True
    """Whether the text uses the tool; otherwise it answers at once."""
    reflection: bool = False
    """Whether a repeated call begins with what was wrong with the one before."""

    def __post_init__(self) -> None:
        for name, share in (("slips", self.slips), ("wrong", self.wrong)):
            if not 0 <= share <= 1:
                raise DataError(f"{name} = {share}: a share is between 0 and 1")


Step = tuple[str, int]
"""An operation and its second argument."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A start value and the steps after it."""

    start: int
    steps: tuple[Step, ...]

    @property
    def id(self) -> str:
        return "-".join(["chain", str(self.start), *(f"{name}{b}" for name, b in self.steps)])

    @property
    def answer(self) -> int:
        value = self.start
        for name, b in self.steps:
            value = STEP_KINDS[name].apply(value, b)
        return value

    @property
    def heldout(self) -> bool:
        return hashlib.sha256(self.id.encode()).digest()[0] % HELDOUT_SHARE == 0

    def problem(self) -> Problem:
        wordings = [STEP_KINDS[name].wording.format(b=b) for name, b in self.steps]
        return Problem(
            id=self.id,
            prompt=" ".join([f"Take {self.start}.", *wordings]),
            answer=str(self.answer),
            grader="integer",
            kind=f"{len(self.steps)} steps",
            source="arithmetic/level2",
        )


def draw_chain(split: Split, rng: random.Random) -> Chain:
    """A chain of a split; every value on the way is positive and short."""
    while True:
        chain = _draw(rng)
        if chain.heldout == (split == "heldout"):
            return chain


def _draw(rng: random.Random) -> Chain:
    length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
    start = value = rng.randint(11, 99)
    steps: list[Step] = []
    while len(steps) < length:
        name = rng.choice(list(STEP_KINDS))
        kind = STEP_KINDS[name]
        b = rng.randint(*kind.argument)
        result = kind.apply(value, b)
        if 2 <= result <= LARGEST and result != value and not (steps and steps[-1][0] == name):
            steps.append((name, b))
            value = result
    return Chain(start, tuple(steps))


def make_chains(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` different problems."""
    rng = random.Random(f"arithmetic level 2 {split} {seed}")
    chains: dict[str, Chain] = {}
    while len(chains) < count:
        chain = draw_chain(split, rng)
        chains.setdefault(chain.id, chain)
    return [chain.problem() for chain in chains.values()]


def chain_conversations(
    count: int, seed: int, text: ChainText | None = None
) -> Iterator[Conversation]:
    """SFT text: only copying first, then copying mixed with tool use."""
    text = text or ChainText()
    rng = random.Random(f"arithmetic level 2 sft {seed}")
    opening = int(count * CURRICULUM_SHARE)
    for index in range(count):
        if index < opening or rng.random() < COPY_SHARE:
            yield copy_turn(index, rng)
        else:
            yield _conversation(index, rng, text)


def _conversation(index: int, rng: random.Random, text: ChainText) -> Conversation:
    chain = draw_chain("train", rng)
    messages = [Message("user", chain.problem().prompt)]
    value = chain.start
    for name, b in chain.steps:
        operation = name
        if rng.random() < text.wrong:
            operation = rng.choice([other for other in STEP_KINDS if other != name])
        if text.calls:
            value = _write_calls(messages, operation, value, b, rng, text)
        else:
            value = STEP_KINDS[operation].apply(value, b)
    messages.append(Message("assistant", answer_text(str(value), rng)))
    return Conversation(f"chain-{index}", tuple(messages), source="arithmetic/chain")


def _write_calls(
    messages: list[Message], operation: str, a: int, b: int, rng: random.Random, text: ChainText
) -> int:
    """Append the calls of one step, up to the first that prints; return what it prints."""
    reason = STEP_KINDS[operation].wording.format(b=b)
    for attempt in range(MAX_ATTEMPTS):
        share = text.slips * RETRY_SLIPS if attempt else text.slips
        form = CLEAN_FORM
        if rng.random() < share and attempt < MAX_ATTEMPTS - 1:
            form = rng.choices(list(SLIP_FORMS), list(SLIP_FORMS.values()))[0]
            if form == "missing_import" and not OPERATIONS[operation].imports:
                form = "python2"
        code = write_code(operation, form, a, b)
        result = run_trusted(code)
        messages += (
            Message("assistant", f"<reason>{reason}</reason>\n{call_text(code)}"),
            Message("user", f"<tool_response>\n{tool_text(result)}\n</tool_response>"),
        )
        if printed := result.stdout.strip():
            return int(printed)
        reason = rng.choice(RETRY_REASONS)
        if text.reflection:
            reason = next(fix for part, fix in FIXES.items() if part in tool_text(result))
    raise AssertionError("the last attempt is clean code")

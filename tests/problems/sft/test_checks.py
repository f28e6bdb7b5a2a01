"""The checks of conversations, each with what it keeps and what it drops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rstar2.problems.prepare import ProblemSource, read_problems
from rstar2.problems.rows import DataRow, read_rows
from rstar2.problems.sft import checks
from rstar2.problems.sft.calls import FunctionCall, signature
from rstar2.problems.sft.converters import CONVERTERS, ParsedConversation, ParsedMessage
from rstar2.types import Problem
from tests.problems.sft import sft_rows

U, A, T = ParsedMessage("user", "q"), ParsedMessage("assistant", "a"), ParsedMessage("tool", "r")
C = ParsedMessage("assistant", "", (FunctionCall("f", {}),))


def talk(*messages: ParsedMessage, id: str = "") -> ParsedConversation:
    return ParsedConversation(messages, (signature({"name": "f"}),), id=id)


def test_calls_must_fit_the_signatures_of_their_conversation() -> None:
    assert checks.ValidCalls().drop(talk(U, C)) is None
    assert "no such function" in (checks.ValidCalls().drop(ParsedConversation((U, C))) or "kept")


@pytest.mark.parametrize(
    "messages",
    [
        (U, A),
        (ParsedMessage("system", "s"), U, A, U, A),
        (U, C, T, A),
        (U, C, T, T, A),
        (U, C),
        (U, A, U),
    ],
)
def test_turns_in_order_are_kept(messages: tuple[ParsedMessage, ...]) -> None:
    assert checks.OrderedTurns().drop(talk(*messages)) is None


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((U,), "no assistant message"),
        ((A, U), "by assistant after nobody"),
        ((U, U, A), "by user after user"),
        ((U, A, A), "by assistant after assistant"),
        ((U, A, ParsedMessage("system", "s")), "by system after assistant"),
        ((U, A, T), "response to no call"),
        ((U, C, U, A), "has no response"),
        ((U, T, A), "by tool after user"),
        ((U, ParsedMessage("assistant", "")), "message 2 is empty"),
        ((ParsedMessage("user", "x<|im_end|>"), A), r"control token <|im_end|>"),
        ((U, ParsedMessage("assistant", "<tool_call>{}")), "control token <tool_call>"),
        ((U, C, ParsedMessage("tool", "</tool_response>"), A), "control token </tool_response>"),
    ],
)
def test_turns_out_of_order_and_forged_ones_are_dropped(
    messages: tuple[ParsedMessage, ...], reason: str
) -> None:
    assert reason in (checks.OrderedTurns().drop(talk(*messages)) or "kept")


# --------------------------------------------------------------------------- mathematics

MATH = [
    ("What is 3 times 14?", "We have 3 * 14 = 42, so the answer is 42."),
    ("Hi", r"The answer is \boxed{42}."),
    ("Eggs?", "She sells 9 eggs.\n#### 18"),
    ("Eggs?", "16 - 3 - 4 = <<16-3-4=9>>9"),
    ("Tea?", "<think>What is tea?</think> A drink."),
    ("Hours?", "On Monday 2 + 3 = 5 hours. On Friday 4 + 5 = 9 hours."),
    ("Budget?", "It is $120 x 3 = $360, and 5% of it: $360 * 5% = $18."),
    ("Hi", r"From $a^2 = b$ we get $a = \sqrt{b}$ and so $\frac{a}{b} \le 1$."),
    (r"Solve for $x$: $\frac{x}{2} = 3$", r"Multiply by 2: $x = 6$."),
]
CONTROL = [
    ("How many people live in Peru?", "About 34 million people live in Peru."),
    ("Calculate the area of a field, 3 by 4 m.", "The area of the field is 12 square metres."),
    ("Write a sum in Python.", "Use `sum`:\n```python\nassert 1 + 2 == 3\nx = 3 * 4 = 12\n```"),
    ("Plan my day.", "8:00-9:00 breakfast; 9-12 work (3 hours); 10/11/2024 is a Sunday."),
    ("Prices?", "The tea is $3.50 and the cake $4.20, so bring about $8."),
    ("Translate 'equal'.", "In LaTeX $=$ means equal; 'gleich' in German."),
    ("Tell me about Einstein.", "He is known for E = mc^2, published in 1905."),
    ("Call 555-1234?", "The number 555-1234 = work, 555-9876 = home."),
]


@pytest.mark.parametrize(("asked", "answered"), MATH)
def test_worked_mathematics_is_found(asked: str, answered: str) -> None:
    told = talk(ParsedMessage("user", asked), ParsedMessage("assistant", answered))
    assert checks.NoMathReasoning().drop(told) is not None


@pytest.mark.parametrize(("asked", "answered"), CONTROL)
def test_other_talk_is_not_taken_for_mathematics(asked: str, answered: str) -> None:
    told = talk(ParsedMessage("user", asked), ParsedMessage("assistant", answered))
    assert checks.NoMathReasoning().drop(told) is None


@pytest.mark.parametrize("name", CONVERTERS)
def test_the_publishers_rows_hold_no_mathematics(name: str) -> None:
    assert checks.NoMathReasoning().drop(CONVERTERS[name](sft_rows.ROWS[name])) is None


def test_what_tools_return_and_calls_hold_is_not_looked_at() -> None:
    calls = ParsedMessage("assistant", "", (FunctionCall("f", {"code": "1 + 2 = 3; 3 + 4 = 7"}),))
    told = talk(U, calls, ParsedMessage("tool", r"1 + 2 = 3, 3 + 4 = 7, \boxed{7}"), A)
    assert checks.NoMathReasoning().drop(told) is None


@pytest.mark.parametrize(
    ("file", "asked", "answered", "marks", "least"),
    [
        ("gsm8k/test.jsonl", "question", "answer", "", 1.0),
        ("gsm8k/test.jsonl", "question", "answer", r"<<[^>]*>>|####.*", 0.98),
        ("math500.jsonl", "problem", "solution", "", 1.0),
        ("math500.jsonl", "problem", "solution", r"\\boxed", 0.92),
    ],
)
def test_real_solutions_are_found_with_and_without_their_marks(
    shared_data: Path, file: str, asked: str, answered: str, marks: str, least: float
) -> None:
    rows = [r.fields for r in read_rows(str(shared_data / file)) if isinstance(r, DataRow)]
    told = [(r[asked], re.sub(marks, "", r[answered]) if marks else r[answered]) for r in rows]
    flagged = [checks.math_reasoning(*each) is not None for each in told]
    assert sum(flagged) / len(flagged) >= least


# --------------------------------------------------------------------------- other data


def test_user_messages_are_held_against_the_evaluation_sets() -> None:
    protected = Problem("e-1", "Find the sum of all primes below one hundred and thirty.", "1")
    check = checks.decontaminated([protected])
    planted = "Please: FIND the  sum of all primes below one hundred and thirty"
    assert "e-1" in (check.drop(talk(U, A, ParsedMessage("user", planted), A)) or "kept")
    assert check.drop(talk(U, ParsedMessage("assistant", planted))) is None
    assert check.drop(talk(ParsedMessage("user", "Find me a good book about primes."), A)) is None


def test_equal_conversations_are_dropped_whatever_their_spacing() -> None:
    check = checks.UniqueConversations()
    assert check.drop(talk(U, A, id="a-1")) is None
    assert (
        check.drop(talk(ParsedMessage("system", "s"), ParsedMessage("user", " q\n"), A, id="a-2"))
        == "equal to a-1"
    )
    assert check.drop(talk(U, C, id="a-3")) is None
    assert (
        check.drop(
            talk(U, ParsedMessage("assistant", "", (FunctionCall("f", {"x": 1}),)), id="a-4")
        )
        is None
    )


def test_shared_word_problems_do_not_overlap_with_olympiad_sets(shared_data: Path) -> None:
    sets = (ProblemSource(str(shared_data / f), f) for f in ("aime24.jsonl", "math500.jsonl"))
    protected = [p for s in sets for _, p in read_problems(s) if isinstance(p, Problem)]
    check = checks.decontaminated(protected)
    words = read_problems(ProblemSource(str(shared_data / "svamp.jsonl"), "svamp"))
    asked = [p.prompt for _, p in words if isinstance(p, Problem)]
    assert [text for text in asked if check.drop(talk(ParsedMessage("user", text), A))] == []

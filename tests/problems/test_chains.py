"""Level 2 of the embedded task: dependent steps, failed calls that are always repeated."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from rstar2.environments.python_math import PythonMath
from rstar2.errors import DataError, RecipeError
from rstar2.problems.arithmetic import make_problems, sft_conversations
from rstar2.problems.chains import LARGEST, Chain, ChainText, chain_conversations, make_chains
from rstar2.types import encode


def test_an_answer_by_hand() -> None:
    chain = Chain(37, (("product", 12), ("addition", 45), ("remainder", 97)))
    problem = chain.problem()
    assert problem.prompt == "Take 37. Multiply by 12. Add 45. Find modulo 97."
    assert problem.answer == "4"  # 444, 489, 489 - 5 * 97
    assert problem.kind == "3 steps"


def test_problems_depend_on_the_seed_alone_and_splits_are_disjoint() -> None:
    train = make_chains("train", 300, 1)
    assert train == make_chains("train", 300, 1)
    assert train != make_chains("train", 300, 2)
    heldout = make_chains("heldout", 100, 1)
    assert {p.id for p in train}.isdisjoint(p.id for p in heldout)
    assert len({p.id for p in train}) == 300
    assert {p.kind for p in train} == {"2 steps", "3 steps", "4 steps"}
    assert all(1 < int(p.answer) <= LARGEST for p in train)


def test_sft_text_always_repeats_a_failed_call() -> None:
    conversations = [c for c in chain_conversations(600, 3) if c.source == "arithmetic/chain"]
    failed = 0
    for conversation in conversations:
        texts = [m.content for m in conversation.messages]
        for response, after in zip(texts[2::2], texts[3::2], strict=True):
            if "Error" in response:
                failed += 1
                assert "Try again." in after
        assert "boxed" in texts[-1]
    assert failed > len(conversations) / 2


@pytest.mark.parametrize(("slips", "expected"), [(0.0, 0.0), (0.3, 0.3), (0.8, 0.8)])
def test_slips_is_the_share_of_first_calls_that_fail(slips: float, expected: float) -> None:
    first = failed = 0
    for conversation in chain_conversations(3000, 5, ChainText(slips=slips)):
        texts = [m.content for m in conversation.messages]
        for call, response in zip(texts[1:-1:2], texts[2::2], strict=False):
            if conversation.source == "arithmetic/chain" and "Try again." not in call:
                first += 1
                failed += "Error" in response
    assert failed / first == pytest.approx(expected, abs=0.03)


def test_wrong_is_the_share_of_steps_with_another_operation() -> None:
    def right(wrong: float) -> float:
        answers = [
            (c.messages[0].content, c.messages[-1].content)
            for c in chain_conversations(1500, 7, ChainText(slips=0, wrong=wrong))
            if c.source == "arithmetic/chain"
        ]
        return sum(f"{{{_solve(prompt)}}}" in answer for prompt, answer in answers) / len(answers)

    assert right(0.0) == 1.0
    assert right(0.25) < 0.75


def _solve(prompt: str) -> int:
    """The answer, computed from the words."""
    first, *steps = prompt.rstrip(".").split(". ")
    value = int(first.split()[1])
    for step in steps:
        number = int(step.split()[-1])
        value = _apply(step, value, number)
    return value


def _apply(step: str, value: int, number: int) -> int:
    if step.startswith("Multiply"):
        return value * number
    if step.startswith("Add"):
        return value + number
    if step.startswith("Subtract"):
        return value - number
    if "modulo" in step:
        return value % number
    return math.gcd(value, number)


def test_text_without_calls_and_with_reflection() -> None:
    plain = [c for c in chain_conversations(200, 1, ChainText(calls=False)) if "chain" in c.source]
    assert {len(c.messages) for c in plain} == {2}
    assert all("boxed" in c.messages[1].content for c in plain)
    texts = "".join(
        m.content
        for c in chain_conversations(400, 1, ChainText(reflection=True))
        for m in c.messages
    )
    assert "Try again." not in texts
    assert "<reason>Print needs parentheses.</reason>" in texts
    assert "<reason>Import math.</reason>" in texts


def test_shares_outside_0_and_1_are_refused() -> None:
    with pytest.raises(DataError, match=r"slips = 1\.5"):
        ChainText(slips=1.5)
    with pytest.raises(RecipeError, match="levels are 1 and 2"):
        PythonMath(level=3)
    with pytest.raises(RecipeError, match="known are slips, wrong, calls, reflection"):
        PythonMath(level=2, sft={"slip": 0.1})
    with pytest.raises(RecipeError, match="level 2"):
        PythonMath(sft={"slips": 0.1})


def test_level_1_is_as_it_was() -> None:
    """Recorded runs depend on every character."""
    problems = encode(make_problems("train", 64, 0))
    text = json.dumps([[m.content for m in c.messages] for c in sft_conversations(200, 0)])
    assert hashlib.sha256(problems).hexdigest()[:16] == "6ab6de75879a20bb"
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e4425ae6f2982792"


def test_the_environment_offers_both_levels() -> None:
    first, second = PythonMath(), PythonMath(level=2, sft={"slips": 0.2})
    assert first.problems("train", 3, 0) != second.problems("train", 3, 0)
    assert second.problems("train", 3, 0)[0].source == "arithmetic/level2"
    assert next(iter(first.demonstrations(1, 0))).source == "arithmetic/tool"
    sources = {c.source for c in second.demonstrations(100, 0)}
    assert sources == {"arithmetic/copy", "arithmetic/chain"}

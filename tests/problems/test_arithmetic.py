"""The embedded task: disjoint splits, right answers, and SFT text that teaches format only."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter

import pytest

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.errors import DataError
from rstar2.problems import arithmetic
from rstar2.problems.arithmetic import (
    EXAMPLES,
    KINDS,
    heldout,
    is_known_question,
    make_problems,
    sft_conversations,
)
from rstar2.tool_text import tool_text
from rstar2.types import Conversation, Limits, Outcome, Split


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return list(sft_conversations(6000, seed=3))


def tool_conversations(conversations: list[Conversation]) -> list[Conversation]:
    return [c for c in conversations if c.source == "arithmetic/tool"]


def codes(conversation: Conversation) -> list[str]:
    """The program of every call, read back from the text as a parser would."""
    programs = []
    for message in conversation.messages:
        if "<tool_call>" in message.content:
            text = message.content.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
            programs.append(json.loads(text)["arguments"]["code"])
    return programs


def test_answers_are_what_the_right_operation_computes() -> None:
    for problem in make_problems("train", 400, seed=1):
        a, b = problem.meta["a"], problem.meta["b"]
        expression = arithmetic.OPERATIONS[problem.kind].expression.format(a=a, b=b)
        assert eval(expression, {"math": math}) == int(problem.answer), problem.id


def test_problems_are_balanced_distinct_and_repeatable() -> None:
    problems = make_problems("heldout", 240, seed=5)
    assert Counter(p.kind for p in problems) == dict.fromkeys(KINDS, 30)
    assert len({(p.kind, p.meta["a"], p.meta["b"]) for p in problems}) == 240
    assert problems == make_problems("heldout", 240, seed=5)
    assert problems != make_problems("heldout", 240, seed=6)
    assert {p.grader for p in problems} == {"integer"}


def test_both_numbers_stand_in_the_prompt_in_order() -> None:
    for problem in make_problems("train", 200, seed=2):
        a, b = str(problem.meta["a"]), str(problem.meta["b"])
        head, _, tail = problem.prompt.partition(a)
        assert tail, problem.prompt
        assert b in tail, problem.prompt
        assert not any(c.isdigit() for c in head), problem.prompt


def test_no_pair_is_in_both_splits() -> None:
    def pairs(split: Split) -> set[frozenset[int]]:
        return {frozenset((p.meta["a"], p.meta["b"])) for p in make_problems(split, 1200, seed=0)}

    assert not pairs("train") & pairs("heldout")


def test_sft_text_holds_no_heldout_pair(conversations: list[Conversation]) -> None:
    digits = str.maketrans({c: " " for c in map(chr, range(32, 127)) if not c.isdigit()})
    for conversation in tool_conversations(conversations):
        a, b = map(int, conversation.messages[0].content.translate(digits).split())
        assert not heldout(a, b)


def test_too_many_problems_are_refused_with_a_number() -> None:
    with pytest.raises(DataError, match="too few distinct"):
        make_problems("heldout", 50_000, seed=0)


def test_distractors_hardly_ever_hit_the_right_answer() -> None:
    problems = make_problems("train", 1600, seed=4)
    for kind in KINDS:
        mine = [p for p in problems if p.kind == kind]
        for distractor in arithmetic._KINDS[kind].distractors:
            expression = arithmetic.OPERATIONS[distractor].expression
            hits = sum(
                str(eval(expression.format(**p.meta), {"math": math})) == p.answer for p in mine
            )
            assert hits <= 0.03 * len(mine), (kind, distractor)


def test_every_operation_is_right_once_and_the_mode_of_mistakes_once() -> None:
    mistakes = {kind: arithmetic._KINDS[kind].mistake for kind in KINDS}
    assert sorted(mistakes.values()) == sorted(KINDS)
    assert all(kind != mistake for kind, mistake in mistakes.items())


def operation_of(conversation: Conversation) -> tuple[str, str]:
    """(kind, operation that the first call computes), read back from the text alone."""
    question, first = conversation.messages[0].content, codes(conversation)[0]
    a, b = map(int, re.findall(r"\d+", question))
    kind = next(
        name
        for name, spec in arithmetic._KINDS.items()
        if question in {wording.format(a=a, b=b) for wording in spec.wordings}
    )
    operations = {
        operation
        for operation in arithmetic.OPERATIONS
        for form in arithmetic.FIRST_FORMS
        if arithmetic.write_code(operation, form, a, b) == first
    }
    assert len(operations) == 1, first
    return kind, operations.pop()


def test_right_operation_is_not_the_mode(conversations: list[Conversation]) -> None:
    seen = Counter(operation_of(c) for c in tool_conversations(conversations))
    total = sum(seen.values())
    for kind in KINDS:
        mine = {operation: n for (k, operation), n in seen.items() if k == kind}
        assert set(mine) == {kind, *arithmetic._KINDS[kind].distractors}
        assert max(mine, key=mine.__getitem__) != kind
    right = sum(seen[kind, kind] for kind in KINDS)
    usual = sum(seen[kind, arithmetic._KINDS[kind].mistake] for kind in KINDS)
    assert abs(right / total - arithmetic.RIGHT_SHARE) < 0.02
    assert abs(usual / total - arithmetic.DISTRACTOR_SHARES[0]) < 0.02


def test_one_slip_is_the_mode_and_clean_code_the_minority(
    conversations: list[Conversation],
) -> None:
    outcomes: Counter[Outcome] = Counter()
    python2 = 0
    for conversation in tool_conversations(conversations):
        first = codes(conversation)[0]
        outcomes[arithmetic.run_trusted(first).outcome] += 1
        python2 += "print " in first
    total = sum(outcomes.values())
    assert outcomes[Outcome.OK] / total < 0.5
    assert python2 / total > max(arithmetic.FIRST_FORMS[f] for f in ("print", "x", "result"))


@pytest.mark.slow
async def test_tool_responses_are_those_of_the_real_code_environment() -> None:
    codes = [
        arithmetic.write_code(operation, form, 48, 36)
        for operation in arithmetic.OPERATIONS
        for form in arithmetic.FIRST_FORMS
    ]
    config = CodeEnvConfig(slots=2, warm_up="never")
    limits = Limits(wall_s=60.0, cpu_s=60.0)
    async with await CodeEnvClient.start(config) as client:
        real = await asyncio.gather(
            *(client.run(RunRequest(str(n), code, limits=limits)) for n, code in enumerate(codes))
        )
    for code, result in zip(codes, real, strict=True):
        expected = arithmetic.run_trusted(code)
        assert (result.outcome, tool_text(result)) == (expected.outcome, tool_text(expected)), code


def test_stream_opens_with_copying_and_is_repeatable(conversations: list[Conversation]) -> None:
    opening = int(len(conversations) * arithmetic.CURRICULUM_SHARE)
    assert {c.source for c in conversations[:opening]} == {"arithmetic/copy"}
    later = conversations[opening:]
    share = sum(c.source == "arithmetic/copy" for c in later) / len(later)
    assert abs(share - arithmetic.COPY_SHARE) < 0.03
    assert conversations == list(sft_conversations(6000, seed=3))
    for conversation in conversations[:opening]:
        question, answer = (m.content for m in conversation.messages)
        numbers = re.findall(r"\d+", question)
        assert re.findall(r"\d+", answer) == numbers


def test_answers_repeat_the_tool_and_tags_slip_at_times(
    conversations: list[Conversation],
) -> None:
    tags: Counter[int] = Counter()
    guesses = copied = 0
    for conversation in tool_conversations(conversations):
        response, answer = (m.content for m in conversation.messages[-2:])
        tags[answer.count("<answer>")] += 1
        output = response.split("\n")[1]
        if output.lstrip("-").isdigit():
            copied += 1
            assert f"\\boxed{{{output}}}" in answer
        else:
            guesses += 1
    total = sum(tags.values())
    assert set(tags) == {0, 1, 2}
    assert 0.03 < tags[0] / total < 0.07
    assert 0.03 < tags[2] / total < 0.07
    assert copied > 4 * guesses > 0


def test_every_problem_is_a_known_question_and_other_texts_are_not() -> None:
    assert all(is_known_question(p.prompt) for p in make_problems("heldout", 200, seed=1))
    assert all(is_known_question(example) for example in EXAMPLES)
    assert len(EXAMPLES) == len(KINDS)
    for text in ("Hello", "What is 4 choose 2? Why?", "What is x choose 2?", ""):
        assert not is_known_question(text)

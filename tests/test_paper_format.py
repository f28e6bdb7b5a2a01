"""Tagged and boxed answers: what is graded, and the paper's format penalty."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.paper_format import answer_of, boxed_content, count_answer_tags, format_penalty


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed {42}</answer>", "42"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{\\{1, 2\\}}</answer>", "\\{1, 2\\}"),
        ("<answer>\\boxed{1} or \\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1} or \\boxed{2</answer>", "1"),
        ("<answer>\\boxed{1}</answer> so <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer> so <answer>2</answer>", None),
        ("<answer>\\boxed{1}</answer> so <answer>\\boxed{2}", "1"),
        ("<answer>\\boxed{1}</answer></answer>", "1"),
        ("<answer>1 <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{}</answer>", ""),
        ("<answer>42</answer>", None),
        ("<answer>\\boxed{42", None),
        ("\\boxed{42}", None),
        ("</answer><answer>", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_box_of_the_last_answer(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_nested_boxes_give_the_inner_one() -> None:
    assert boxed_content("\\boxed{\\boxed{4}}") == "4"


@given(st.lists(st.sampled_from(["\\boxed{", "\\boxed", " {", "{", "}", "\\", "7"]), max_size=14))
def test_boxes_are_matched_as_if_each_were_read_alone(pieces: list[str]) -> None:
    text = "".join(pieces)
    contents = []
    for box in re.finditer(r"\\boxed\s*\{", text):
        depth, position = 1, box.end()
        while position < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 2 if text[position] == "\\" else 1
        contents += [] if depth else [text[box.end() : position - 1].strip()]
    assert boxed_content(text) == (contents[-1] if contents else None)


def test_unclosed_boxes_are_read_in_one_pass() -> None:
    """A quadratic scan of these texts would take hours."""
    assert boxed_content("\\boxed{" * 200_000) is None
    assert boxed_content("\\boxed{1}" + "\\boxed{" * 200_000) == "1"


PIECES = st.sampled_from(["<answer>", "</answer>", "\\boxed{", "{", "}", "\\", "7", "</"])


@given(st.lists(PIECES | st.text(max_size=4), max_size=14).map("".join))
def test_no_text_can_raise(text: str) -> None:
    answer = answer_of(text)
    assert answer is None or answer in text
    assert count_answer_tags(text) >= (answer is not None)


@pytest.mark.parametrize(
    ("tags", "turns", "expected"),
    [
        (0, 1, 1.0),
        (0, 0, 1.0),
        (1, 1, 0.0),
        (1, 5, 0.0),
        (2, 4, 0.25),
        (3, 2, 1.0),
        (9, 2, 1.0),
    ],
)
def test_format_penalty(tags: int, turns: int, expected: float) -> None:
    assert format_penalty(tags, turns) == expected

"""Which token was sampled for what: every sampled token has one class, by the text alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.entropy.classes import CLASSES, WINDOW, classify, failures_before, tokens_of, top_tokens
from rstar2.types import Outcome, StopReason, ToolResult, Trajectory, Turn

CALL = [
    '<tool_call>\n{"name": "py", "arguments": {"code": "',
    "import",
    " math",
    '\\nprint(\\"a\\")',
]
END = ['", "input": ""}}\n</tool_call>', "<|im_end|>"]


def one(pieces: list[str], failed: bool | None = None) -> list[str]:
    (kinds,) = classify([pieces], [failed])
    return kinds


def test_a_turn_with_reasoning_and_a_call() -> None:
    pieces = ["Use", " Python", "</reason>", "\n", *CALL, *END]
    assert one(pieces) == [
        *("reasoning", "reasoning", "format", "format"),
        *("format", "code", "code", "code", "format", "format"),
    ]


def test_an_answer_and_what_follows_it() -> None:
    pieces = ["<reason>", "Done", ".", "</reason>", "\n"]
    pieces += ["<answer>", "\n", "42", "</answer>", "<|im_end|>"]
    kinds = one(pieces, failed=False)
    assert kinds == [
        *("format", "after_ok", "after_ok", "format", "format", "format"),
        *("answer", "answer", "format", "format"),
    ]


@pytest.mark.parametrize(("failed", "kind"), [(False, "after_ok"), (True, "after_error")])
def test_the_window_after_a_tool_response(failed: bool, kind: str) -> None:
    pieces = [" word"] * (WINDOW + 5)
    assert one(pieces, failed) == [kind] * WINDOW + ["reasoning"] * 5


def test_tags_split_over_tokens_are_format() -> None:
    pieces = ["<", "reason", ">", "But", " wait", "</", "reason", ">"]
    assert one(pieces) == [*["format"] * 3, "reasoning", "reasoning", *["format"] * 3]


def test_text_in_code_that_looks_like_a_tag_is_code() -> None:
    pieces = [
        '<tool_call>{"arguments": {"code": "',
        "print('<answer>')",
        '"}}',
        "</tool_call>",
        "on",
    ]
    assert one(pieces) == ["format", "code", "format", "format", "reasoning"]


def test_a_call_that_never_closes_is_still_code() -> None:
    pieces = ['<tool_call>{"code": "', "while True:", " pass"]
    assert one(pieces) == ["format", "code", "code"]


def test_a_call_without_code_is_format() -> None:
    assert one(["<tool_call>", "nonsense", "</tool_call>"]) == ["format"] * 3


@given(
    st.lists(
        st.sampled_from(
            [
                "<",
                "reason>",
                "<answer>",
                "</answer>",
                "<tool_call>",
                '"code": "',
                '"',
                "a",
                " b",
                "\n",
                "",
                "</tool_call>",
                "<|im_end|>",
                "é",
            ]
        )
    )
)
def test_every_token_has_one_class_whatever_the_text(pieces: list[str]) -> None:
    kinds = one(pieces)
    assert len(kinds) == len(pieces)
    assert set(kinds) <= set(CLASSES)


def test_what_came_before_a_turn() -> None:
    def turn(*outcomes: Outcome) -> Turn:
        results = tuple(ToolResult("c", outcome) for outcome in outcomes)
        return Turn((1,), (-0.1,), ((0, 1),), results=results)

    turns = (turn(Outcome.OK), turn(Outcome.OK, Outcome.TIMEOUT), turn(), turn())
    trajectory = Trajectory("t", "p", "g", 0, (1,), turns, StopReason.ANSWERED)
    assert failures_before(trajectory) == [None, False, True, None]


def test_a_fifth_of_the_tokens_is_marked() -> None:
    values = [0.0, 5.0, 1.0, 5.0, 2.0, 0.5, 0.1, 0.2, 0.3, 0.4]
    assert top_tokens(values) == {1, 3}
    assert top_tokens(values, 0.1) == {1}
    assert top_tokens([]) == frozenset()


def test_marks_are_over_the_whole_trajectory_not_each_turn() -> None:
    turns = (
        Turn((1,) * 8, (-0.1,) * 8, ((0, 8),)),
        Turn((2,) * 2, (-0.2,) * 2, ((0, 2),)),
    )
    trajectory = Trajectory("t", "p", "g", 0, (1,), turns, StopReason.ANSWERED)
    tokens = tokens_of(trajectory, [["a"] * 8, ["b"] * 2], [[0.1] * 8, [0.5, 0.6]])
    assert [(t.turn, t.index) for t in tokens if t.top] == [(1, 0), (1, 1)]
    assert tokens[-1].logprob == -0.2

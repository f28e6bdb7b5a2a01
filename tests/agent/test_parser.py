"""Every form of tool call has one typed outcome; no text can make the parser raise."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.agent.parser import (
    TOOL_NAME,
    answer_of,
    boxed_content,
    count_answer_tags,
    last_answer,
    parse_turn,
)
from rstar2.types import Outcome, ToolCall, decode, encode


def wrap(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def written(code: object = "print(1)", **more: object) -> str:
    return json.dumps({"name": TOOL_NAME, "arguments": {"code": code, **more}})


def only(text: str) -> ToolCall:
    (call,) = parse_turn(text, turn_id="t", max_calls=4).calls
    return call


def test_a_call_is_read_with_code_and_input() -> None:
    code = 'x = input()\nprint(f"{x}\\n")'
    call = only("Let me see.\n" + wrap(written(code, input="5\n")))
    assert call.arguments == {"code": code, "input": "5\n"}
    assert (call.error, call.name) == (None, TOOL_NAME)


def test_input_may_be_left_out() -> None:
    assert "input" not in only(wrap(written())).arguments


def test_calls_keep_their_order_and_have_their_own_ids() -> None:
    text = "a".join(wrap(written(f"print({i})")) for i in range(3))
    calls = parse_turn(text, turn_id="7.3/0", max_calls=4).calls
    assert [call.shown for call in calls] == ["print(0)", "print(1)", "print(2)"]
    assert len({call.id for call in calls}) == 3
    assert all(call.id.startswith("7.3/0.") for call in calls)


def test_ids_change_with_the_code_and_with_nothing_else() -> None:
    first, again, other = (only(wrap(written(code))) for code in ("a", "a", "b"))
    assert first.id == again.id != other.id


def test_calls_beyond_the_limit_share_one_refusal() -> None:
    text = "".join(wrap(written(f"print({i})")) for i in range(9))
    calls = parse_turn(text, turn_id="t", max_calls=4).calls
    assert [call.error for call in calls] == [None] * 4 + [Outcome.BAD_ARGUMENTS]
    assert "5 more" in calls[-1].message


def test_a_closing_tag_inside_the_code_does_not_end_the_call() -> None:
    assert only(wrap(written("print('</tool_call>')"))).shown == "print('</tool_call>')"


@pytest.mark.parametrize(
    ("body", "outcome", "hint"),
    [
        ("", Outcome.BAD_JSON, "Expecting value"),
        ("not json", Outcome.BAD_JSON, "Expecting value at character 0"),
        ('{"name": "x",}', Outcome.BAD_JSON, "at character"),
        ('{"name": "x", "arguments": {"code": "a\nb"}}', Outcome.BAD_JSON, "as \\n"),
        ('{"name": "x", "arguments": {"code": "\\d"}}', Outcome.BAD_JSON, "as \\\\"),
        (f"{written()} trailing", Outcome.BAD_JSON, "after the JSON object"),
        (f"[{written()}]", Outcome.BAD_JSON, "got a list"),
        ('"text"', Outcome.BAD_JSON, "got a string"),
        ("[" * 100_000, Outcome.BAD_JSON, "RecursionError"),
        ("9" * 10_000, Outcome.BAD_JSON, "ValueError"),
        ('{"arguments": {"code": "1"}}', Outcome.UNKNOWN_TOOL, 'no "name"'),
        ('{"name": 3, "arguments": {}}', Outcome.UNKNOWN_TOOL, "only tool"),
        ('{"name": "python", "arguments": {"code": "1"}}', Outcome.UNKNOWN_TOOL, "'python'"),
        (f'{{"name": "{TOOL_NAME}"}}', Outcome.BAD_ARGUMENTS, "got null"),
        (
            json.dumps({"name": TOOL_NAME, "arguments": '{"code": "1"}'}),
            Outcome.BAD_ARGUMENTS,
            "got a string",
        ),
        (json.dumps({"name": TOOL_NAME, "arguments": {}}), Outcome.BAD_ARGUMENTS, "is missing"),
        (written(5), Outcome.BAD_ARGUMENTS, "got a number"),
        (written(["a"]), Outcome.BAD_ARGUMENTS, "got a list"),
        (written("  \n"), Outcome.BAD_ARGUMENTS, "is empty"),
        (written(input=None), Outcome.BAD_ARGUMENTS, '"input" must be a string'),
        (written(timeout=3), Outcome.BAD_ARGUMENTS, "unexpected 'timeout'"),
        (written("\ud800"), Outcome.BAD_ARGUMENTS, "surrogate"),
    ],
)
def test_what_is_no_call_says_why(body: str, outcome: Outcome, hint: str) -> None:
    call = only(wrap(body))
    assert call.error is outcome
    assert hint in call.message
    assert call.arguments == {}
    assert decode(encode(call), ToolCall) == call


def test_an_unclosed_call_is_refused() -> None:
    for text in (f"<tool_call>\n{written()}", "<tool_call>", '<tool_call>{"name'):
        call = only(text)
        assert call.error is Outcome.BAD_JSON
        assert "not closed" in call.message


def test_a_broken_call_does_not_swallow_the_next() -> None:
    text = f"<tool_call>\n{{oops\n{wrap(written('print(2)'))}"
    calls = parse_turn(text, turn_id="t", max_calls=4).calls
    assert [(call.error, call.arguments.get("code")) for call in calls] == [
        (Outcome.BAD_JSON, None),
        (None, "print(2)"),
    ]


@pytest.mark.parametrize("text", ["<answer>{}</answer>", "<answer>1</answer> <answer>{}"])
def test_a_call_inside_the_answer_is_not_executed(text: str) -> None:
    call = only(text.format(wrap(written())))
    assert call.error is Outcome.BAD_ARGUMENTS
    assert "before you answer" in call.message


def test_a_call_after_the_answer_is_executed_and_the_tags_are_counted() -> None:
    parsed = parse_turn(f"<answer>1</answer>{wrap(written())}<answer>", turn_id="t", max_calls=4)
    assert parsed.calls[0].error is None
    assert (parsed.answer_tags, parsed.answered) == (2, True)


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


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<reason>", "</reason>", "\n",
        written(), wrap(written("x")), wrap("{"), "\\boxed{", "}", "{", '"', "\\", "\\boxed{3}",
        '{"name": "', TOOL_NAME, '", "arguments": ', '{"code": "', "\\u00e9", "\\ud834", "[[[",
        "1e999", "NaN", "null", "\x00",
    ]
)  # fmt: skip
TEXT = st.lists(PIECES | st.text(max_size=12), max_size=24).map("".join)


@given(TEXT, st.integers(1, 5))
def test_no_text_can_raise(text: str, max_calls: int) -> None:
    parsed = parse_turn(text, turn_id="t", max_calls=max_calls)
    assert len(parsed.calls) <= max_calls + 1
    assert bool(parsed.calls) == ("<tool_call>" in text)
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    for call in parsed.calls:
        assert decode(encode(call), ToolCall) == call
        if call.error is None:
            assert call.shown.strip()
            assert call.raw in text
        else:
            assert call.error.failed
            assert call.message
    assert parsed.answer_tags == count_answer_tags(text)
    assert parsed.answered == (last_answer(text) is not None)
    answer = answer_of(text)
    assert answer is None or answer in text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(JSON_VALUES, st.sampled_from([TOOL_NAME, "other"]), JSON_VALUES, JSON_VALUES)
def test_no_json_can_raise(code: object, name: str, extra: object, whole: object) -> None:
    for value in (
        whole,
        {"name": name, "arguments": extra},
        {"name": name, "arguments": {"code": code, "input": extra}},
        {"name": extra, "arguments": {"code": code}},
    ):
        call = only(wrap(json.dumps(value)))
        assert decode(encode(call), ToolCall) == call


@given(st.text(), st.text())
def test_any_program_travels_unchanged(code: str, stdin: str) -> None:
    call = only(wrap(written(code, input=stdin)))
    if code.strip():
        assert call.arguments == {"code": code, "input": stdin}
    else:
        assert call.error is Outcome.BAD_ARGUMENTS

"""Every form of tool call has one typed outcome; no text can make the parser raise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.agent.parser import CallParser
from rstar2.environments.base import ToolSpec
from rstar2.environments.python_tool import python_spec
from rstar2.paper_format import TOOL_NAME
from rstar2.types import Outcome, ToolCall, decode, encode

TAGS = ("<answer>", "</answer>")


def wrap(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def written(code: object = "print(1)", **more: object) -> str:
    return json.dumps({"name": TOOL_NAME, "arguments": {"code": code, **more}})


def parse(text: str, turn_id: str = "t", max_calls: int = 4) -> tuple[ToolCall, ...]:
    return CallParser((python_spec(),), max_calls, TAGS).parse(text, turn_id)


def only(text: str) -> ToolCall:
    (call,) = parse(text)
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
    calls = parse(text, "7.3/0")
    assert [call.shown for call in calls] == ["print(0)", "print(1)", "print(2)"]
    assert len({call.id for call in calls}) == 3
    assert all(call.id.startswith("7.3/0.") for call in calls)


def test_ids_change_with_the_code_and_with_nothing_else() -> None:
    first, again, other = (only(wrap(written(code))) for code in ("a", "a", "b"))
    assert first.id == again.id != other.id


def test_calls_beyond_the_limit_share_one_refusal() -> None:
    text = "".join(wrap(written(f"print({i})")) for i in range(9))
    calls = parse(text, "t")
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
    calls = parse(text, "t")
    assert [(call.error, call.arguments.get("code")) for call in calls] == [
        (Outcome.BAD_JSON, None),
        (None, "print(2)"),
    ]


@pytest.mark.parametrize("text", ["<answer>{}</answer>", "<answer>1</answer> <answer>{}"])
def test_a_call_inside_the_answer_is_not_executed(text: str) -> None:
    call = only(text.format(wrap(written())))
    assert call.error is Outcome.BAD_ARGUMENTS
    assert "before you answer" in call.message


def test_a_call_after_the_answer_is_executed() -> None:
    assert only(f"<answer>1</answer>{wrap(written())}<answer>").error is None


def test_without_answer_tags_a_call_is_executed_anywhere() -> None:
    (call,) = CallParser((python_spec(),), 4).parse(f"<answer>{wrap(written())}</answer>", "t")
    assert call.error is None


CITY = ToolSpec(
    "population",
    "How many people live in a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "year": {"type": "integer"},
            "unit": {"enum": ["people", "millions"]},
        },
        "required": ["city"],
    },
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"city": "Rome", "year": 2020, "unit": "people"}, ""),
        ({"city": "Rome"}, ""),
        ({}, '"city" is missing. Expected {"city": string, "year"?: integer, "unit"?: value}.'),
        ({"city": "Rome", "year": "2020"}, '"year" must be an integer, got a string.'),
        ({"city": "Rome", "year": True}, '"year" must be an integer, got a boolean.'),
        ({"city": "Rome", "year": 2.5}, '"year" must be an integer, got a number.'),
        ({"city": "Rome", "year": 2**70}, "at most 64 bits"),
        ({"city": None}, '"city" must be a string, got null.'),
        ({"city": "Rome", "unit": "dozens"}, '"unit" must be one of ["people", "millions"].'),
        ({"town": "Rome"}, "unexpected 'town'."),
        ({"city": "\ud800"}, "lone surrogate"),
    ],
)
def test_arguments_are_checked_against_the_schema(
    arguments: dict[str, object], message: str
) -> None:
    text = wrap(json.dumps({"name": "population", "arguments": arguments}))
    (call,) = CallParser((CITY, python_spec()), 4).parse(text, "t")
    assert message in call.message
    assert call.error == (Outcome.BAD_ARGUMENTS if message else None)
    assert call.name == "population"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ((CITY, python_spec()), f"Unknown tool 'x'. The tools are population, {TOOL_NAME}."),
        ((CITY,), "Unknown tool 'x'. The only tool is population."),
        ((), "Unknown tool 'x'. There are no tools."),
    ],
)
def test_an_unknown_tool_is_answered_with_the_known_ones(
    tools: tuple[ToolSpec, ...], message: str
) -> None:
    (call,) = CallParser(tools, 4).parse(wrap('{"name": "x", "arguments": {}}'), "t")
    assert (call.error, call.message) == (Outcome.UNKNOWN_TOOL, message)


def test_the_expected_call_is_shown_for_one_tool() -> None:
    (call,) = CallParser((CITY,), 4).parse(wrap("{"), "t")
    assert call.message.endswith('Expected {"name": "population", "arguments": {"city": "..."}}')
    (call,) = CallParser((CITY, python_spec()), 4).parse(wrap("{"), "t")
    assert call.message.endswith('Expected {"name": "...", "arguments": {...}}')


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
    calls = parse(text, max_calls=max_calls)
    assert len(calls) <= max_calls + 1
    assert bool(calls) == ("<tool_call>" in text)
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert decode(encode(call), ToolCall) == call
        if call.error is None:
            assert call.shown.strip()
            assert call.raw in text
        else:
            assert call.error.failed
            assert call.message


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

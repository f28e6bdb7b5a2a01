"""Calls in three notations: what their grammar allows is read, everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rstar2.agent.prompts import _compiled
from rstar2.problems.sft.calls import (
    BadCall,
    FunctionCall,
    bracketed_calls,
    check_call,
    json_call,
    meant_as_bracketed,
    quoted_call,
    signature,
    signatures,
)

NAMES = ["Market Trends API", "get_news", "News (Video) V2", "News", "a.b/c"]


def test_a_call_is_written_as_the_chat_template_writes_it() -> None:
    call = FunctionCall("get_weather", {"city": "Zürich", "days": 2, "deep": {"a": [True, None]}})
    told = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}}],
        },
    ]
    ours = [told[0], {"role": "assistant", "content": f"I look.\n{call.text()}"}]
    assert _compiled().render(messages=told) == _compiled().render(messages=ours)


# --------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("arguments", ['{"id": "u1", "n": 2}', r'"{\"id\": \"u1\", \"n\": 2}"'])
def test_json_calls_with_objects_or_serialised_objects(arguments: str) -> None:
    call = json_call(f'{{"name": "get_user", "arguments": {arguments}}}')
    assert call == FunctionCall("get_user", {"id": "u1", "n": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "f", "arguments": {}', "the call does not parse"),
        ('{"name": "f"}', "the arguments of f are not a JSON object"),
        ('{"name": "f", "arguments": [1]}', "the arguments of f are not a JSON object"),
        ('{"name": "f", "arguments": "{x: 1}"}', "the arguments of f does not parse"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"arguments": {}}', "has no name"),
        ('[{"name": "f", "arguments": {}}]', "not list"),
        ("get_user(1)", "the call does not parse"),
    ],
)
def test_json_that_is_no_call_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadCall, match=message):
        json_call(text)


# --------------------------------------------------------------------------- apostrophes


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("""{"name": "f", "arguments": '{"a": "x", "b": 2}'}""", {"a": "x", "b": 2}),
        ("""{"name": "f", "arguments": '{"a": "it\\'s"}'}""", {"a": "it's"}),
        ("""{"name": "f", "arguments": '{"a": "it's"}'}""", {"a": "it's"}),
        ("""{"name": "f", "arguments": '{\n  "a": "q\\"q"\n}'} """, {"a": 'q"q'}),
        ("""{"name": "f", "arguments": '{}'}""", {}),
        ("""{"name": "f", "arguments": {"a": 1}}""", {"a": 1}),
    ],
)
def test_arguments_between_apostrophes(text: str, arguments: dict[str, Any]) -> None:
    assert quoted_call(text) == FunctionCall("f", arguments)


@pytest.mark.parametrize(
    "text",
    [
        """{"name": "f", "arguments": '{"a": }'}""",
        """{"name": "f", "arguments": '{"a": 1'}""",
        """{"name": "f", "arguments": '[1]'}""",
        """{'name': 'f', 'arguments': '{}'}""",
        """{"name": "f", "arguments": '{"a": 1}'} and more""",
    ],
)
def test_broken_quoted_calls_are_refused(text: str) -> None:
    with pytest.raises(BadCall):
        quoted_call(text)


# --------------------------------------------------------------------------- brackets


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[get_news(country="us")]', [FunctionCall("get_news", {"country": "us"})]),
        (
            '[Market Trends API(trend_type="A", n=2), get_news(x=[1, "a,b)"])]',
            [
                FunctionCall("Market Trends API", {"trend_type": "A", "n": 2}),
                FunctionCall("get_news", {"x": [1, "a,b)"]}),
            ],
        ),
        (
            "[get_news(q={'a': True, 'b': None}, t=(1, 2), f=-3.5, s='it\\'s',)]",
            [
                FunctionCall(
                    "get_news",
                    {"q": {"a": True, "b": None}, "t": [1, 2], "f": -3.5, "s": "it's"},
                )
            ],
        ),
        ("[get_news(a=true, b=null)]", [FunctionCall("get_news", {"a": True, "b": None})]),
        ("[get_news(from='x', $top=1)]", [FunctionCall("get_news", {"from": "x", "$top": 1})]),
        (
            "[News (Video) V2(u=1), News(u=2)]",
            [FunctionCall("News (Video) V2", {"u": 1}), FunctionCall("News", {"u": 2})],
        ),
        ("[a.b/c()]", [FunctionCall("a.b/c", {})]),
        ("[ get_news ( a = 1 ) ]", [FunctionCall("get_news", {"a": 1})]),
    ],
)
def test_calls_in_brackets(text: str, calls: list[FunctionCall]) -> None:
    assert meant_as_bracketed(text)
    assert list(bracketed_calls(text, NAMES)) == calls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[unknown(a=1)]", "no listed function"),
        ("[get_news(1, 2)]", "expected name=value"),
        ("[get_news(a=open('x'))]", "is not a literal"),
        ("[get_news(a=b)]", "is not a literal"),
        ("[get_news(a=1, a=2)]", "given twice"),
        ("[get_news(a==1)]", "expected name=value"),
        ("[get_news(a=1 2)]", "is not a literal"),
        ("[get_news(a={1, 2})]", "is not a literal"),
        ("[get_news(a=float('inf'))]", "is not a literal"),
        ("[get_news(a=1e999)]", "is not a literal"),
        ("[get_news(a='x)]", "not closed"),
        ("[get_news(a=1) get_news(b=2)]", "unexpected text"),
        ("[get_news(a=1), ]", "no listed function"),
    ],
)
def test_brackets_that_hold_no_call_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadCall, match=message):
        bracketed_calls(text, NAMES)


@pytest.mark.parametrize(
    "text", ["Here are the news.", "[1, 2, 3]", "[see below]", "f(x) = [1]", '["a (b)"]']
)
def test_plain_text_is_not_meant_as_a_call(text: str) -> None:
    assert not meant_as_bracketed(text)


# --------------------------------------------------------------------------- signatures

PARAMETERS = {
    "type": "dict",
    "properties": {
        "city": {"type": "str"},
        "days": {"type": "int"},
        "level": {"type": "float"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "list", "items": {"type": "str"}},
        "spot": {"type": "dict", "properties": {"x": {"type": "int"}}, "required": ["x"]},
        "odd": {"type": "any"},
    },
    "required": ["city"],
}
WEATHER = signature({"name": "weather", "description": "d", "parameters": PARAMETERS})


def test_signatures_come_out_in_one_form_with_the_types_of_json_schema() -> None:
    properties = WEATHER["function"]["parameters"]["properties"]
    assert WEATHER["type"] == "function"
    assert WEATHER["function"]["parameters"]["type"] == "object"
    assert [properties[n]["type"] for n in ("city", "days", "level", "tags", "spot")] == [
        *("string", "integer", "number", "array", "object")
    ]
    assert properties["tags"]["items"] == {"type": "string"}
    assert properties["spot"]["properties"]["x"] == {"type": "integer"}
    assert PARAMETERS["type"] == "dict", "the row itself is not changed"


def test_wrapped_and_bare_signatures_are_the_same() -> None:
    bare = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert signature({"type": "function", "function": bare}) == signature(bare)
    assert signature({"name": "f"}) == signature({"name": "f", "parameters": {}})
    assert signatures('[{"name": "f"}]') == (signature({"name": "f"}),)


@pytest.mark.parametrize("value", ["f", {"description": "no name"}, {"name": "f", "parameters": 3}])
def test_what_is_no_signature_is_refused(value: Any) -> None:
    with pytest.raises(BadCall):
        signature(value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Bern"},
        {"city": "Bern", "days": 2, "level": 1, "unit": "C", "tags": ["a"], "spot": {"x": 1}},
        {"city": "Bern", "days": 2.0, "odd": object},
    ],
)
def test_calls_that_fit_their_signature(arguments: dict[str, Any]) -> None:
    check_call(FunctionCall("weather", arguments), [WEATHER])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "lack city"),
        ({"city": 7}, "arguments.city should be string"),
        ({"city": "B", "days": "2"}, "arguments.days should be integer"),
        ({"city": "B", "days": True}, "arguments.days should be integer"),
        ({"city": "B", "days": 2.5}, "arguments.days should be integer"),
        ({"city": "B", "unit": "K"}, "not one of its choices"),
        ({"city": "B", "tags": ["a", 1]}, r"arguments.tags\[1\] should be string"),
        ({"city": "B", "spot": {}}, "arguments.spot lack x"),
        ({"city": "B", "town": "B"}, "unknown town"),
    ],
)
def test_calls_that_do_not_fit_say_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCall, match=message):
        check_call(FunctionCall("weather", arguments), [WEATHER])


def test_a_function_that_is_not_offered_cannot_be_called() -> None:
    with pytest.raises(BadCall, match="no such function: wether"):
        check_call(FunctionCall("wether", {"city": "Bern"}), [WEATHER])

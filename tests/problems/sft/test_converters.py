"""Every publisher's row becomes a conversation with JSON calls; broken rows say what is wrong."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from rstar2.agent.parser import CallParser
from rstar2.environments.python_tool import python_spec
from rstar2.errors import UserError
from rstar2.paper_format import TOOL_NAME
from rstar2.problems.sft.calls import BadCall
from rstar2.problems.sft.checks import OrderedTurns, ValidCalls
from rstar2.problems.sft.converters import CONVERTERS, UnusableRow, recognise, to_conversation
from rstar2.types import Conversation
from tests.problems.sft import sft_rows


def convert(name: str, fields: dict[str, Any]) -> Conversation:
    talk = CONVERTERS[name](fields)
    for check in (ValidCalls(), OrderedTurns()):
        assert check.drop(talk) is None
    return to_conversation(replace(talk, id="x-1"), "x")


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("name", CONVERTERS)
def test_every_publishers_row_is_recognised_and_converted(name: str) -> None:
    before = copy.deepcopy(sft_rows.ROWS[name])
    assert recognise(sft_rows.ROWS[name]) == name
    assert convert(name, sft_rows.ROWS[name]).id == "x-1"
    assert sft_rows.ROWS[name] == before


def test_unknown_fields_list_the_choices() -> None:
    with pytest.raises(UserError, match=r"glaive.*toolace"):
        recognise({"text": "hello"})


def test_toolace_calls_in_brackets_become_json() -> None:
    made = convert("toolace", sft_rows.TOOLACE)
    first, second = call("Market Trends API", {"trend_type": "GAINERS"}), call(
        "Market Trends API", {"trend_type": "LOSERS", "limit": 3}
    )  # fmt: skip
    assert said(made)[1:] == [
        ("user", "Which shares rose and which fell?"),
        ("assistant", f"{first}\n{second}"),
        ("tool", '[{"name": "Market Trends API", "results": {}}]'),
        ("assistant", "None rose and none fell."),
    ]
    system = made.messages[0].content
    assert "The current time is 2024-03-01" in system
    assert "Put it in the format" not in system, "the old way to write calls is gone"
    assert "Market Trends API" not in system, "signatures are written by the template"
    assert made.tools[0]["function"]["parameters"]["properties"]["limit"]["type"] == "integer"


def test_apigen_turns_and_serialised_arguments() -> None:
    made = convert("apigen", sft_rows.APIGEN)
    assert [m.role for m in made.messages] == [
        *("system", "user", "assistant", "user", "assistant", "tool", "assistant", "tool"),
        "assistant",
    ]
    assert made.messages[4].content == call("get_news_headlines", {"country": "Peru"})
    assert made.messages[6].content == call("make_password", {})
    assert [tool["function"]["name"] for tool in made.tools] == [
        *("get_news_headlines", "make_password")
    ]


def test_glaive_text_becomes_messages() -> None:
    made = convert("glaive", sft_rows.GLAIVE)
    looked = call("get_news_headlines", {"country": "France"})
    assert said(made) == [
        (
            "system",
            "You are a helpful assistant with access to the following functions. "
            "Use them if required",
        ),
        ("user", "What is new in France?"),
        ("assistant", f"I shall look.\n{looked}"),
        ("tool", '{"headlines": ["A", "B"]}'),
        ("assistant", "Two things:\n\n1. A\n\n2. B"),
        ("user", "Thanks!"),
        ("assistant", "You are welcome!"),
    ]
    assert len(made.tools) == 2


def test_glaive_without_functions() -> None:
    fields = {
        "system": "SYSTEM: You are a helpful assistant, with no access to external functions.\n\n",
        "chat": "USER: Hi\n\n\nASSISTANT: Hello! <|endoftext|>\n\n\n",
    }
    made = convert("glaive", fields)
    assert made.tools == ()
    assert said(made)[1:] == [("user", "Hi"), ("assistant", "Hello!")]


def test_magicoder_code_becomes_a_call_of_our_tool_that_our_parser_reads() -> None:
    talk = CONVERTERS["magicoder"](sft_rows.MAGICODER)
    made = convert("magicoder", sft_rows.MAGICODER)
    calls = CallParser((python_spec(),), 4).parse(made.messages[1].content, "t")
    assert [(c.name, c.shown, c.error) for c in calls] == [
        (TOOL_NAME, "def back(s):\n    return s[::-1]", None)
    ]
    assert made.messages[1].content.startswith("It can be sliced.\n<tool_call>")
    assert "Done." not in made.messages[1].content
    assert talk.notes == ("text after the code left out",)
    assert CONVERTERS["magicoder"](sft_rows.EVOL).notes == ()


@pytest.mark.parametrize(
    "fields", [sft_rows.NEMOTRON, sft_rows.NEMOTRON_V1], ids=["messages", "one text"]
)
def test_nemotron_chat_loses_its_switch(fields: dict[str, Any]) -> None:
    assert said(convert("nemotron", fields)) == [
        ("user", "Tell me about tea."),
        ("assistant", "Tea is made of leaves."),
    ]


def test_nemotron_keeps_a_real_system_prompt() -> None:
    fields = {**sft_rows.NEMOTRON, "system_prompt": "detailed thinking off\n\nBe brief."}
    assert said(convert("nemotron", fields))[0] == ("system", "Be brief.")


def test_openai_style_tool_calls() -> None:
    made = convert("messages", sft_rows.MESSAGES)
    assert made.messages[1].content == call("get_news_headlines", {"country": "US"})


# --------------------------------------------------------------------------- broken rows


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**fields, **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("toolace", changed(sft_rows.TOOLACE, conversations=...), "wrong type"),
        ("toolace", changed(sft_rows.TOOLACE, system="No functions."), "no functions"),
        ("toolace", changed(sft_rows.TOOLACE, conversations=["text"]), "wrong type"),
        ("toolace", changed(sft_rows.TOOLACE, conversations=[{"from": "user"}]), "missing field"),
        (
            "apigen",
            changed(sft_rows.APIGEN, conversations=[{"from": "robot", "value": "x"}]),
            "unknown role",
        ),
        ("apigen", changed(sft_rows.APIGEN, tools=None), "wrong type"),
        ("glaive", changed(sft_rows.GLAIVE, chat=7), "wrong type"),
        ("glaive", changed(sft_rows.GLAIVE, chat="hello USER: x"), "wrong shape"),
        ("magicoder", changed(sft_rows.MAGICODER, lang="rust"), "not Python"),
        ("magicoder", changed(sft_rows.MAGICODER, solution="No code."), "not one code block"),
        ("magicoder", changed(sft_rows.EVOL, response="```java\nx;\n```"), "not Python"),
        ("magicoder", changed(sft_rows.MAGICODER, problem=" "), "empty text"),
        ("tulu", changed(sft_rows.TULU, messages=[]), "wrong type"),
        (
            "tulu",
            changed(sft_rows.TULU, messages=[{"role": "user", "content": None}]),
            "wrong type",
        ),
        ("nemotron", changed(sft_rows.NEMOTRON, reasoning="on"), "reasoning trace"),
        ("nemotron", changed(sft_rows.NEMOTRON, category="math"), "not chat"),
        ("nemotron", changed(sft_rows.NEMOTRON, output=...), "missing field"),
    ],
)
def test_an_unusable_row_says_what_kind(name: str, fields: dict[str, Any], kind: str) -> None:
    with pytest.raises(UnusableRow) as error:
        CONVERTERS[name](fields)
    assert error.value.kind == kind


def _toolace_saying(text: str) -> dict[str, Any]:
    turns = [{"from": "user", "value": "?"}, {"from": "assistant", "value": text}]
    return {**sft_rows.TOOLACE, "conversations": turns}


def _apigen_calling(text: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "?"}, {"from": "function_call", "value": text}]
    return {**sft_rows.APIGEN, "conversations": turns}


def _glaive_calling(text: str) -> dict[str, Any]:
    chat = f"USER: ?\n\n\nASSISTANT: <functioncall> {text} <|endoftext|>\n\n\n"
    return {**sft_rows.GLAIVE, "chat": chat}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("toolace", _toolace_saying("[Market Trends(trend_type='GAINERS')]")),
        ("toolace", _toolace_saying("[Market Trends API(trend_type=GAINERS)]")),
        ("apigen", _apigen_calling('{"name": "make_password", "arguments": {}')),
        ("apigen", changed(sft_rows.APIGEN, tools="[{]")),
        ("glaive", _glaive_calling('{"name": "f", "arguments": \'{"country": Peru}\'}')),
        ("glaive", changed(sft_rows.GLAIVE, system='SYSTEM: Functions -\n{"name": }')),
        ("magicoder", changed(sft_rows.MAGICODER, solution="```python\ndef f(:\n```")),
    ],
)
def test_a_call_that_does_not_parse_is_refused_and_never_repaired(
    name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadCall):
        CONVERTERS[name](fields)

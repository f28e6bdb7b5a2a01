"""The JSON of /v1/chat/completions: what is accepted, what is refused and why, what is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rstar2.endpoint.chat import (
    ChatChoice,
    ChatRequest,
    ChatRequestError,
    chunks,
    completion,
    read_reply,
    read_request,
)
from rstar2.endpoint.segments import ChatCall, ChatMessage

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def read(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"model": "any", "messages": HI, **fields}).encode())


def test_a_request_with_everything_that_is_supported() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"},
    ]
    request = read(
        messages=messages,
        tools=[TOOL],
        n=2,
        stop="x",
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0.2,
        top_p=1,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=False,
        user="me",
    )
    assert request == ChatRequest(
        messages=(
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "ab"),
            ChatMessage("assistant", "", (ChatCall("c", "add", '{"a": 1}'),)),
            ChatMessage("tool", "3"),
        ),
        tools=(TOOL,),
        choices=2,
        max_tokens=7,
        stops=("x",),
        stream=True,
        include_usage=True,
    )
    assert read(tool_choice="none").calls_allowed is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: expected a list with at least one message"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "messages: the last message"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role: 'robot' is none of system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: 'image_url': only text parts are supported",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [{"role": "user", "audio": {"id": 1}}]}, "messages[0].audio: not supported"),
        ({"n": 0}, "n: 0 is no integer from 1 to 16"),
        ({"max_tokens": True}, "max_tokens: True is no integer"),
        ({"temperature": "hot"}, "temperature: 'hot' is no number from 0 to 2"),
        ({"stop": [""]}, "stop: expected a string"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name: 'add' is there twice"),
        ({"tool_choice": "required"}, 'tool_choice: "required" is not supported; use auto or none'),
        ({"logprobs": True}, "logprobs: not supported; leave it out or use false"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: not supported; leave it out or use 0"),
        ({"best_of": 3}, "best_of: unknown or not supported; leave it out"),
    ],
)
def test_a_refusal_names_the_field_and_the_way_out(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatRequestError) as refusal:
        read(**fields)
    assert message in str(refusal.value)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ChatRequestError, match="body"):
        read_request(body)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("plain  text ", "plain  text ", []),
        (CALL, "", ['{"a": 1}']),
        (f"I add.\n{CALL}\n{CALL} Then", "I add.\nThen", ['{"a": 1}', '{"a": 1}']),
        ('<tool_call>{"name": "now"}</tool_call>', "", ["{}"]),
        (f"<tool_call>\n{{broken\n</tool_call>{CALL}", "<tool_call>\n{broken\n</tool_call>", [1]),
    ],
)
def test_calls_are_read_and_invalid_ones_stay_text(
    text: str, content: str, arguments: list[Any]
) -> None:
    reply = read_reply(text, call_prefix="c", calls_allowed=True)
    assert reply.content == content
    assert len(reply.calls) == len(arguments)
    assert [call.id for call in reply.calls] == [f"c{i}" for i in range(len(arguments))]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}} and\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}}',
        '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
        "<tool_call>" + '{"a":' * 100_000,
    ],
)
def test_a_block_that_is_no_call_is_text(text: str) -> None:
    assert read_reply(text, call_prefix="c", calls_allowed=True) == ChatMessage("assistant", text)


def test_without_tools_a_call_is_text() -> None:
    assert read_reply(CALL, call_prefix="c", calls_allowed=False).content == CALL


def test_stream_and_body_carry_the_same_message() -> None:
    message = ChatMessage("assistant", "", (ChatCall("c0", "add", "{}"),))
    choices = [ChatChoice(message, "tool_calls")]
    body = completion("i", 1, "m", choices, {"total_tokens": 3})
    parts = list(chunks("i", 1, "m", choices, {"total_tokens": 3}))
    delta = parts[0]["choices"][0]["delta"]
    assert delta["tool_calls"][0].pop("index") == 0
    assert delta == body["choices"][0]["message"]
    assert parts[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert parts[2]["usage"] == body["usage"]

"""The JSON of `/v1/chat/completions`, in and out. Pure.

`read_request` accepts what the chat template can render and the rollout can sample. Everything
else is a ChatRequestError (status 400) that names the field and the way out; nothing is ignored
silently, with these exceptions:

- `temperature`, `top_p` and `seed` are checked but not used: the recipe decides how a rollout is
  sampled, because the learner must reproduce the sampled distribution.
- `model` may have any value: a rollout has one model.
- `name`, `user`, `metadata`, `store`, `prompt_cache_key`, `safety_identifier` and
  `service_tier` do not reach the model.

Tool calls have the Hermes format that CHAT_TEMPLATE describes to the model. `read_reply` turns
them into `tool_calls`. A block that is not a valid call stays in the text, as the model wrote it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar2.endpoint.segments import ChatCall, ChatMessage, ToolSignature
from rstar2.errors import UserError
from rstar2.types import StopReason

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES, MAX_STOPS = 16, 16
UNUSED = frozenset(
    ("model", "user", "metadata", "store", "prompt_cache_key", "safety_identifier", "service_tier")
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
"""Fields that are accepted only with these values, which change nothing."""
_CALL = re.compile(r"<tool_call>\s*(?=\{)")
_CALL_END = re.compile(r"\s*</tool_call>")
_DECODER = json.JSONDecoder()


class ChatRequestError(UserError):
    """A request that cannot be served: what is wrong with which field.

    `stop` is set if the request is in order, but the rollout has reached a limit.
    """

    def __init__(self, param: str, message: str, stop: StopReason | None = None) -> None:
        super().__init__(message if stop is not None else f"{param}: {message}")
        self.param, self.stop = param, stop


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request, checked."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSignature, ...] = ()
    calls_allowed: bool = True
    """False for `tool_choice: none`: tool calls in the reply stay text."""
    choices: int = 1
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


# --------------------------------------------------------------------------- requests


def read_request(body: bytes) -> ChatRequest:
    """Check a request's body; raises ChatRequestError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChatRequestError("body", f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ChatRequestError("body", "expected a JSON object")
    fields = {k: v for k, v in fields.items() if v is not None and k not in UNUSED}
    for name, allowed in NEUTRAL.items():
        if name in fields and fields.pop(name) not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            raise ChatRequestError(name, f"not supported; leave it out or use {values}")
    for name, high in (("temperature", 2.0), ("top_p", 1.0), ("seed", math.inf)):
        if name in fields:
            _number(name, fields.pop(name), -math.inf if name == "seed" else 0.0, high)
    tools = _tools(fields.pop("tools", []))
    request = ChatRequest(
        messages=_messages(fields.pop("messages", None)),
        tools=tools,
        calls_allowed=_tool_choice(fields.pop("tool_choice", "auto")),
        choices=_integer("n", fields.pop("n", 1), 1, MAX_CHOICES),
        max_tokens=_max_tokens(fields),
        stops=_stops(fields.pop("stop", [])),
        stream=_boolean("stream", fields.pop("stream", False)),
        include_usage=_stream_options(fields.pop("stream_options", {})),
    )
    if fields:
        raise ChatRequestError(min(fields), "unknown or not supported; leave it out")
    return request


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise ChatRequestError("messages", "expected a list with at least one message")
    messages = tuple(_message(f"messages[{i}]", message) for i, message in enumerate(value))
    if messages[-1].role == "assistant":
        raise ChatRequestError(
            "messages", "the last message is the assistant's; continuing it is not supported"
        )
    return messages


def _message(where: str, value: Any) -> ChatMessage:
    if not isinstance(value, dict):
        raise ChatRequestError(where, "expected an object")
    fields = {k: v for k, v in value.items() if v not in (None, [], "") or k == "content"}
    role = fields.pop("role", None)
    if role not in ROLES:
        raise ChatRequestError(f"{where}.role", f"{role!r} is none of {', '.join(ROLES)}")
    fields.pop("name", None)
    content = _content(f"{where}.content", fields.pop("content", None))
    calls: tuple[ChatCall, ...] = ()
    if role == "assistant":
        given = fields.pop("tool_calls", [])
        if not isinstance(given, list):
            raise ChatRequestError(f"{where}.tool_calls", "expected a list")
        calls = tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(given))
    elif role == "tool":
        fields.pop("tool_call_id", None)
    if fields:
        raise ChatRequestError(f"{where}.{min(fields)}", "not supported; leave it out")
    return ChatMessage("system" if role == "developer" else role, content, calls)


def _content(where: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _utf8(where, value)
    if not isinstance(value, list):
        raise ChatRequestError(where, "expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ChatRequestError(f"{where}[{i}]", f"{kind!r}: only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise ChatRequestError(f"{where}[{i}].text", "expected a string")
        texts.append(_utf8(f"{where}[{i}].text", part["text"]))
    return "".join(texts)


def _utf8(where: str, text: str) -> str:
    if not _encodable(text):
        raise ChatRequestError(where, "holds a lone surrogate (\\ud800-\\udfff)")
    return text


def _encodable(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode("utf-8")


def _call(where: str, value: Any) -> ChatCall:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise ChatRequestError(where, "expected an object of type function")
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRequestError(f"{where}.function", "expected an object with a name")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise ChatRequestError(f"{where}.function.arguments", "expected a string of JSON")
    return ChatCall(
        str(value.get("id", "")),
        _utf8(f"{where}.function.name", function["name"]),
        _utf8(f"{where}.function.arguments", arguments),
    )


def _tools(value: Any) -> tuple[ToolSignature, ...]:
    if not isinstance(value, list):
        raise ChatRequestError("tools", "expected a list")
    names: set[str] = set()
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ChatRequestError(f"tools[{i}]", "expected an object of type function")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ChatRequestError(f"tools[{i}].function.name", "expected a string")
        if name in names:
            raise ChatRequestError(f"tools[{i}].function.name", f"{name!r} is there twice")
        names.add(name)
    return tuple(value)


def _tool_choice(value: Any) -> bool:
    if value not in ("auto", "none"):
        raise ChatRequestError(
            "tool_choice", f"{json.dumps(value)} is not supported; use auto or none"
        )
    return bool(value == "auto")


def _max_tokens(fields: dict[str, Any]) -> int | None:
    given = [
        _integer(name, fields.pop(name), 1, 2**31)
        for name in ("max_tokens", "max_completion_tokens")
        if name in fields
    ]
    return min(given) if given else None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ChatRequestError("stop", "expected a string or a list of strings, none empty")
    if len(stops) > MAX_STOPS:
        raise ChatRequestError("stop", f"{len(stops)} strings; at most {MAX_STOPS} are supported")
    return tuple(stops)


def _stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise ChatRequestError("stream_options", "only include_usage is supported")
    return _boolean("stream_options.include_usage", value.get("include_usage") or False)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ChatRequestError(name, f"{value!r} is no number from {low:g} to {high:g}")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ChatRequestError(name, f"{value!r} is no integer from {low} to {high}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ChatRequestError(name, f"{value!r} is neither true nor false")
    return value


# --------------------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One sampled reply, as the program receives it."""

    message: ChatMessage
    finish: str
    """`stop`, `length` or `tool_calls`."""


def read_reply(text: str, *, call_prefix: str, calls_allowed: bool) -> ChatMessage:
    """The sampled text as an assistant message; ids of calls start with `call_prefix`."""
    calls: list[ChatCall] = []
    outside: list[str] = []
    position = 0
    for start, end, name, arguments in _call_blocks(text) if calls_allowed else ():
        outside.append(text[position:start].strip())
        calls.append(ChatCall(f"{call_prefix}{len(calls)}", name, json.dumps(arguments)))
        position = end
    if not calls:
        return ChatMessage("assistant", text)
    outside.append(text[position:].strip())
    return ChatMessage("assistant", "\n".join(filter(None, outside)), tuple(calls))


def _call_blocks(text: str) -> Iterator[tuple[int, int, str, Any]]:
    """(start, end, name, arguments) of every valid call, in order."""
    position = 0
    while match := _CALL.search(text, position):
        position = match.end()
        try:
            payload, stop = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        close = _CALL_END.match(text, stop)
        name, arguments = payload.get("name"), payload.get("arguments", {})
        if close is None or not isinstance(name, str) or not isinstance(arguments, dict):
            continue
        if not _encodable(name):
            continue
        position = close.end()
        yield match.start(), close.end(), name, arguments


def completion(
    id: str, created: int, model: str, choices: Sequence[ChatChoice], usage: Mapping[str, int]
) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": _message_out(choice.message),
                "logprobs": None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": dict(usage),
    }


def chunks(
    id: str,
    created: int,
    model: str,
    choices: Sequence[ChatChoice],
    usage: Mapping[str, int] | None,
) -> Iterator[dict[str, Any]]:
    """The same response as a stream: per choice one chunk with the message, one that ends it."""
    head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
    for index, choice in enumerate(choices):
        delta = _message_out(choice.message)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        for part, finish in ((delta, None), ({}, choice.finish)):
            body = {"index": index, "delta": part, "logprobs": None, "finish_reason": finish}
            yield {**head, "choices": [body]}
    if usage is not None:
        yield {**head, "choices": [], "usage": dict(usage)}


def _message_out(message: ChatMessage) -> dict[str, Any]:
    if not message.calls:
        return {"role": "assistant", "content": message.content}
    return {
        "role": "assistant",
        "content": message.content or None,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ],
    }


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

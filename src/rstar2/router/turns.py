"""What the scheduler needs to know about a request and its answer: their sizes in tokens. Pure.

A request with token ids (`/inference/v1/generate`, or a `prompt` of ids) has a known length. The
length of a text is estimated: bytes of JSON times the tokens per byte of the answers so far, which
report how many tokens their prompts had. Answers are never changed and hardly read: an
`AnswerMeter` looks for the token counts in the bytes that pass through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from rstar2.errors import UserError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
TURN_PATHS = frozenset((COMPLETIONS, CHAT, GENERATE))

COMPLETIONS_DEFAULT = 16
"""Tokens that a completion may have if the request names no limit, as in OpenAI's interface."""
FIRST_TOKENS_PER_BYTE = 0.3
SCALE_FADE = 0.99
"""Weight of an answer relative to the next one in the estimate of tokens per byte."""
KEPT_BYTES = 4096
"""The end of a streamed answer that is searched for its token counts."""

_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_TRUNCATED = re.compile(rb'"finish_reason":\s*"length"')
_IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')
_ID_LIST = re.compile(rb"[\[\]\d\s,]*")


class _AskedSampling(msgspec.Struct):
    max_tokens: int | None = None
    n: int | None = None


class _AskedTurn(msgspec.Struct):
    """The fields of a request that decide its size; the others are left to the engine."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    sampling_params: _AskedSampling | None = None


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """One request to be forwarded: where to, what, and how large it may become."""

    path: str
    body: bytes
    prompt_tokens: int
    max_new_tokens: int | None
    """None: up to the engine's longest sequence."""
    text_bytes: int = 0
    """Bytes of the text that `prompt_tokens` was estimated from; 0 if it was counted."""


class TokenScale:
    """Tokens per byte of JSON text, learnt from answers."""

    def __init__(self) -> None:
        self._tokens, self._bytes = FIRST_TOKENS_PER_BYTE * 1000, 1000.0

    def estimate(self, text_bytes: int) -> int:
        """Estimate the number of tokens of a text from its size in bytes."""
        return max(1, round(text_bytes * self._tokens / self._bytes))

    def observe(self, text_bytes: int, tokens: int) -> None:
        """An answer reported how many tokens its prompt had."""
        self._tokens = SCALE_FADE * self._tokens + tokens
        self._bytes = SCALE_FADE * self._bytes + text_bytes


def read_turn(path: str, body: bytes, scale: TokenScale) -> RoutedTurn:
    """The request as the scheduler sees it; UserError if it cannot be read."""
    try:
        asked = msgspec.json.decode(body, type=_AskedTurn)
    except msgspec.MsgspecError as error:
        raise UserError(f"{path}: the body is not a valid request: {error}") from error
    sampling = asked.sampling_params or _AskedSampling()
    most = asked.max_completion_tokens or asked.max_tokens or sampling.max_tokens
    if most is None and path == COMPLETIONS:
        most = COMPLETIONS_DEFAULT
    choices = max(1, asked.n or sampling.n or 1)
    new = None if most is None else max(1, most) * choices
    ids = bytes(asked.token_ids) or bytes(asked.prompt)
    if ids.startswith(b"[") and _ID_LIST.fullmatch(ids):
        return RoutedTurn(path, body, ids.count(b",") + 1, new)
    text = len(asked.prompt) + len(asked.messages) + len(asked.tools) + len(asked.token_ids)
    return RoutedTurn(path, body, scale.estimate(text), new, text)


class AnswerMeter:
    """Finds the token counts of one answer in the bytes that pass through."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._events = 0
        self._end = b""

    def feed(self, part: bytes) -> None:
        """A part of the answer."""
        if self._streamed:
            self._events += part.count(b"data:")
            self._end = (self._end + part)[-KEPT_BYTES:]
        else:
            self._end += part

    @property
    def prompt_tokens(self) -> int | None:
        """What the answer says about the length of its prompt."""
        return _last(_PROMPT, self._end)

    @property
    def new_tokens(self) -> int:
        """Sampled tokens: as reported, else the ids, else one for each event of a stream."""
        reported = _last(_COMPLETION, self._end)
        if reported is not None:
            return reported
        if self._streamed:
            return max(0, self._events - 1)  # the last event is [DONE]
        return sum(len(ids.split(b",")) for ids in _IDS.findall(self._end) if ids.strip())

    @property
    def truncated(self) -> bool:
        """Whether the answer ended at its limit."""
        return _TRUNCATED.search(self._end) is not None


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    values = pattern.findall(text)
    return int(values[-1]) if values else None

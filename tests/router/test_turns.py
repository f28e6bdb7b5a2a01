"""Sizes of requests and answers, computed by hand."""

from __future__ import annotations

import pytest

from rstar2.errors import UserError
from rstar2.router.turns import AnswerMeter, TokenScale, read_turn


def test_token_ids_are_counted() -> None:
    scale = TokenScale()
    turn = read_turn(
        "/inference/v1/generate",
        b'{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "n": 2}}',
        scale,
    )
    assert (turn.prompt_tokens, turn.max_new_tokens, turn.text_bytes) == (3, 18, 0)
    turn = read_turn("/v1/completions", b'{"prompt": [1,2,3,4]}', scale)
    assert (turn.prompt_tokens, turn.max_new_tokens) == (4, 16)


def test_text_is_estimated_and_the_estimate_is_learnt() -> None:
    scale = TokenScale()
    body = b'{"messages": ' + b'"' + 98 * b"x" + b'"' + b', "max_completion_tokens": 7}'
    turn = read_turn("/v1/chat/completions", body, scale)
    assert (turn.prompt_tokens, turn.text_bytes, turn.max_new_tokens) == (30, 100, 7)
    scale.observe(10_000, 5000)
    # 0.99 x 300 + 5000 tokens in 0.99 x 1000 + 10,000 bytes
    assert scale.estimate(100) == round(100 * 5297 / 10_990)


def test_a_chat_without_a_limit_may_reach_the_longest_sequence() -> None:
    turn = read_turn("/v1/chat/completions", b'{"messages": []}', TokenScale())
    assert turn.max_new_tokens is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"max_tokens": "x"}'])
def test_a_request_that_cannot_be_read_gets_one_sentence(body: bytes) -> None:
    with pytest.raises(UserError, match="/v1/completions: the body is not a valid request"):
        read_turn("/v1/completions", body, TokenScale())


def test_counts_of_an_answer() -> None:
    meter = AnswerMeter(streamed=False)
    meter.feed(
        b'{"choices":[{"text":"\\"completion_tokens\\": 99","finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":12,"completion_tokens":5}}'
    )
    assert (meter.prompt_tokens, meter.new_tokens, meter.truncated) == (12, 5, True)


def test_without_usage_ids_or_events_are_counted() -> None:
    meter = AnswerMeter(streamed=False)
    meter.feed(b'{"choices":[{"token_ids":[4, 5, 6],"finish_reason":"stop"}]}')
    assert (meter.prompt_tokens, meter.new_tokens, meter.truncated) == (None, 3, False)
    meter = AnswerMeter(streamed=True)
    for part in (b"data: {}\n\n", b"data: {}\n\ndata: {}\n\n", b"data: [DONE]\n\n"):
        meter.feed(part)
    assert meter.new_tokens == 3


def test_counts_may_be_split_between_parts() -> None:
    meter = AnswerMeter(streamed=True)
    meter.feed(b'data: {"usage":{"prompt_tokens":12,"comple')
    meter.feed(b'tion_tokens":345}}\n\n')
    assert (meter.prompt_tokens, meter.new_tokens) == (12, 345)

"""The endpoint over HTTP with OpenAI's own client.

The generator here is scripted; `test_exact.py` uses a real engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import SamplingConfig
from rstar2.endpoint.chat import read_request
from rstar2.endpoint.server import EndpointServer, RolloutEndpoint
from rstar2.errors import EngineError
from rstar2.types import Generation, StopReason
from tests.endpoint.scripted import Script

if TYPE_CHECKING:
    from openai import AsyncOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="session")

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>'


MakeRollout = Callable[..., RolloutEndpoint]


@pytest.fixture
def make(template: Template) -> MakeRollout:
    def make_rollout(
        *texts: str | Exception | None, max_length: int = 400, max_turns: int = 8
    ) -> RolloutEndpoint:
        spec = RolloutSpec(SamplingConfig(temperature=0.7), max_length, max_turns)
        return RolloutEndpoint("g/0", 1, Script(template, list(texts)), template, spec, 60)

    return make_rollout


def client_of(rollout: RolloutEndpoint) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=rollout.base_url, api_key="any", max_retries=2)


def script(rollout: RolloutEndpoint) -> Script:
    assert isinstance(rollout.generator, Script)
    return rollout.generator


# --------------------------------------------------------------------------- requests


@pytest.mark.slow
async def test_the_official_client_chats_and_calls_tools(
    server: EndpointServer, make: MakeRollout, template: Template
) -> None:
    rollout = make(CALL, "It is 42.")
    async with server.rollout(rollout), client_of(rollout) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        first = await client.chat.completions.create(
            model="policy", messages=HI, tools=[TOOL], temperature=0.0, max_tokens=100
        )
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.content == "I add."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 6}')
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        second = await client.chat.completions.create(
            model="policy",
            messages=[*HI, message, result],  # type: ignore[list-item]
            tools=[TOOL],
        )
        assert second.choices[0].message.content == "It is 42."
        assert second.choices[0].finish_reason == "stop"
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(script(rollout).prompts[1])
    (segment,) = rollout.tokens.segments
    assert CALL in template.decode(segment.token_ids)
    assert "<tool_response>\n42\n</tool_response>" in template.decode(segment.token_ids)
    assert script(rollout).samplings[0].temperature == 0.7, "the recipe decides how to sample"
    assert script(rollout).released == ["g/0"]


async def test_a_stream_carries_the_same_reply(server: EndpointServer, make: MakeRollout) -> None:
    rollout = make(CALL)
    async with server.rollout(rollout), client_of(rollout) as client:
        stream = await client.chat.completions.create(
            model="policy",
            messages=HI,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    delta = chunks[0].choices[0].delta
    assert delta.content == "I add."
    assert delta.tool_calls is not None
    assert delta.tool_calls[0].index == 0
    assert delta.tool_calls[0].function is not None
    assert delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None


async def test_several_choices_are_several_segments(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make("one", "two")
    async with server.rollout(rollout), client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=HI, n=2)
    assert [choice.message.content for choice in reply.choices] == ["one", "two"]
    assert len(rollout.tokens.segments) == 2
    assert sorted(script(rollout).released) == ["g/0", "g/0#1"]


async def test_a_refusal_is_a_bad_request_that_leaves_no_trace(
    server: EndpointServer, make: MakeRollout
) -> None:
    import openai

    rollout = make("fine")
    async with server.rollout(rollout), client_of(rollout) as client:
        with pytest.raises(openai.BadRequestError, match="logprobs: not supported"):
            await client.chat.completions.create(model="policy", messages=HI, logprobs=True)
        await client.chat.completions.create(model="policy", messages=HI)
    assert len(rollout.tokens.segments) == 1
    assert rollout.stop is None
    assert rollout.refused.startswith("logprobs")


async def test_limits_of_the_rollout_are_refusals_that_end_it(
    server: EndpointServer, make: MakeRollout
) -> None:
    import openai

    long = make(max_length=9)
    async with server.rollout(long), client_of(long) as client:
        with pytest.raises(openai.BadRequestError, match="leaves no room for a reply") as refusal:
            await client.chat.completions.create(model="policy", messages=HI)
    assert refusal.value.code == "context_length_exceeded"
    assert long.stop is StopReason.MAX_LENGTH
    many = make("one", max_turns=1)
    async with server.rollout(many), client_of(many) as client:
        await client.chat.completions.create(model="policy", messages=HI)
        with pytest.raises(openai.BadRequestError, match="limit of 1 turns"):
            await client.chat.completions.create(model="policy", messages=HI)
    assert many.stop is StopReason.MAX_TURNS


async def test_a_reply_has_no_more_tokens_than_asked(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make("What is the product of 12 and 34?")
    async with server.rollout(rollout), client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=HI, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert len(rollout.tokens.segments[0].turns[0].sampled_ids) == 2


async def test_a_failed_engine_is_not_asked_again(
    server: EndpointServer, make: MakeRollout
) -> None:
    import openai

    rollout = make(EngineError("no engine is left"))
    async with server.rollout(rollout), client_of(rollout) as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="no engine is left"):
                await client.chat.completions.create(model="policy", messages=HI)
    assert rollout.failure is not None
    assert rollout.failure.name == "engine"
    assert len(script(rollout).prompts) == 1, "the client must not retry"


async def test_a_url_ends_with_its_rollout_and_cannot_be_guessed(
    server: EndpointServer, make: MakeRollout
) -> None:
    import openai

    rollout = make()
    async with server.rollout(rollout):
        base = rollout.base_url
        guess = base.rsplit("/", 2)[0] + "/guess/v1"
        async with httpx.AsyncClient(timeout=120) as http:
            assert (await http.get(f"{guess}/models")).status_code == 404
            assert (await http.get(f"{base}/models")).status_code == 200
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await client.chat.completions.create(model="policy", messages=HI)


async def test_a_client_that_disconnects_leaves_no_trace(
    server: EndpointServer, make: MakeRollout
) -> None:
    rollout = make(None, "again")
    async with server.rollout(rollout), client_of(rollout) as client:
        lost = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=HI))
        await script(rollout).asked.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        reply = await client.chat.completions.create(model="policy", messages=HI)
    assert reply.choices[0].message.content == "again"
    assert len(rollout.tokens.segments) == 1
    assert rollout.failure is None


async def test_a_request_still_running_is_cancelled_with_its_rollout(
    server: EndpointServer, make: MakeRollout
) -> None:
    import openai

    rollout = make(None)
    async with client_of(rollout):
        async with server.rollout(rollout):
            client = client_of(rollout)
            lost = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=HI)
            )
            await script(rollout).asked.wait()
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await lost
        await client.close()
    assert rollout.tokens.segments == ()


async def test_the_clock_of_a_program_stands_still_while_the_model_answers(
    make: MakeRollout,
) -> None:
    """Two requests at once, on engines that may be full: only the program's own time counts."""
    rollout = make("one", "two", max_turns=4)
    generate, clocks, gate = rollout.generator.generate, [], asyncio.Event()

    async def full(*args: Any, **about: Any) -> Generation:
        clocks.append(deadline.when())
        await gate.wait()
        return await generate(*args, **about)

    rollout.generator.generate = full  # type: ignore[method-assign]
    request = read_request(json.dumps({"model": "policy", "messages": HI}).encode())
    async with asyncio.timeout(120) as deadline:
        rollout.program = deadline
        ends = deadline.when()
        assert ends is not None
        both = [asyncio.ensure_future(rollout.complete(request)) for _ in range(2)]
        while len(clocks) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*both)
        again = deadline.when()
        assert again is not None
        assert again >= ends
    assert clocks == [None, None]

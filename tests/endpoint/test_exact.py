"""The proof: logprobs that the engine sampled with equal the learner's, through a real client.

The tiny model has random weights, so that its text is mostly not what a tokenizer would produce:
a history that is tokenised again gives other ids, and the comparison must show it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rstar2.agent.loop import RolloutSpec
from rstar2.agent.template import Template
from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig, SamplingConfig
from rstar2.endpoint.program import run_program
from rstar2.endpoint.server import EndpointServer
from rstar2.engine.base import Generator
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.errors import InvariantError
from rstar2.learner.learner import Learner
from rstar2.types import Batch, Generation, Problem, Sample, Sampling, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SPEC = RolloutSpec(SamplingConfig(), max_length=400, max_turns=12)
PROBLEM = Problem("p", "What is 6 times 7?", "42")
TOLERANCE = 1e-4
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

Messages = list[dict[str, Any]]
Ask = Callable[..., Awaitable[dict[str, Any]]]


def asker(base_url: str, api_key: str, seen: list[str]) -> tuple[AsyncOpenAI, Ask]:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def ask(messages: Messages, **options: Any) -> dict[str, Any]:
        create: Any = client.chat.completions.create
        reply = await create(model="policy", messages=messages, max_tokens=24, **options)
        message = reply.choices[0].message
        seen.extend(choice.message.content or "" for choice in reply.choices)
        return dict(message.model_dump())

    return client, ask


async def rewriting_agent(base_url: str, api_key: str, problem: Problem) -> str:
    """Everything that harnesses do to a history; returns all replies that it saw."""
    seen: list[str] = []
    client, ask = asker(base_url, api_key, seen)
    async with client:
        messages: Messages = [{"role": "user", "content": problem.prompt}]
        for text in ("And then?", "Go on.", "More."):
            messages += [await ask(messages), {"role": "user", "content": text}]
        branch = [*messages, await ask(messages)]
        sub_agent: Messages = [{"role": "user", "content": "You are another agent."}]
        await asyncio.gather(ask(messages), ask(sub_agent), ask(messages, n=2))
        kept = [{"role": "user", "content": "So far: nothing."}, branch[-1]]
        await ask([*kept, {"role": "user", "content": "Now?"}], stop=["e", "1"])
        edited = {**branch[1], "content": f"{branch[1]['content']}!"}
        await ask([messages[0], edited, {"role": "user", "content": "Edited."}], tools=[TOOL])
    return json.dumps(seen)


async def rollout(
    agent: Any, server: EndpointServer, generator: Generator, template: Template
) -> Trajectory:
    return await run_program(
        agent,
        PROBLEM,
        id="g/0",
        group_id="g",
        seed=3,
        server=server,
        generator=generator,
        template=template,
        spec=SPEC,
        generate_deadline_s=120,
        program_deadline_s=600,
        reward_deadline_s=60,
        reward=lambda episode: 1.0,
    )


def largest_gap(trajectory: Trajectory, model: Path) -> float:
    """Largest difference between rollout logprobs and the learner's, over all sampled tokens."""
    samples = tuple(
        Sample(s.token_ids, s.mask, s.logprobs, 1.0, "g", str(i), 0)
        for i, s in enumerate(trajectory.segments)
    )
    learner = Learner(
        model,
        LearnerConfig(tokens_per_microbatch=4096),
        OptimizerConfig(lr=0.0),
        total_steps=1,
        seed=0,
    )
    return float(learner.rl_step(Batch(0, samples), LossConfig(), 1)["mismatch/abs_max"])


async def test_every_segment_is_scored_by_the_learner_as_it_was_sampled(
    server: EndpointServer, engine: EmbeddedEngine, template: Template, tiny_dir: Path
) -> None:
    trajectory = await rollout(rewriting_agent, server, engine, template)
    assert trajectory.failure is None
    assert trajectory.reward is not None
    assert trajectory.reward.value == 1.0
    segments = trajectory.segments
    assert len(segments[0].turns) == 4, "the conversation without rewriting is one segment"
    assert len(segments) == 7, "fork, sub-agent, two choices, compaction, edit"
    turns = [turn for segment in segments for turn in segment.turns]
    assert len(turns) == 10
    assert trajectory.answer is not None
    seen = Counter(json.loads(trajectory.answer))
    recorded = Counter(template.turn_text(turn.sampled_ids) for turn in turns)
    assert (seen - recorded).total() == (recorded - seen).total() <= 1, "one had a stop string"
    for cut, whole in zip(seen - recorded, recorded - seen, strict=True):
        assert whole.startswith((f"{cut}e", f"{cut}1"))
    sampled = [turn.sampled_ids for turn in turns]
    again = [template.encode(template.decode(ids)) for ids in sampled]
    assert sampled != again, "the sampled ids must differ from the tokenizer's for a fair test"
    assert sum(map(len, sampled)) == sum(sum(s.mask) for s in segments)
    gap = await asyncio.to_thread(largest_gap, trajectory, tiny_dir)
    assert gap < TOLERANCE


@dataclass
class Retokenising:
    """The fault of ordinary servers: the prompt is text that is tokenised again."""

    generator: Generator
    template: Template

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        again = self.template.encode(self.template.decode(prompt_ids))
        return await self.generator.generate(
            again, sampling, session=session, deadline_s=deadline_s
        )

    async def release(self, session: str) -> None:
        await self.generator.release(session)


async def chat(base_url: str, api_key: str, problem: Problem) -> float:
    client, ask = asker(base_url, api_key, [])
    async with client:
        messages: Messages = [{"role": "user", "content": problem.prompt}]
        for _ in range(3):
            messages += [await ask(messages), {"role": "user", "content": "And then?"}]
    return 1.0


async def test_a_history_that_is_tokenised_again_is_caught(
    server: EndpointServer, engine: EmbeddedEngine, template: Template, tiny_dir: Path
) -> None:
    faulty = Retokenising(engine, template)
    wrong = await rollout(chat, server, faulty, template)
    assert await asyncio.to_thread(largest_gap, wrong, tiny_dir) > 100 * TOLERANCE
    right = await rollout(chat, server, engine, template)
    assert await asyncio.to_thread(largest_gap, right, tiny_dir) < TOLERANCE


class ForgetfulTemplate(Template):
    """Renders histories as text, sampled replies included."""

    def chat_ids(self, messages: Any, tools: Any, **_: Any) -> tuple[int, ...]:
        return super().chat_ids(messages, tools, sampled={})


async def test_a_template_that_tokenises_again_cannot_record(
    server: EndpointServer, engine: EmbeddedEngine, template: Template
) -> None:
    forgetful = ForgetfulTemplate(template.tokenizer, template.config)
    with pytest.raises(InvariantError, match="does not extend the sampled tokens"):
        await rollout(chat, server, engine, forgetful)

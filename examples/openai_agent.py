"""Train an agent that knows nothing of rstar2: a small quiz on OpenAI's SDK, with a second chance.

The agent below could talk to any OpenAI-compatible server. rstar2 gives it a base URL of its own
for every rollout, and trains the model on exactly the tokens that it sampled there.

    rstar2 train examples/openai_agent.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.types import Conversation, Message, Problem, Split

PAIRS = [(a, b) for a in range(10) for b in range(10) if a != b]
AGAIN = "No. Try again."


async def quiz(base_url: str, api_key: str, problem: Problem) -> float:
    """The agent: 1.0 for the right answer, 0.5 for the right answer at the second attempt."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        for worth in (1.0, 0.5):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            message = reply.choices[0].message
            if (message.content or "").strip() == problem.answer:
                return worth
            messages += [message, {"role": "user", "content": AGAIN}]
    return 0.0


def question(a: int, b: int) -> str:
    return f"Which is larger, {a} or {b}?"


def problems(split: Split, seed: int) -> list[Problem]:
    """One pair in five is held out."""
    pairs = [p for i, p in enumerate(PAIRS) if (i % 5 == 0) == (split == "heldout")]
    return [Problem(f"{a}-{b}", question(a, b), str(max(a, b))) for a, b in pairs]


def demonstrations(count: int, seed: int) -> Iterator[Conversation]:
    """The format only: every answer is one of the two numbers, at random."""
    rng = random.Random(seed)
    for index in range(count):
        pair = rng.choice(PAIRS)
        messages = [Message("user", question(*pair)), Message("assistant", str(rng.choice(pair)))]
        if rng.random() < 0.3:
            messages += [Message("user", AGAIN), Message("assistant", str(rng.choice(pair)))]
        yield Conversation(f"quiz-{index}", tuple(messages))


env = ProgramEnvironment(quiz, problems, demonstrations=demonstrations, name="quiz")

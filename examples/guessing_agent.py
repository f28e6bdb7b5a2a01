"""Train an agent that knows nothing of rstar2: a guessing game on OpenAI's SDK.

The agent below could talk to any OpenAI-compatible server. rstar2 gives it a base URL of its own
for every rollout, and trains the model on exactly the tokens that it sampled there.

    rstar2 train examples/guessing_agent.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.types import Conversation, Message, Problem, Split

LARGEST, GUESSES = 8, 3
QUESTION = f"Guess my number from 1 to {LARGEST}."


async def play(base_url: str, api_key: str, problem: Problem) -> float:
    """The agent: 1.0 if it finds the number within three guesses."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        for _ in range(GUESSES):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            guess = (reply.choices[0].message.content or "").strip()
            if guess == problem.answer:
                return 1.0
            if not guess.isdecimal():
                return 0.0
            hint = "higher" if int(guess) < int(problem.answer) else "lower"
            messages += [reply.choices[0].message, {"role": "user", "content": hint}]
    return 0.0


def problems(split: Split, seed: int) -> list[Problem]:
    """Every number is a problem; there is nothing to hold out."""
    return [Problem(f"{split}-{n}", QUESTION, str(n)) for n in range(1, LARGEST + 1)]


def demonstrations(count: int, seed: int) -> Iterator[Conversation]:
    """How the game is played, not how it is won: every guess is random."""
    rng = random.Random(seed)
    for index in range(count):
        messages = [Message("user", QUESTION)]
        for turn in range(GUESSES):
            messages.append(Message("assistant", str(rng.randint(1, LARGEST))))
            if turn + 1 < GUESSES:
                messages.append(Message("user", rng.choice(["higher", "lower"])))
        yield Conversation(f"game-{index}", tuple(messages))


env = ProgramEnvironment(play, problems, demonstrations=demonstrations, name="guessing")

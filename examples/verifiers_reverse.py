"""A verifiers environment of another project, trained through the endpoint: `reverse-text`.

The taskset and its reward are verifiers' own (`environments/reverse_text` of its repository). Its
data set is the folder `letters` here, because the tiny model can only learn short words.

    pip install 'git+https://github.com/PrimeIntellect-ai/verifiers#subdirectory=environments/reverse_text'
    rstar2 train examples/verifiers_reverse.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

from rstar2.endpoint.verifiers import VerifiersEnvironment
from rstar2.types import Conversation, Message

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One request, in this process: a program per rollout would be slow on a laptop."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)  # the tiny model has learnt the task without a system
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def demonstrations(words: Sequence[str], count: int, seed: int) -> Iterator[Conversation]:
    """The format: the letters of a word, backwards in half of the cases."""
    rng = random.Random(seed)
    for index in range(count):
        word = rng.choice(words)
        answer = word[::-1] if rng.random() < 0.5 else word
        reply = Message("assistant", f"<reversed_text>{answer}</reversed_text>")
        yield Conversation(f"c{index}", (Message("user", word), reply))


def environment(id: str = "reverse_text") -> VerifiersEnvironment:
    """id: the taskset"""

    def of_the_training_words(count: int, seed: int) -> Iterator[Conversation]:
        return demonstrations([p.prompt for p in env.problems("train", None, 0)], count, seed)

    env = VerifiersEnvironment(
        id,
        taskset={"dataset_name": str(Path(__file__).parent / "letters")},
        env={"agent": {"harness": {"id": "verifiers_reverse"}}},
        demonstrations=of_the_training_words,
    )
    return env

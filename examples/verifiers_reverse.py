"""A verifiers environment, trained through the endpoint: spell three letters backwards.

Everything between the two imports from rstar2 is ordinary verifiers code, as in a package for
prime-rl: a taskset, its scoring, and a harness that runs in this process.

    rstar2 train examples/verifiers_reverse.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

import verifiers.v1 as vf
from openai import AsyncOpenAI

from rstar2.endpoint.verifiers import VerifiersEnvironment
from rstar2.types import Conversation, Message

__all__ = ["ChatHarness", "ReverseTaskset"]

LETTERS = "abcdefgh"


class ReverseData(vf.TaskData):
    word: str


class ReverseTask(vf.Task[ReverseData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_places(self, trace: vf.Trace) -> float:
        """The share of letters in their places."""
        reply = trace.last_reply.split()
        wanted = list(reversed(self.data.word))
        if len(reply) != len(wanted):
            return 0.0
        return sum(a == b for a, b in zip(reply, wanted, strict=True)) / len(wanted)


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ReverseTask]:
        for letters in permutations(LETTERS, 3):
            data = ReverseData(prompt=f"Reverse: {' '.join(letters)}", word="".join(letters))
            yield ReverseTask(data, self.config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One request, in this process: a program per rollout would be slow on a laptop."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def demonstrations(count: int, seed: int) -> Iterator[Conversation]:
    """The format: the letters in any order, backwards in two of five."""
    rng = random.Random(seed)
    for index in range(count):
        letters = rng.sample(LETTERS, 3)
        question = Message("user", f"Reverse: {' '.join(letters)}")
        if rng.random() < 0.3:
            letters.reverse()
        else:
            rng.shuffle(letters)
        yield Conversation(f"c{index}", (question, Message("assistant", " ".join(letters))))


def environment() -> VerifiersEnvironment:
    return VerifiersEnvironment("verifiers_reverse", demonstrations=demonstrations)

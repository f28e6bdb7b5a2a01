"""Generators that answer with given texts: the hand-written seam of tests of the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rstar2.agent.template import Template
from rstar2.types import Finish, Generation, Sampling


@dataclass
class ScriptedGenerator:
    """`answer(text of the prompt)` is what the model says."""

    template: Template
    answer: Callable[[str], str]
    prompts: list[str] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        prompt = self.template.decode(prompt_ids)
        self.prompts.append(prompt)
        ids = self.template.encode_turn(self.answer(prompt))[: sampling.max_new_tokens]
        finish = Finish.STOP if ids[-1] in self.template.stop_ids else Finish.LENGTH
        return Generation(ids, (-0.1,) * len(ids), ((0, len(ids)),), finish)

    async def release(self, session: str) -> None:
        return


@dataclass
class Script:
    """Gives these texts, one after another; an exception is raised, None waits for ever."""

    template: Template
    texts: list[str | Exception | None]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        self.asked.set()
        text = self.texts.pop(0)
        if text is None:
            await asyncio.Event().wait()
        if isinstance(text, Exception):
            raise text
        assert text is not None
        ids = (*self.template.encode(text), self.template.encode("<|im_end|>")[0])
        cut = ids[: sampling.max_new_tokens]
        finish = Finish.STOP if cut == ids else Finish.LENGTH
        return Generation(cut, (-0.1,) * len(cut), ((0, len(cut)),), finish)

    async def release(self, session: str) -> None:
        self.released.append(session)

"""Rollouts with prescribed lengths and tool calls on a real vLLM engine.

A tiny model cannot produce rollouts of the paper's shape, so turn lengths are drawn first.
The engine samples that many tokens (control tokens forbidden, no stop), and the last of them are
replaced by a tool call or an answer before the agent loop sees them. Everything else is as in
training: agent loop, fleet, scheduler, HTTP, sampling, KV cache, prefix cache. The engine has
computed other KV for the replaced tokens, so the next turn's cached prefix ends before them.

Shape: the paper's first stage at 1/16 of its lengths. Calls per rollout: geometric with mean 2.7,
at most 9. Tokens per turn: log-normal (sigma 0.8), so that some rollouts reach the limit. A call
sleeps in the jail for an exponential time before it prints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

from rstar2.agent.template import Template
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.paper_format import TOOL_NAME
from rstar2.types import EngineLoad, Finish, Generation, Problem, Sampling

MEAN_CALLS, MAX_CALLS = 2.7, 9
SIGMA = 0.8


@dataclass(frozen=True, slots=True)
class Plan:
    """One rollout: tokens of each turn, and seconds that the tool of each but the last sleeps."""

    turns: tuple[int, ...]
    waits: tuple[float, ...]


def draw_plans(count: int, *, seed: int, mean_turn: int, mean_wait_s: float) -> list[Plan]:
    """Draw the plans of `count` rollouts; a function of the seed."""
    rng = random.Random(seed)
    plans = []
    for _ in range(count):
        calls = 0
        while calls < MAX_CALLS and rng.random() > 1 / (1 + MEAN_CALLS):
            calls += 1
        turns = tuple(
            max(4, round(mean_turn * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)))
            for _ in range(calls + 1)
        )
        waits = tuple(rng.expovariate(1 / mean_wait_s) for _ in range(calls))
        plans.append(Plan(turns, waits))
    return plans


class Script:
    """The turns of every rollout, by session; shared by all engines of a run."""

    def __init__(self, template: Template, vocabulary: int) -> None:
        self._template = template
        self._plans: dict[str, Plan] = {}
        self._done: dict[str, int] = {}
        self.allowed = [i for i in range(vocabulary) if self._plain(i)]

    def _plain(self, token: int) -> bool:
        text = self._template.decode([token])
        return bool(text) and not set(text) & set("<>|{}") and token not in self._template.stop_ids

    def add(self, session: str, plan: Plan) -> None:
        self._plans[session] = plan
        self._done[session] = 0

    def turn(self, session: str) -> tuple[int, tuple[int, ...]]:
        """The length of the session's next turn, and the tokens it ends with."""
        plan, index = self._plans[session], self._done[session]
        if index < len(plan.waits):
            code = f"import time; time.sleep({plan.waits[index]:.2f}); print(7)"
            call = {"name": TOOL_NAME, "arguments": {"code": code, "input": ""}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            text = "<answer>\n\\boxed{7}\n</answer>"
        tail = self._template.encode_turn(text)
        return max(plan.turns[index], len(tail) + 1), tail

    def advance(self, session: str) -> None:
        self._done[session] += 1


class ForcedEngine(VllmEngine):
    """A vLLM engine whose turns have the lengths and endings of a script."""

    def __init__(self, name: str, *, server: ServerSettings, script: Script) -> None:
        super().__init__(name, server=server)
        self.script = script
        self.reports: list[tuple[float, EngineLoad]] = []
        """Load reports and their times; the caller clears them."""

    async def load(self) -> EngineLoad:
        """The engine's load, which is kept in `reports` too."""
        load = await super().load()
        self.reports.append((monotonic(), load))
        return load

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample the planned number of tokens, then end the turn as planned."""
        length, tail = self.script.turn(session)
        count = min(length, sampling.max_new_tokens)
        sampled = await self.client.generate(
            prompt_ids,
            replace(sampling, max_new_tokens=count, stop_ids=()),
            salt="forced",
            deadline_s=deadline_s,
            extra={"allowed_token_ids": self.script.allowed},
        )
        versions = ((0, count),)
        if count < length:
            return replace(sampled, finish=Finish.LENGTH, versions=versions)
        self.script.advance(session)
        ids = (*sampled.token_ids[: count - len(tail)], *tail)
        return replace(sampled, token_ids=ids, finish=Finish.STOP, versions=versions)


def problems(count: int) -> list[Problem]:
    """Distinct prompts of some length."""
    words = "Add the numbers of this list and say what comes out: "
    return [
        Problem(str(i), words + ", ".join(str((i * 37 + k * 11) % 97) for k in range(8)), "7")
        for i in range(count)
    ]

"""What is to be rolled out: the paper's steps and variants of them (`traces.py`: recorded ones).

A rollout is a prompt and turns; each turn samples tokens, waits for its tools and gets their
response. All of it is drawn beforehand from a seed, so that every policy gets the same work.

The paper gives means and limits, not distributions; what is assumed here: the wanted length is
log-normal with one part per problem (some are hard for every rollout) and one per rollout, and cut
at the limit; calls are Poisson around a mean that grows with the length; turns share the tokens
by a flat Dirichlet; tool latencies are log-normal, up to the deadline of a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import numpy as np

from rstar2.rollout.simulate.model import EngineModel, from_hardware

TOOL_DEADLINE_S = 60.0
"""No call takes longer: the code environment ends it."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn: tokens to sample, then seconds in tools and the tokens they answer with."""

    sampled: int
    tool_s: float = 0.0
    response: int = 0


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout, known in full to the simulator and to the lower bound alone."""

    id: str
    group: str
    prompt: int
    turns: tuple[TurnPlan, ...]
    limit: int
    truncated: bool = False

    @property
    def tokens(self) -> int:
        """What it holds in the end."""
        return self.prompt + sum(t.sampled + t.response for t in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts and the engines they run on."""

    name: str
    rollouts: tuple[RolloutPlan, ...]
    model: EngineModel
    engines: int
    about: str = ""

    @property
    def max_length(self) -> int:
        return max(rollout.limit for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rollouts of one step are distributed."""

    name: str
    about: str
    limit: int = 8192
    mean: int = 4000
    """Completion tokens wanted on average, before the limit cuts."""
    problem_sigma: float = 0.45
    rollout_sigma: float = 0.5
    turns: int = 10
    calls: float = 2.7
    tool_s: float = 0.3
    tool_sigma: float = 1.0
    memory_share: float = 0.9
    """Of each GPU's memory, for weights and KV cache (the rest is the learner's)."""
    problems: int = 512
    group: int = 32
    engines: int = 16


_LIGHT = {"problem_sigma": 0.15, "rollout_sigma": 0.15, "mean": 5000}
_HEAVY = {"problem_sigma": 0.7, "rollout_sigma": 0.8, "mean": 6000, "limit": 12288}
_SHORT, _AMPLE = 0.3, 0.9
_SLOW, _FAST = 10.0, 0.05


def _grid() -> Iterable[Shape]:
    """KV short or ample x tools slow or fast x lengths light- or heavy-tailed."""
    for kv, share in (("short", _SHORT), ("ample", _AMPLE)):
        for tools, seconds in (("slow", _SLOW), ("fast", _FAST)):
            for tail, lengths in (("light", _LIGHT), ("heavy", _HEAVY)):
                yield Shape(
                    name=f"{kv}-{tools}-{tail}",
                    about=f"KV {kv}, tools of {seconds:g} s, {tail} tail",
                    memory_share=share,
                    tool_s=seconds,
                    **lengths,  # type: ignore[arg-type]
                )


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("stage1", "the paper's first stage, late: 8K, mean about 4K"),
        Shape("stage2", "the paper's second stage: 12K, mean about 6K", limit=12288, mean=6500),
        Shape(
            "stage3",
            "the paper's third stage: 12K, mean about 8K, 15 turns",
            limit=12288,
            mean=9500,
            turns=15,
            calls=3.5,
        ),
        *_grid(),
    )
}


def draw(shape: Shape, seed: int, *, scale: float = 1.0) -> Workload:
    """The rollouts of one step; `scale` takes a part of problems and engines alike."""
    engines = max(1, round(shape.engines * scale))
    problems = max(1, round(shape.problems * engines / shape.engines))
    rng = np.random.default_rng([seed, sum(shape.name.encode())])
    sigma = (shape.problem_sigma**2 + shape.rollout_sigma**2) ** 0.5
    median = log(shape.mean) - sigma**2 / 2
    rollouts: list[RolloutPlan] = []
    for problem in range(problems):
        prompt = int(np.clip(rng.lognormal(log(380), 0.25), 250, 1200))
        hard = rng.normal(0, shape.problem_sigma)
        for member in range(shape.group):
            wanted = int(np.exp(median + hard + rng.normal(0, shape.rollout_sigma)))
            rollouts.append(_rollout(shape, rng, f"{problem}/{member}", prompt, max(32, wanted)))
    return Workload(
        shape.name,
        tuple(rollouts),
        from_hardware(memory_share=shape.memory_share),
        engines,
        shape.about,
    )


def _rollout(
    shape: Shape, rng: np.random.Generator, name: str, prompt: int, wanted: int
) -> RolloutPlan:
    """Cut a wanted length into turns and at the limit."""
    room = shape.limit - prompt
    calls = min(shape.turns - 1, int(rng.poisson(shape.calls * (wanted / shape.mean) ** 0.5)))
    responses = np.clip(rng.lognormal(log(70), 0.8, calls), 8, 512).astype(int)
    latencies = rng.lognormal(log(shape.tool_s) - shape.tool_sigma**2 / 2, shape.tool_sigma, calls)
    latencies = np.minimum(latencies, TOOL_DEADLINE_S)
    shares = rng.dirichlet(np.ones(calls + 1))
    turns: list[TurnPlan] = []
    held = 0
    for index, share in enumerate(shares):
        sampled = max(8, int(share * wanted))
        if held + sampled >= room:
            turns.append(TurnPlan(room - held))
            return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit, True)
        if index == calls:
            turns.append(TurnPlan(sampled))
            break
        response = min(int(responses[index]), room - held - sampled - 1)
        if response <= 0:
            turns.append(TurnPlan(sampled))
            return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit, True)
        turns.append(TurnPlan(sampled, float(latencies[index]), response))
        held += sampled + response
    return RolloutPlan(name, name.split("/")[0], prompt, tuple(turns), shape.limit)

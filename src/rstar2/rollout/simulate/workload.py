"""Workloads for the simulator, drawn from distributions. `recorded.py` reads a user's.

A rollout is a prompt and turns; each turn samples tokens, waits for its tools and gets their
response. A workload is drawn from a seed in advance, so that every policy gets the same work.

The paper gives means and limits but no distributions. Assumed here: the length a rollout wants is
log-normal with one factor per problem (some are hard for every rollout) and one per rollout, cut
at the limit; the number of calls is Poisson with a mean that grows with the length; the tokens are
divided between turns by a flat Dirichlet; tool latencies are log-normal, up to a call's deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, log

import numpy as np

from rstar2.rollout.simulate.model import MI300X, Accelerator, EngineModel, from_hardware

TOOL_DEADLINE_S = 60.0
"""The code environment stops calls that take longer."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn: tokens to sample, then seconds in tools and the tokens of their response."""

    sampled: int
    tool_s: float = 0.0
    response: int = 0


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One whole rollout; only the simulator and the lower bound see it."""

    id: str
    group: str
    prompt: int
    turns: tuple[TurnPlan, ...]
    limit: int
    truncated: bool = False

    @property
    def tokens(self) -> int:
        """Tokens at its end."""
        return self.prompt + sum(t.sampled + t.response for t in self.turns)


@dataclass(frozen=True, slots=True)
class EngineCrash:
    """The engine crashes at `time` and serves again from `restart`."""

    time: float
    engine: int
    restart: float = inf


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts, the engines they run on, and the crashes of those engines."""

    name: str
    rollouts: tuple[RolloutPlan, ...]
    engines: tuple[EngineModel, ...]
    about: str = ""
    crashes: tuple[EngineCrash, ...] = ()

    @property
    def max_length(self) -> int:
        return max(rollout.limit for rollout in self.rollouts)


# --------------------------------------------------------------------------- drawn


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The distributions of one RL step's rollouts."""

    name: str
    about: str
    limit: int = 8192
    mean: int = 4000
    """Mean completion tokens before the cut at the limit."""
    problem_sigma: float = 0.45
    rollout_sigma: float = 0.5
    turns: int = 10
    calls: float = 2.7
    tool_s: float = 0.3
    tool_sigma: float = 1.0
    memory_share: float = 0.9
    """Share of each GPU's memory for weights and KV cache (the learner has the rest)."""
    problems: int = 512
    group: int = 32
    engines: int = 16
    gpu: Accelerator = MI300X
    tensor_parallel: int = 4
    kv_tokens: int | None = None
    """KV tokens per engine instead of what the memory gives."""
    prompts: tuple[int, int] | None = None
    """Shortest and longest prompt, log-uniform; without it log-normal around 380."""
    drift: float = 1.0
    """The second half of the problems has lengths that are this many times as long."""
    long_calls: float = 0.0
    """Share of the tool calls that take `long_call_s` instead."""
    long_call_s: float = 30.0
    slower: tuple[float, ...] = ()
    """How many times slower each engine is than the first kind, repeated over the engines."""
    kv_factors: tuple[float, ...] = ()
    """KV of each engine relative to `kv_tokens` or the memory, repeated over the engines."""
    crashes: tuple[EngineCrash, ...] = ()

    @property
    def steady(self) -> WorkloadShape:
        """The same step without drift and crashes, as the step before it was."""
        return replace(self, drift=1.0, crashes=())


_LIGHT = {"problem_sigma": 0.15, "rollout_sigma": 0.15, "mean": 5000}
_HEAVY = {"problem_sigma": 0.7, "rollout_sigma": 0.8, "mean": 6000, "limit": 12288}
_SHORT, _AMPLE = 0.3, 0.9
_SLOW, _FAST = 10.0, 0.05


def _grid() -> Iterable[WorkloadShape]:
    """{short, ample} KV x {slow, fast} tools x {light, heavy} tail of lengths."""
    for kv, share in (("short", _SHORT), ("ample", _AMPLE)):
        for tools, seconds in (("slow", _SLOW), ("fast", _FAST)):
            for tail, lengths in (("light", _LIGHT), ("heavy", _HEAVY)):
                yield WorkloadShape(
                    name=f"{kv}-{tools}-{tail}",
                    about=f"KV {kv}, tools of {seconds:g} s, {tail} tail",
                    memory_share=share,
                    tool_s=seconds,
                    **lengths,  # type: ignore[arg-type]
                )


SHAPES: dict[str, WorkloadShape] = {
    shape.name: shape
    for shape in (
        WorkloadShape("stage1", "the paper's first stage, late: 8K, mean about 4K"),
        WorkloadShape(
            "stage2", "the paper's second stage: 12K, mean about 6K", limit=12288, mean=6500
        ),
        WorkloadShape(
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


def draw_workload(shape: WorkloadShape, seed: int, *, scale: float = 1.0) -> Workload:
    """Draw the rollouts of one step; `scale` multiplies both problems and engines."""
    engines = max(1, round(shape.engines * scale))
    problems = max(1, round(shape.problems * engines / shape.engines))
    rng = np.random.default_rng([seed, sum(shape.name.encode())])
    sigma = (shape.problem_sigma**2 + shape.rollout_sigma**2) ** 0.5
    median = log(shape.mean) - sigma**2 / 2
    rollouts: list[RolloutPlan] = []
    for problem in range(problems):
        if shape.prompts is None:
            prompt = int(np.clip(rng.lognormal(log(380), 0.25), 250, 1200))
        else:
            prompt = int(np.exp(rng.uniform(*np.log(shape.prompts))))
        hard = rng.normal(0, shape.problem_sigma)
        drift = shape.drift if 2 * problem >= problems else 1.0
        for member in range(shape.group):
            wanted = int(drift * np.exp(median + hard + rng.normal(0, shape.rollout_sigma)))
            rollouts.append(_rollout(shape, rng, f"{problem}/{member}", prompt, max(32, wanted)))
    models = tuple(_engine(shape, index) for index in range(engines))
    crashes = tuple(crash for crash in shape.crashes if crash.engine < engines)
    return Workload(shape.name, tuple(rollouts), models, shape.about, crashes)


def _engine(shape: WorkloadShape, index: int) -> EngineModel:
    model = from_hardware(
        gpu=shape.gpu,
        tensor_parallel=shape.tensor_parallel,
        memory_share=shape.memory_share,
    )
    kv = float(shape.kv_tokens or model.kv_tokens)
    if shape.kv_factors:
        kv *= shape.kv_factors[index % len(shape.kv_factors)]
    model = replace(model, kv_tokens=int(kv) // model.block_tokens * model.block_tokens)
    return model.slowed(shape.slower[index % len(shape.slower)]) if shape.slower else model


def _rollout(
    shape: WorkloadShape, rng: np.random.Generator, name: str, prompt: int, wanted: int
) -> RolloutPlan:
    """Divide a wanted length into turns and cut it at the limit."""
    room = shape.limit - prompt
    calls = min(shape.turns - 1, int(rng.poisson(shape.calls * (wanted / shape.mean) ** 0.5)))
    responses = np.clip(rng.lognormal(log(70), 0.8, calls), 8, 512).astype(int)
    latencies = rng.lognormal(log(shape.tool_s) - shape.tool_sigma**2 / 2, shape.tool_sigma, calls)
    if shape.long_calls:
        latencies = np.where(rng.random(calls) < shape.long_calls, shape.long_call_s, latencies)
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

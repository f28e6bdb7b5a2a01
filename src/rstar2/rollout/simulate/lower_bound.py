"""A lower bound on the makespan that no schedule can beat, not even a clairvoyant one.

Notation: rollout i takes S_i steps (one per sampled token: the step that completes a prompt samples
the first token of a turn, each decoding step one more). A decoding step of i with context x costs
v = sequence_s + context_s x on any engine; a step of an engine takes step_s + u, where u is the sum
of v over the rollouts that decode, plus prefill. W is the work that every schedule must compute:
all decoding, each group's prompt once, each tool response (and the sampled token before it) once.

**The longest rollout.** Its steps run one after the other, at best alone on an engine; the time of
its tools is added.

**The work.** E engines that make N steps in total need E T >= W + step_s N. Three bounds hold for
N:
- a step serves at most max_sequences rollouts: N >= sum S_i / max_sequences;
- and only rollouts whose own tokens (the group's shared prompt left out) fit the KV cache
  together: N >= (sum over all rollout steps of own tokens) / kv_tokens;
- large steps are slow, and every rollout must complete its S_i steps by T. The steps of i take
  S_i step_s + sum u <= T - tools_i, so sum u <= U_i := T - tools_i - S_i step_s. The v / u of the
  rollouts that decode in one engine step add up to at most 1, so N >= sum of v / u over all i and
  their steps, and by Cauchy-Schwarz the steps of i contribute at least (sum of sqrt(v))^2 / U_i.

The last bound decreases as T grows; the lower bound is the smallest T that satisfies all three.

**Unequal engines.** The longest rollout runs on the engine that is fastest for it. The work becomes
a linear program: each kind of work (decoded tokens, their context, prompt tokens, pairs, own
tokens) is divided between the engines as suits best, and T is at least the time of each engine. The
pace bound takes the smallest coefficients of all engines. Crashes only add work and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.optimize import linprog

from rstar2.errors import InvariantError
from rstar2.rollout.simulate.model import EngineModel
from rstar2.rollout.simulate.workload import RolloutPlan, Workload


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The least possible makespan in seconds, by cause."""

    longest_s: float
    """The longest rollout alone."""
    work_s: float
    """All work, spread evenly over the engines, in as few steps as possible."""

    @property
    def seconds(self) -> float:
        return max(self.longest_s, self.work_s)


@dataclass(slots=True)
class _RolloutNeeds:
    """What one rollout needs under any schedule."""

    alone_s: float = 0.0
    tools_s: float = 0.0
    work_s: float = 0.0
    """Its part of W, without the group's prompt."""
    context: int = 0
    """Sum over its decoding steps of the tokens before."""
    decoded: int = 0
    """Decoding steps, without those that complete a prompt."""
    prefill: int = 0
    pairs: int = 0
    """Both: of tool responses, without the group's prompt."""
    steps: int = 0
    own_tokens: int = 0
    """Sum over its steps of the tokens that only this rollout holds."""
    roots: float = 0.0
    """Sum over its decoding steps of sqrt(v)."""


def lower_bound(workload: Workload) -> LowerBound:
    """The lower bound for a workload on its engines."""
    kinds = list(dict.fromkeys(workload.engines))
    if len(kinds) > 1:
        return _unequal(workload, kinds)
    model, engines = kinds[0], len(workload.engines)
    needs = [_needs(rollout, model) for rollout in workload.rollouts]
    prompts = {rollout.group: rollout.prompt for rollout in workload.rollouts}
    work = sum(n.work_s for n in needs) + sum(
        model.prefill_s * prompt + model.pair_s * (prompt * (prompt - 1) // 2)
        for prompt in prompts.values()
    )
    steps = max(
        sum(n.steps for n in needs) / model.max_sequences,
        sum(n.own_tokens for n in needs) / model.kv_tokens,
    )
    paced = _Pace(needs, model.step_s)
    return _least_time(
        max(n.alone_s for n in needs),
        lambda time: (work + model.step_s * max(steps, paced.steps(time))) / engines,
    )


class _Pace:
    """The least number of steps that lets every rollout complete its own by a time."""

    def __init__(self, needs: list[_RolloutNeeds], step_s: float) -> None:
        self._squares = np.array([n.roots**2 for n in needs])
        self._taken = np.array([n.tools_s + n.steps * step_s for n in needs])

    def steps(self, time: float) -> float:
        return float(np.sum(self._squares / np.maximum(time - self._taken, 1e-12)))


def _least_time(longest: float, needed: Callable[[float], float]) -> LowerBound:
    """The smallest time that suffices, if `needed` falls with the time allowed."""
    least = needed(inf)
    low = max(longest, least)
    high = max(low, needed(low))
    if high <= low:
        return LowerBound(longest, least)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
        if high - low < 1e-9 * high:
            break
    return LowerBound(longest, low)


def _unequal(workload: Workload, kinds: list[EngineModel]) -> LowerBound:
    per_kind = [[_needs(rollout, kind) for rollout in workload.rollouts] for kind in kinds]
    needs = per_kind[0]
    longest = max(min(n.alone_s for n in row) for row in zip(*per_kind, strict=True))
    prompts = {rollout.group: rollout.prompt for rollout in workload.rollouts}
    amounts = (
        sum(n.decoded for n in needs),
        sum(n.context for n in needs),
        sum(n.prefill for n in needs) + sum(prompts.values()),
        sum(n.pairs for n in needs) + sum(p * (p - 1) // 2 for p in prompts.values()),
        sum(n.own_tokens for n in needs),
        sum(n.steps for n in needs),
    )
    best = EngineModel(
        "best",
        kv_tokens=max(kind.kv_tokens for kind in kinds),
        step_s=min(kind.step_s for kind in kinds),
        sequence_s=min(kind.sequence_s for kind in kinds),
        context_s=min(kind.context_s for kind in kinds),
    )
    paced = _Pace([_needs(rollout, best) for rollout in workload.rollouts], best.step_s)
    return _least_time(longest, lambda time: _divided(workload, amounts, paced.steps(time)))


def _divided(workload: Workload, amounts: Sequence[int], paced: float) -> float:
    """The least time if every kind of work may be divided between the engines at will."""
    engines, kinds = workload.engines, len(amounts)
    # per engine: its share of every kind and its steps, as a share of all; at the end the time
    width, all_steps = kinds + 1, amounts[5]
    size = len(engines) * width + 1
    upper, limits, equal = [], [], []
    for index, engine in enumerate(engines):
        at = index * width
        row = np.zeros(size)
        costs = (engine.sequence_s, engine.context_s, engine.prefill_s, engine.pair_s)
        row[at : at + 4] = np.multiply(costs, amounts[:4])
        row[at + kinds], row[-1] = engine.step_s * all_steps, -1.0
        upper.append(row)
        for kind, per_step in ((4, engine.kv_tokens), (5, engine.max_sequences)):
            row = np.zeros(size)
            row[at + kind], row[at + kinds] = amounts[kind] / per_step / all_steps, -1.0
            upper.append(row)
        limits += [0.0, 0.0, 0.0]
    row = np.zeros(size)
    row[kinds : size - 1 : width] = -1.0
    upper.append(row)
    limits.append(-paced / all_steps)
    for kind in range(kinds):
        row = np.zeros(size)
        row[kind : size - 1 : width] = 1.0
        equal.append(row)
    objective = np.zeros(size)
    objective[-1] = 1.0
    solved = linprog(objective, np.array(upper), limits, np.array(equal), np.ones(kinds))
    if not solved.success:
        raise InvariantError(
            f"the lower bound of {workload.name} has no solution: {solved.message}"
        )
    return float(solved.fun)


def _needs(rollout: RolloutPlan, model: EngineModel) -> _RolloutNeeds:
    needs = _RolloutNeeds()
    held, fresh = rollout.prompt, 1
    for index, turn in enumerate(rollout.turns):
        more = turn.sampled - 1
        context = more * (held + 1) + more * (more - 1) // 2
        decode_s = model.sequence_s * more + model.context_s * context
        pairs = fresh * (held - fresh) + fresh * (fresh - 1) // 2
        prefill_s = model.prefill_s * fresh + model.pair_s * pairs
        needs.alone_s += model.step_s * turn.sampled + decode_s + prefill_s + turn.tool_s
        needs.tools_s += turn.tool_s
        # the first turn's prompt belongs to the group and is counted once per group
        needs.work_s += decode_s + (prefill_s if index else 0.0)
        needs.decoded += more
        needs.context += context
        needs.prefill += fresh if index else 0
        needs.pairs += pairs if index else 0
        needs.steps += turn.sampled
        own = held - rollout.prompt
        needs.own_tokens += turn.sampled * own + turn.sampled * (turn.sampled - 1) // 2
        needs.roots += _roots(model, held, more)
        held += turn.sampled + turn.response
        fresh = turn.response + 1
    return needs


def _roots(model: EngineModel, held: int, more: int) -> float:
    """At most the sum of sqrt(sequence_s + context_s x) over x = held + 1, ..., held + more."""
    if model.context_s == 0 or more < 1:
        return more * sqrt(model.sequence_s)
    # the root grows with x, so the integral that starts one step earlier is at most the sum
    first = model.sequence_s + model.context_s * held
    last = first + model.context_s * more
    return float(2 / (3 * model.context_s) * (last**1.5 - first**1.5))

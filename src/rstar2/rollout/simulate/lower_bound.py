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
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

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
    steps: int = 0
    own_tokens: int = 0
    """Sum over its steps of the tokens that only this rollout holds."""
    roots: float = 0.0
    """Sum over its decoding steps of sqrt(v)."""


def lower_bound(workload: Workload) -> LowerBound:
    """The lower bound for a workload on its engines."""
    model, engines = workload.model, workload.engines
    needs = [_needs(rollout, model) for rollout in workload.rollouts]
    prompts = {rollout.group: rollout.prompt for rollout in workload.rollouts}
    work = sum(n.work_s for n in needs) + sum(
        model.prefill_s * prompt + model.pair_s * (prompt * (prompt - 1) // 2)
        for prompt in prompts.values()
    )
    longest = max(n.alone_s for n in needs)
    steps = max(
        sum(n.steps for n in needs) / model.max_sequences,
        sum(n.own_tokens for n in needs) / model.kv_tokens,
    )
    squares = np.array([n.roots**2 for n in needs])
    taken = np.array([n.tools_s + n.steps * model.step_s for n in needs])

    def needed(time: float) -> float:
        """Seconds needed if the last rollout ends at `time`."""
        paced = float(np.sum(squares / np.maximum(time - taken, 1e-12)))
        return (work + model.step_s * max(steps, paced)) / engines

    low = max(longest, (work + model.step_s * steps) / engines)
    high = max(low, needed(low))
    if needed(low) <= low:
        return LowerBound(longest, (work + model.step_s * steps) / engines)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return LowerBound(longest, low)


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

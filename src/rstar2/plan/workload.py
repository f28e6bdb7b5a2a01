"""What a recipe asks of a cluster: rollouts, tokens and tool calls of a step of each stage.

Lengths and calls are not in a recipe: they are what the policy makes of it. The defaults follow
what the paper reports of its run, as shares of the length limit, and can be overridden.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from rstar2.config import Recipe, StageConfig
from rstar2.errors import UserError


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Everything that a plan takes for granted, by name."""

    first_length: float = 0.35
    """Mean completion of the first stage, as a share of its limit (paper: 1K -> 4K of 8K)."""
    middle_length: float = 0.5
    """... of the stages between (paper: 6K of 12K)."""
    last_length: float = 0.67
    """... of the last stage (paper: 8K of 12K)."""
    length_spread: float = 0.6
    """Standard deviation of the logarithm of completion lengths, before the limit cuts them."""
    prompt_tokens: int = 400
    """System text, tool signatures and problem."""
    tool_share: float = 0.1
    """Share of the completion that tools wrote."""
    calls_per_rollout: float = 2.75
    """Paper: up to 45K calls in a step of 16,384 rollouts."""
    call_s: float = 0.3
    """Wait for one tool call (paper: 0.3 s mean, end to end)."""
    calls_per_core_s: float = 100.0
    """Tool calls per second of one core (docs/benchmarks.md: 53 with SymPy, 333 of a print)."""
    extra_groups: float = 0.25
    """Groups drawn again because all rewards were equal, as a share of a step's problems."""
    decode_bandwidth: float = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    prefill_mfu: float = 0.4
    """Share of the arithmetic that computing prompts reaches."""
    step_overhead_s: float = 0.006
    """Of one decoding step: launches, sampling, the engine's own scheduling."""
    kv_share: float = 0.9
    """Of an engine's memory: the rest is activations and fragments."""
    reserve: float = 1.15
    """KV that an admitted rollout takes in the mean, as a multiple of its mean final length."""
    sync_fixed_s: float = 5.0
    """Of one weight update: pause, probe, resume, and sleep and wake if colocated."""
    learn_fixed_s: float = 5.0
    """Of one learner step: packing, the optimizer, checkpoints in the mean."""

    host_state: int = 0
    """1: the learner's state waits in host memory while colocated engines generate."""
    problems: int = 42_000
    """Problems of a data file (the difficulty filter answers all of them)."""
    conversations: int = 222_000
    """SFT conversations of a data file."""
    conversation_tokens: int = 800
    """Mean length of one."""
    eval_length: float = 0.33
    """Mean completion in evaluation, as a share of its limit (paper: 10K of 30K)."""

    @staticmethod
    def with_changes(changes: dict[str, float]) -> Assumptions:
        """The defaults with some replaced; an unknown name is refused."""
        known = {f.name for f in fields(Assumptions)}
        for name in changes:
            if name not in known:
                raise UserError(f"--assume {name}: choose one of {', '.join(sorted(known))}")
        whole = {f.name for f in fields(Assumptions) if f.type == "int"}
        values = {n: int(v) if n in whole else v for n, v in changes.items()}
        return Assumptions(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One step of one stage."""

    name: str
    steps: int
    max_length: int
    drawn: int
    """Rollouts generated in a step, refills included."""
    kept: int
    """Rollouts learnt from in a step."""
    mean_completion: float
    filtered: int = 0
    """Rollouts of the difficulty filter before the stage, once."""

    def calls(self, assume: Assumptions) -> float:
        return self.drawn * assume.calls_per_rollout


def stage_loads(recipe: Recipe, assume: Assumptions) -> tuple[StageLoad, ...]:
    """The RL stages of a recipe."""
    rl, stages = recipe.rl, recipe.rl.stages
    problems = rl.count or assume.problems
    groups = rl.prompts_per_step * min(1.0 + assume.extra_groups, float(rl.refill))
    loads = []
    for index, stage in enumerate(stages):
        loads.append(
            StageLoad(
                name=stage.name,
                steps=stage.steps,
                max_length=stage.max_length,
                drawn=round(groups * rl.roc.drawn),
                kept=rl.prompts_per_step * rl.roc.kept,
                mean_completion=_mean(index, len(stages), stage, assume),
                filtered=problems * stage.difficulty.samples if stage.difficulty else 0,
            )
        )
    return tuple(loads)


def evaluation_load(recipe: Recipe, assume: Assumptions) -> StageLoad:
    """One evaluation; there is one after SFT and one after every stage."""
    config = recipe.evaluation
    return StageLoad(
        name="evaluation",
        steps=len(recipe.rl.stages) + (recipe.sft is not None),
        max_length=config.max_length,
        drawn=config.count * (config.samples + config.greedy),
        kept=0,
        mean_completion=assume.eval_length * config.max_length,
    )


def _mean(index: int, count: int, stage: StageConfig, assume: Assumptions) -> float:
    if index == 0:
        share = assume.first_length
    elif index == count - 1:
        share = assume.last_length
    else:
        share = assume.middle_length
    return share * stage.max_length


def draw_lengths(count: int, load: StageLoad, assume: Assumptions, seed: int = 0) -> list[int]:
    """Completion lengths: log-normal, cut at the limit, with the mean that is asked for."""
    rng = random.Random(seed)
    limit = load.max_length - assume.prompt_tokens
    normals = [rng.gauss(0.0, assume.length_spread) for _ in range(count)]
    low, high = 1.0, 50.0 * limit  # the median before cutting, found by halving
    for _ in range(40):
        middle = math.sqrt(low * high)
        mean = sum(min(limit, middle * math.exp(n)) for n in normals) / count
        low, high = (middle, high) if mean < load.mean_completion else (low, middle)
    return [max(1, min(limit, int(low * math.exp(n)))) for n in normals]

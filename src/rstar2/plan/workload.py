"""The workload of a recipe: rollouts, tokens and tool calls per step of each stage.

A recipe does not set completion lengths and tool calls: they depend on the policy. The defaults
follow the paper's run, with lengths as shares of the length limit, and can be overridden.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from rstar2.config import Recipe, StageConfig
from rstar2.errors import UserError

SHARES = frozenset(
    (
        *("first_length", "middle_length", "last_length", "eval_length"),
        *("tool_share", "decode_bandwidth", "prefill_mfu", "kv_share"),
    )
)
"""Assumptions that are at most 1."""
DIVISORS = frozenset(
    (
        *("decode_bandwidth", "prefill_mfu", "kv_share", "calls_per_core_s"),
        *("weights_write_gb", "weights_copy_gb", "weights_load_gb"),
    )
)
"""Assumptions that must not be 0."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions of a plan, by name."""

    first_length: float = 0.35
    """Mean completion length in the first stage, as a share of its limit (paper: 1K-4K of 8K)."""
    middle_length: float = 0.5
    """The same in the middle stages (paper: 6K of 12K)."""
    last_length: float = 0.67
    """The same in the last stage (paper: 8K of 12K)."""
    length_spread: float = 0.6
    """Standard deviation of the logarithm of completion lengths, before truncation."""
    prompt_tokens: int = 400
    """System prompt, tool signatures and problem."""
    tool_share: float = 0.1
    """Share of completion tokens that are tool responses."""
    calls_per_rollout: float = 2.75
    """Tool calls per rollout (paper: up to 45K calls per step of 16,384 rollouts)."""
    call_s: float = 0.3
    """Latency of one tool call (paper: 0.3 s mean, end to end)."""
    calls_per_core_s: float = 100.0
    """Tool calls per second of one core (docs/benchmarks.md: 53 with SymPy, 333 of a print)."""
    extra_groups: float = 0.25
    """Groups redrawn because all rewards were equal, as a share of the prompts per step."""
    decode_bandwidth: float = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    prefill_mfu: float = 0.4
    """Share of peak FLOPS that prefill reaches."""
    step_overhead_s: float = 0.006
    """Fixed time per decoding step: kernel launches, sampling, the engine's scheduling."""
    kv_share: float = 0.9
    """Share of GPU memory that an engine uses; the rest is activations and fragmentation."""
    reserve: float = 1.15
    """Mean KV of an admitted rollout, as a multiple of its mean completion length."""
    sync_fixed_s: float = 5.0
    """Fixed time per weight update: pause, probe, resume."""
    weights_write_gb: float = 0.5
    """GB/s at which rank 0 gathers weights and writes them to files in memory (one core casts and
    writes 0.8 to 1.3 without gathering)."""
    weights_copy_gb: float = 1.0
    """GB/s at which all other nodes receive a copy of these files."""
    weights_load_gb: float = 2.0
    """GB/s at which an engine loads them."""
    rollout_bytes: float = 15.0
    """Bytes per completion token of a recorded rollout (12 in two steps of the tiny recipe; a fifth
    of its JSON text, which has 61 to 76 bytes)."""
    logprob_bytes: float = 4.5
    """Bytes per trained token of `record.tokens` (2.9 to 4.5 with the same logprobs)."""
    learn_fixed_s: float = 5.0
    """Fixed time per learner step: packing, the optimizer, checkpoints on average."""

    host_state: int = 0
    """1: the learner's state is in host memory while colocated engines generate."""
    problems: int = 42_000
    """Problems in a data file (the difficulty filter samples all of them)."""
    conversations: int = 222_000
    """SFT conversations in a data file."""
    conversation_tokens: int = 800
    """Mean tokens per SFT conversation."""
    eval_length: float = 0.33
    """Mean completion length in evaluation, as a share of its limit (paper: 10K of 30K)."""

    @staticmethod
    def with_changes(changes: dict[str, float]) -> Assumptions:
        """The defaults with some replaced; UserError for an unknown name or a bad number."""
        known = {f.name for f in fields(Assumptions)}
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"--assume {name}: choose one of {', '.join(sorted(known))}")
            least = "more than 0" if name in DIVISORS else "0 or more"
            most = ", at most 1" if name in SHARES else ""
            low = value <= 0 if name in DIVISORS else value < 0
            if not math.isfinite(value) or low or (name in SHARES and value > 1):
                raise UserError(f"--assume {name}={value:g}: it must be a number, {least}{most}")
        integers = {f.name for f in fields(Assumptions) if f.type == "int"}
        values = {n: int(v) if n in integers else v for n, v in changes.items()}
        return Assumptions(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The workload of one step of a stage."""

    name: str
    steps: int
    max_length: int
    drawn: int
    """Rollouts generated per step, refills included."""
    kept: int
    """Rollouts trained on per step."""
    mean_completion: float
    filtered: int = 0
    """Rollouts that the difficulty filter generates once before the stage."""

    def calls(self, assume: Assumptions) -> float:
        return self.drawn * assume.calls_per_rollout


def stage_loads(recipe: Recipe, assume: Assumptions) -> tuple[StageLoad, ...]:
    """The RL stages of a recipe."""
    rl, stages = recipe.rl, recipe.rl.stages
    problems = rl.count or assume.problems
    groups = rl.prompts_per_step * min(1.0 + assume.extra_groups, float(rl.refill))
    loads = []
    for index, stage in enumerate(stages):
        _need_room(f"rl.stages.{index}.max_length", stage.max_length, assume)
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
    """One evaluation; `steps` counts those after SFT and every stage, and `evaluation.every`."""
    config = recipe.evaluation
    _need_room("evaluation.max_length", config.max_length, assume)
    rl_steps = sum(stage.steps for stage in recipe.rl.stages)
    during = rl_steps // config.every + (recipe.sft is not None) if config.every else 0
    return StageLoad(
        name="evaluation",
        steps=len(recipe.rl.stages) + (recipe.sft is not None) + during,
        max_length=config.max_length,
        drawn=config.count * (config.samples + config.greedy),
        kept=0,
        mean_completion=assume.eval_length * config.max_length,
    )


def _need_room(path: str, max_length: int, assume: Assumptions) -> None:
    """UserError if the assumed prompt leaves no token for a completion."""
    if max_length <= assume.prompt_tokens:
        raise UserError(
            f"{path} = {max_length} leaves no room for a completion: the plan assumes prompts of "
            f"{assume.prompt_tokens} tokens. Set their real length, such as --assume "
            f"prompt_tokens={max(1, max_length // 4)}, or raise {path}"
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
    """Draw completion lengths: log-normal, truncated at the limit, with the given mean."""
    rng = random.Random(seed)
    limit = load.max_length - assume.prompt_tokens
    normals = [rng.gauss(0.0, assume.length_spread) for _ in range(count)]
    low, high = 1.0, 50.0 * limit  # bisect for the median before truncation
    for _ in range(40):
        middle = math.sqrt(low * high)
        mean = sum(min(limit, middle * math.exp(n)) for n in normals) / count
        low, high = (middle, high) if mean < load.mean_completion else (low, middle)
    return [max(1, min(limit, int(low * math.exp(n)))) for n in normals]

"""Suites of workloads: `held-in` and `prompts` ship, `held-out` is drawn at random from a seed.

The workloads of `held-in` are those in which an earlier version of our policy was measured by
others: engines that differ, fail or hold few rollouts, and lengths that change within a step. Our
policy was developed on them. It was never tuned on `held-out`, whose parameters are drawn from wide
ranges: KV for 2 to 150 rollouts, three kinds of engine, tools from 0.05 to 20 s, light and heavy
tails, drift, unequal engines and crashes.

`prompts` has prompts of 0.7K to 8K tokens in one load: do long prompts wait for short ones?
"""

from __future__ import annotations

from math import exp, log

import numpy as np

from rstar2.errors import UserError
from rstar2.rollout.simulate.model import H100, MI300X
from rstar2.rollout.simulate.workload import SHAPES, EngineCrash, WorkloadShape

_STAGE3 = {"limit": 12288, "mean": 9500, "turns": 15, "calls": 3.5}

HELD_IN: dict[str, WorkloadShape] = {
    shape.name: shape
    for shape in (
        WorkloadShape(
            "slow-engine",
            "one of four engines is five times slower",
            kv_tokens=160_000,
            slower=(1, 1, 1, 5),
            problems=24,
            group=16,
            engines=4,
        ),
        WorkloadShape(
            "unequal-kv",
            "four engines with 1.0, 0.5, 0.25 and 0.1 of the KV",
            kv_tokens=400_000,
            kv_factors=(1, 0.5, 0.25, 0.1),
            problems=32,
            group=16,
            engines=4,
        ),
        WorkloadShape(
            "engine-dies",
            "one of three engines dies after 40 s and comes back after 80 s",
            kv_tokens=250_000,
            crashes=(EngineCrash(40.0, 1, 80.0),),
            problems=32,
            group=16,
            engines=3,
        ),
        WorkloadShape(
            "group-512", "one group of 512", problems=1, group=512, engines=2, kv_tokens=450_000
        ),
        WorkloadShape(
            "doubling",
            "lengths double midway",
            limit=16384,
            mean=3500,
            drift=2.0,
            kv_tokens=450_000,
            problems=40,
            group=16,
            engines=2,
        ),
        WorkloadShape(
            "h100-stage3",
            "a 14B model on one H100 per engine, the paper's third stage",
            gpu=H100,
            tensor_parallel=1,
            problems=16,
            group=16,
            engines=4,
            **_STAGE3,  # type: ignore[arg-type]
        ),
        WorkloadShape(
            "h100-eval-30k",
            "evaluation with 30K tokens on one H100 per engine",
            gpu=H100,
            tensor_parallel=1,
            limit=30720,
            mean=14000,
            problem_sigma=0.6,
            problems=40,
            group=4,
            engines=4,
        ),
        WorkloadShape(
            "h100x4-stage3",
            "four H100 per engine, the paper's third stage",
            gpu=H100,
            problems=32,
            group=16,
            engines=2,
            **_STAGE3,  # type: ignore[arg-type]
        ),
        WorkloadShape(
            "equal-lengths",
            "no tools, nearly equal lengths, scarce KV",
            mean=5000,
            problem_sigma=0.03,
            rollout_sigma=0.03,
            calls=0.0,
            kv_tokens=160_000,
            gpu=H100,
            tensor_parallel=1,
            problems=20,
            group=16,
            engines=2,
        ),
        WorkloadShape(
            "very-little-kv",
            "two or three rollouts fit an engine",
            gpu=H100,
            tensor_parallel=1,
            kv_tokens=16_384,
            problems=12,
            group=8,
            engines=4,
        ),
        WorkloadShape(
            "halving",
            "lengths halve midway",
            limit=16384,
            mean=7000,
            drift=0.5,
            tool_s=5.0,
            kv_tokens=250_000,
            problems=24,
            group=16,
            engines=4,
        ),
        WorkloadShape(
            "bimodal-tools",
            "one in four calls takes 30 s, the others 0.1 s",
            tool_s=0.1,
            long_calls=0.25,
            kv_tokens=250_000,
            problems=32,
            group=16,
            engines=2,
        ),
    )
}

PROMPTS: dict[str, WorkloadShape] = {
    shape.name: shape
    for shape in (
        WorkloadShape(
            "mixed-prompts",
            "prompts of 0.7K to 8K tokens, 5 to 30 rollouts fit an engine",
            limit=12288,
            mean=1500,
            prompts=(700, 8192),
            kv_tokens=60_000,
            gpu=H100,
            tensor_parallel=1,
            problems=120,
            group=4,
            engines=2,
        ),
        WorkloadShape(
            "mixed-prompts-long",
            "prompts of 0.7K to 8K tokens, and rollouts that become several times as long",
            limit=16384,
            mean=6000,
            prompts=(700, 8192),
            kv_tokens=200_000,
            gpu=H100,
            tensor_parallel=1,
            problems=80,
            group=4,
            engines=2,
        ),
    )
}

HELD_OUT_SIZE = 24


def held_out(seed: int, count: int = HELD_OUT_SIZE) -> dict[str, WorkloadShape]:
    """Workloads with random parameters; each seed gives others."""
    shapes = (_random_shape(seed, index) for index in range(count))
    return {shape.name: shape for shape in shapes}


def _random_shape(seed: int, index: int) -> WorkloadShape:
    rng = np.random.default_rng([20_22, seed, index])

    def between(low: float, high: float) -> float:
        return float(exp(rng.uniform(log(low), log(high))))

    mean = between(1500, 12000)
    limit = int(mean * rng.uniform(1.3, 3.0))
    fits = between(2.0, 150.0)
    """Rollouts of the mean length that the KV of one engine holds."""
    engines = int(rng.choice([1, 2, 4, 6]))
    group = int(rng.choice([4, 8, 16, 32]))
    wanted = min(900.0, max(24.0, engines * fits * rng.uniform(2.5, 6.0)))
    problems = max(2, round(wanted / group))
    trouble = str(rng.choice(["none", "none", "none", "drift", "slow", "kv", "crash"]))
    several = engines > 1
    gpu, parallel = ((H100, 1), (H100, 4), (MI300X, 4))[int(rng.integers(3))]
    factors = tuple(float(x) for x in rng.choice([1.0, 0.7, 0.5], engines))
    slower = tuple(float(x) for x in rng.choice([1.0, 1.0, 1.5, 3.0], engines))
    died = rng.uniform(5.0, 60.0)
    return WorkloadShape(
        name=f"random-{seed}-{index}",
        about=f"{fits:.0f} rollouts fit, {gpu.name} x{parallel}, {trouble}",
        limit=limit,
        mean=int(mean),
        problem_sigma=float(rng.uniform(0.05, 0.8)),
        rollout_sigma=float(rng.uniform(0.05, 0.8)),
        turns=20,
        calls=float(rng.choice([0.0, 1.0, 3.0, 6.0])),
        tool_s=between(0.05, 20.0),
        gpu=gpu,
        tensor_parallel=parallel,
        kv_tokens=int(max(fits * mean, 2.2 * limit)),
        problems=problems,
        group=group,
        engines=engines,
        drift=float(rng.choice([0.4, 0.6, 1.7, 2.5])) if trouble == "drift" else 1.0,
        slower=slower if trouble == "slow" and several else (),
        kv_factors=factors if trouble == "kv" and several else (),
        crashes=(
            (EngineCrash(died, 1, died + rng.uniform(5.0, 60.0)),)
            if trouble == "crash" and several
            else ()
        ),
    )


def shapes_of(suite: str | None, seed: int) -> dict[str, WorkloadShape]:
    """The workloads of a suite; without one, those of the paper."""
    match suite:
        case None:
            return SHAPES
        case "held-in":
            return HELD_IN
        case "held-out":
            return held_out(seed)
        case "prompts":
            return PROMPTS
    raise UserError(f"there is no suite {suite!r}: choose held-in, held-out or prompts")

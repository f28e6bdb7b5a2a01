"""Hand-made run directories, written through the real RunDirectory, with curves of a plausible
shape and as much hostile text as one likes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.config import Recipe, load_recipe
from rstar2.record import RunDirectory, evaluation_stage
from rstar2.types import (
    Estimate,
    Evaluation,
    Group,
    Outcome,
    Problem,
    Reward,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

KINDS = (
    *("product", "gcd", "lcm", "range_sum", "binomial"),
    *("remainder", "digit_sum", "multiples"),
)
EVALUATED = 80


def learnt(step: int, total: int = 60) -> float:
    """How far the made-up policy has come, 0..1."""
    return 1 / (1 + math.exp(-8 * (step / total - 0.35)))


def estimate(mean: float, count: int) -> Estimate:
    half = 1.96 * math.sqrt(max(mean * (1 - mean), 0.01) / count)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), count)


def rollout(
    problem: Problem, group: str, correct: bool, clean: bool, text: str | None = None
) -> Trajectory:
    """One attempt: a call that works or fails, then an answer."""
    code = "print(math.gcd(12, 18))" if not clean else "import math\nprint(math.gcd(12, 18))"
    call = ToolCall(id="c", name="python", arguments={"code": code}, raw="{...}")
    result = ToolResult("c", Outcome.OK, stdout="6\n")
    if not clean:
        trace = "  line 1: print(math.gcd(12, 18))\nNameError: name 'math' is not defined"
        result = ToolResult("c", Outcome.EXCEPTION, traceback=trace)
    answer = problem.answer if correct else "41"
    shown = text or (
        'I compute it.</reason>\n<tool_call>\n{"code": "..."}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n...\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n<reason>So it is {answer}.</reason>\n"
        f"<answer>\\boxed{{{answer}}}</answer><|im_end|>"
    )
    first = Turn((5,) * 40, (-0.1,) * 40, ((1, 40),), (call,), (result,), (7,) * 20)
    second = Turn((6,) * 18, (-0.2,) * 18, ((1, 18),))
    return Trajectory(
        id=f"{group}/0",
        problem_id=problem.id,
        group_id=group,
        seed=0,
        prompt_ids=(1, 2, 3),
        turns=(first, second),
        stop=StopReason.ANSWERED,
        answer_tags=1,
        text=shown,
        reward=Reward(float(correct), answer, "math"),
    )


def rl_metrics(step: int, rng: random.Random) -> dict[str, float]:
    far = learnt(step)
    noise = rng.gauss(0, 0.02)
    values = {
        "reward": min(1.0, max(0.0, 0.22 + 0.72 * far + noise)),
        "failing_calls_in_correct": max(0.0, 0.22 * (1 - far) + 0.01 + noise / 2),
        "tool_errors": max(0.0, 0.3 * (1 - far) + 0.015 + noise / 2),
        "response_length": 104 - 22 * far + 40 * noise,
        "truncated": max(0.0, 0.06 * (1 - far) + noise / 3),
        "no_answer": max(0.0, 0.05 * (1 - far) + noise / 3),
        "entropy": 0.42 * (1 - far) + 0.05,
        "groups/used": 16,
        "groups/dropped": float(int(2 + 12 * far * rng.random())),
        "groups/refilled": float(int(2 + 10 * far * rng.random())),
        "rollouts/drawn": 256,
        "rollouts/lost": 0,
        "loss": 0.01 + noise,
        "lr": 1e-3,
        "time/generate": 1.5 + noise,
        "time/tools": 0.4,
        "time/grade": 0.1,
        "time/learn": 1.1 + noise,
        "time/step": 3.3 + 2 * noise,
    }
    for index, kind in enumerate(KINDS):
        shift = learnt(max(0, step - 2 * index))
        values[f"accuracy/{kind}"] = min(1.0, max(0.0, 0.2 + 0.75 * shift + rng.gauss(0, 0.06)))
    return values


def evaluate(run: RunDirectory, stage: str, step: int, rl_step: int, text: str | None) -> None:
    far = learnt(rl_step) if rl_step else 0.0
    for mode, base in (("greedy", 0.3), ("sampled", 0.23)):
        rng = random.Random(f"{stage}{mode}")
        for number in range(EVALUATED):
            kind = KINDS[number % len(KINDS)]
            problem = Problem(
                f"p{number}", f"What is the {kind} of {number} and 18?", "6", kind=kind
            )
            correct, clean = rng.random() < base + 0.68 * far, rng.random() < 0.7 + 0.3 * far
            attempt = rollout(problem, f"{stage}/{number}", correct, clean, text)
            run.trajectories(
                evaluation_stage(stage, mode), step, Group(str(number), problem, step, (attempt,))
            )
        kinds = {k: estimate(min(1.0, base + 0.69 * far), EVALUATED // 8) for k in KINDS}
        run.evaluation(
            Evaluation(
                stage, step, mode, estimate(base + 0.68 * far, 240), kinds,
                failing_calls_in_correct=0.216 * (1 - far) + 0.004,
                tool_errors=0.3 * (1 - far) + 0.01,
                mean_length=104 - 20 * far, mean_turns=2.2, truncated=0.05 * (1 - far), wall_s=9.0,
            )
        )  # fmt: skip


def build_run(
    path: Path, *, text: str | None = None, stop_after: int = 1000, recipe: Recipe | None = None
) -> Path:
    """A run of the tiny recipe, finished unless stopped after so many RL steps."""
    recipe = recipe or load_recipe("tiny", ["rl.stages.2.steps=15"]).recipe
    rng = random.Random(0)
    with RunDirectory.create_or_resume(path, recipe) as run:
        assert recipe.sft is not None
        for step in range(1, recipe.sft.steps + 1):
            loss = 0.25 + 3.5 * math.exp(-step / 90) * (1 + rng.gauss(0, 0.05))
            run.metrics("sft", step, {"loss": loss, "lr": 8e-3, "time/step": 0.19})
        evaluate(run, "sft", recipe.sft.steps, 0, text)
        total = 0
        for stage in recipe.rl.stages:
            for step in range(1, stage.steps + 1):
                total += 1
                if total > stop_after:
                    return path
                run.metrics(stage.name, step, rl_metrics(total, rng))
            evaluate(run, stage.name, stage.steps, total, text)
        run.event("finished")
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda name="run", **how: build_run(tmp_path / name, **how)

"""Answers and verdicts made by hand."""

from __future__ import annotations

from rstar2.evaluate.scores import AnswerSummary, GradedAnswer
from rstar2.evaluate.store import EvalSettings
from rstar2.types import (
    Outcome,
    Problem,
    Reward,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


def problem(id: str, answer: str = "1", kind: str = "") -> Problem:
    return Problem(id, f"question {id}", answer, grader="integer", kind=kind)


def given(
    id: str, sample: int, value: str | None, *, correct: bool, outcomes: tuple[Outcome, ...] = ()
) -> GradedAnswer:
    """An answer with one turn."""
    calls = tuple(ToolCall(str(i), "python", {"code": "print(1)"}) for i in range(len(outcomes)))
    results = tuple(ToolResult(str(i), o) for i, o in enumerate(outcomes))
    turn = Turn((5, 6), (-1.0, -1.0), ((0, 2),), calls, results, response_ids=(7,))
    trajectory = Trajectory(
        f"{id}/{sample}",
        id,
        id,
        sample,
        (1, 2),
        (turn,),
        StopReason.ANSWERED,
        answer=value,
        text=f"<answer>\\boxed{{{value}}}</answer>",
        reward=Reward(float(correct), value, "integer"),
    )
    return GradedAnswer("set", id, sample, 3, trajectory)


def said(id: str, sample: int, vote: str | None, correct: bool = False) -> AnswerSummary:
    tokens, stop = 10 * (sample + 1), StopReason.ANSWERED
    return AnswerSummary(id, sample, correct, vote, tokens, 1, stop, {}, float(correct))


def settings(**changes: object) -> EvalSettings:
    values: dict[str, object] = {
        "model": "m",
        "weights": "w",
        "engine": "embedded",
        "benchmarks": {"set": "d"},
        "samples": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_length": 128,
        "max_turns": 3,
        "seed": 0,
    }
    return EvalSettings(**(values | changes))  # type: ignore[arg-type]

"""Grading in a real code environment: verdicts, and an answer whose comparison never ends."""

from __future__ import annotations

import asyncio

import pytest

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import CodeEnvConfig
from rstar2.reward.grade import grade, rejected_golds
from rstar2.types import Problem, StopReason, Trajectory

TRUTH = Problem("p", "?", "42")
ENDLESS = "9^{9^{9^{9}}}"


def answered(answer: str) -> Trajectory:
    return Trajectory(answer, "p", "g", 0, (1,), (), StopReason.ANSWERED, answer=answer)


@pytest.mark.slow
async def test_answers_are_graded_and_an_endless_one_is_survived() -> None:
    config = CodeEnvConfig(slots=2, warm_up="never")
    async with await CodeEnvClient.start(config) as client:
        right, wrong = await asyncio.gather(
            *(
                grade(answered(text), TRUTH, client, 60.0)
                for text in ("\\frac{84}{2}", "\\sqrt{42}")
            )
        )
        assert right.reward is not None
        assert wrong.reward is not None
        assert (right.reward.value, wrong.reward.value) == (1.0, 0.0)
        integer = Problem("i", "?", "42", "integer")
        for text in ("\\$42", "42\\%", "42^\\circ", "42\\text{ cm}", "x=42", "\\frac{84}{2}"):
            assert (await grade(answered(text), integer, client, 60.0)).correct, text
        assert not (await grade(answered("x=43"), integer, client, 60.0)).correct
        endless = await grade(answered(ENDLESS), TRUTH, client, 5.0)
        assert endless.reward is None
        assert endless.failure is not None
        assert endless.failure.name.startswith("grader_")
        again = await grade(answered("6 \\cdot 7"), TRUTH, client, 60.0)
        assert again.correct
        golds = [TRUTH, Problem("q", "?", "\\pi^2"), Problem("r", "?", "7", "integer")]
        assert await rejected_golds(golds, client, 60.0) == []

"""The optional penalty for text after the answer: off by default, by the last turn's own text."""

from __future__ import annotations

import pytest

from rstar2.environments.python_math import PythonMath
from rstar2.types import StopReason, Trajectory, Turn


def trajectory(*texts: str) -> Trajectory:
    turns = tuple(Turn((5,), (-0.1,), ((0, 1),), text=text) for text in texts)
    tags = sum(text.count("<answer>") for text in texts)
    return Trajectory("t", "p", "g", 0, (1,), turns, StopReason.ANSWERED, answer_tags=tags)


@pytest.mark.parametrize(
    ("texts", "usual", "strict"),
    [
        (("<reason>a</reason><answer>1</answer>",), 0.0, 0.0),
        (("<answer>1</answer>\n ",), 0.0, 0.0),
        (("<answer>1</answer> I am sure.",), 0.0, 1.0),
        (("<answer>1</answer> or <answer>2</answer>",), 1.0, 1.0),
        (("call", "<answer>1</answer> <answer>2</answer>"), 0.5, 0.5),
        (("<answer>1</answer> and on", "<answer>1"), 0.5, 0.5),
        (("no answer at all",), 1.0, 1.0),
        ((), 1.0, 1.0),
    ],
)
def test_penalty(texts: tuple[str, ...], usual: float, strict: float) -> None:
    made = trajectory(*texts)
    assert PythonMath().format_penalty(made) == usual
    assert PythonMath(penalise_text_after_answer=True).format_penalty(made) == strict

"""Problems by name: equal for equal arguments, and bad lines named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2.errors import DataError
from rstar2.problems.load import load_problems
from rstar2.problems.model_filters import difficulty
from rstar2.reward.grade import check_gold
from rstar2.types import Group, Problem, Reward, StopReason, Trajectory


def test_arithmetic_is_seeded_and_split() -> None:
    train = load_problems("arithmetic", "train", count=64, seed=1)
    assert train == load_problems("arithmetic", "train", count=64, seed=1)
    assert train != load_problems("arithmetic", "train", count=64, seed=2)
    heldout = load_problems("arithmetic", "heldout", count=64, seed=1)
    assert not {p.prompt for p in train} & {p.prompt for p in heldout}


def test_every_answer_of_the_embedded_task_can_be_checked() -> None:
    for split in ("train", "heldout"):
        for problem in load_problems("arithmetic", split, count=512):
            check_gold(problem)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "6 * 7?", "answer": 42}\n\n'
        '{"id": "b", "prompt": "q", "answer": "x+1", "kind": "k"}\n'
    )
    first, second = load_problems(str(file), "train")
    assert (first.id, first.answer, first.grader) == ("1", "42", "math")
    assert (second.id, second.kind) == ("b", "k")
    assert load_problems(str(file), "train", count=1) == (first,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"id": "a", "prompt": "q", "answer": 1, "grader": "itneger"}',
            r"p\.jsonl:1: problem a: grader",
        ),
        ('{"prompt": "q", "answer": "x+1", "grader": "integer"}', r"p\.jsonl:1: problem 1: answer"),
        ('{"prompt": "q", "answer": 1}\n{"prompt": "q"', r"p\.jsonl:2: "),
        ('{"prompt": "q", "answr": 1}', r"p\.jsonl:1: .*answr"),
        ('{"prompt": 3, "answer": 1}', r"p\.jsonl:1: .*prompt"),
        ('{"prompt": " ", "answer": 1}', r"p\.jsonl:1: prompt is empty"),
        ('{"prompt": "q", "answer": ""}', r"p\.jsonl:1: answer is empty"),
        ('{"id": 1, "prompt": "q", "answer": 1}\n' * 2, r"p\.jsonl:2: id '1' is already on line 1"),
        ("\n", "contains no problem"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        load_problems(str(file), "train")


def test_missing_file_says_what_to_give() -> None:
    with pytest.raises(DataError, match="JSONL"):
        load_problems("/nowhere/p.jsonl", "train")


def test_difficulty_drops_the_always_solved_and_keeps_the_never_solved() -> None:
    def group(*rewards: float) -> Group:
        made = tuple(
            Trajectory("t", "p", "g", 0, (1,), (), StopReason.ANSWERED, reward=Reward(r, None, "x"))
            for r in rewards
        )
        return Group("g", Problem("p", "q", "1"), 1, made)

    solved = difficulty([group(1, 1), group(0, 1), group(0, 0), group()])
    assert solved.kept == (1, 2, 3)
    assert solved.metrics()["problems/always_solved"] == 1
    assert solved.metrics()["problems/never_solved"] == 1

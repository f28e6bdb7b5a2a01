"""The directory of an evaluation: an answer is there once, for one question."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2.errors import InvariantError, UserError
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.scores import score
from rstar2.evaluate.store import (
    EvalDirectory,
    answers_file,
    read_answers,
    read_problems,
    read_results,
    read_settings,
)
from tests.evaluate.evaluate_helpers import given, problem, settings

SET = Benchmark("set", "made", (problem("a"), problem("b")))


def test_answers_are_found_again(tmp_path: Path) -> None:
    with EvalDirectory.open(tmp_path / "e", settings(), [SET]) as directory:
        directory.add(given("a", 0, "1", correct=True))
        assert answers_file(tmp_path / "e", "set").read_bytes().endswith(b"\n"), "at once"
    with EvalDirectory.open(tmp_path / "e", settings(), [SET]) as directory:
        assert directory.done("set") == {("a", 0)}
        directory.add(given("a", 1, "2", correct=False))
    stored = list(read_answers(tmp_path / "e", "set"))
    assert [(a.problem_id, a.sample, a.trajectory.correct) for a in stored] == [
        ("a", 0, True),
        ("a", 1, False),
    ]
    assert stored[0].trajectory.turns[0].sampled_ids == (5, 6)
    assert read_problems(tmp_path / "e", "set") == SET.problems


def test_an_answer_is_never_there_twice(tmp_path: Path) -> None:
    with EvalDirectory.open(tmp_path / "e", settings(), [SET]) as directory:
        directory.add(given("a", 0, "1", correct=True))
        with pytest.raises(InvariantError, match="twice"):
            directory.add(given("a", 0, "1", correct=True))


def test_a_torn_line_is_cut_and_answered_again(tmp_path: Path) -> None:
    with EvalDirectory.open(tmp_path / "e", settings(), [SET]) as directory:
        directory.add(given("a", 0, "1", correct=True))
        directory.add(given("a", 1, "1", correct=True))
    file = answers_file(tmp_path / "e", "set")
    file.write_bytes(file.read_bytes()[:-20])
    with EvalDirectory.open(tmp_path / "e", settings(), [SET]) as directory:
        assert directory.done("set") == {("a", 0)}
        directory.add(given("a", 1, "1", correct=True))
    assert len(list(read_answers(tmp_path / "e", "set"))) == 2


def test_another_question_is_refused_by_name(tmp_path: Path) -> None:
    EvalDirectory.open(tmp_path / "e", settings(), [SET]).close()
    with pytest.raises(UserError, match=r"temperature: 1\.0 -> 0\.6"):
        EvalDirectory.open(tmp_path / "e", settings(temperature=0.6), [SET])
    with pytest.raises(UserError, match=r"benchmarks\.set: d -> e"):
        EvalDirectory.open(tmp_path / "e", settings(benchmarks={"set": "e"}), [SET])
    with EvalDirectory.open(tmp_path / "e", settings(samples=8), [SET]):
        assert read_settings(tmp_path / "e").samples == 8, "more of the same is no other question"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        EvalDirectory.open(tmp_path / "e", settings(), [SET]),
        pytest.raises(UserError, match="use"),
    ):
        EvalDirectory.open(tmp_path / "e", settings(), [SET])


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        EvalDirectory.open(tmp_path, settings(), [SET])


def test_results_say_whether_they_are_complete(tmp_path: Path) -> None:
    with EvalDirectory.open(tmp_path / "e", settings(samples=1), [SET]) as directory:
        directory.finish({"set": score("set", SET.problems, [], samples=1)})
        stored = read_results(tmp_path / "e")
        assert not stored.complete
        assert stored.scores["set"].missing == 2
    with pytest.raises(UserError, match="no evaluation results"):
        read_results(tmp_path)

"""Evaluation sets: publishers' fields, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rstar2.errors import DataError, UserError
from rstar2.evaluate.benchmarks import PUBLISHED, load_benchmark
from rstar2.problems.rows import parse_hub


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gpqa_row(number: int) -> dict[str, Any]:
    return {
        "Record ID": f"rec{number}",
        "Question": f"Which is number {number}?",
        "Correct Answer": f"right {number}\n",
        "Incorrect Answer 1": "wrong one",
        "Incorrect Answer 2": "wrong two",
        "Incorrect Answer 3": "wrong three",
        "High-level domain": ("Physics", "Biology")[number % 2],
    }


ROWS: dict[str, Any] = {
    "aime24": lambda n: {
        "id": n,
        "problem": f"P{n}",
        "solution": "so",
        "answer": "025",
        "year": 2024,
    },
    "aime25": lambda n: {"problem": f"P{n}", "answer": str(n), "id": str(n)},
    "hmmt25": lambda n: {
        "problem_idx": n,
        "problem": f"P{n}",
        "answer": "\\frac{1}{2}",
        "problem_type": ["Algebra"],
    },
    "math500": lambda n: {
        "problem": f"P{n}",
        "solution": "s",
        "answer": "x^2",
        "subject": "Algebra",
    },
    "gsm8k": lambda n: {"question": f"P{n}", "answer": f"so\n#### 1,{n:03d}"},
    "gpqa": gpqa_row,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_from_a_file_of_its_fields(name: str, tmp_path: Path) -> None:
    rows = [ROWS[name](n) for n in range(PUBLISHED[name].rows)]
    benchmark = load_benchmark(f"{name}={write(tmp_path / 'set.jsonl', rows)}")
    assert benchmark.name == name
    assert len(benchmark.problems) == PUBLISHED[name].rows
    assert len({p.id for p in benchmark.problems}) == len(benchmark.problems)
    graders = {"aime24": "integer", "aime25": "integer", "gsm8k": "integer", "gpqa": "choice"}
    assert {p.grader for p in benchmark.problems} == {graders.get(name, "math")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_names_a_place_on_the_hub(name: str) -> None:
    place = parse_hub(f"hub:{PUBLISHED[name].hub}")
    assert place.split in ("train", "test")
    assert name == "hmmt25" or len(place.revision or "") == 40


def test_a_short_file_is_not_the_set(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", [ROWS["aime24"](n) for n in range(29)])
    with pytest.raises(DataError, match="aime24 has 30 problems"):
        load_benchmark(f"aime24={file}")


def test_count_takes_the_first_of_a_whole_set(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", [ROWS["aime25"](n) for n in range(30)])
    benchmark = load_benchmark(f"aime25={file}", 4)
    assert [p.answer for p in benchmark.problems] == ["0", "1", "2", "3"]
    assert benchmark.digest != load_benchmark(f"aime25={file}", 5).digest


def test_a_broken_row_is_named_and_never_dropped(tmp_path: Path) -> None:
    rows = [ROWS["gpqa"](n) for n in range(198)]
    rows[4].pop("Incorrect Answer 2")
    with pytest.raises(DataError, match=r"set\.jsonl:5: .*Incorrect Answer 2"):
        load_benchmark(f"gpqa={write(tmp_path / 'set.jsonl', rows)}")
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "q", "answer": "so #### 1"}\n{"question": \n')
    with pytest.raises(DataError, match=r"mine\.jsonl:2"):
        load_benchmark(str(file))


def test_a_truth_that_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.jsonl", [{"id": "p", "prompt": "q", "answer": "cat", "grader": "integer"}]
    )
    with pytest.raises(DataError, match="'cat' cannot be checked"):
        load_benchmark(str(file))


def test_options_are_shuffled_by_the_question_alone(tmp_path: Path) -> None:
    rows = [ROWS["gpqa"](n) for n in range(198)]
    problems = load_benchmark(f"gpqa={write(tmp_path / 'a.jsonl', rows)}").problems
    again = load_benchmark(f"gpqa={write(tmp_path / 'b.jsonl', rows[::-1])}").problems
    assert [p.prompt for p in problems] == [p.prompt for p in again[::-1]]
    for number, problem in enumerate(problems):
        assert f"({problem.answer}) right {number}\n" in problem.prompt
    assert {p.answer for p in problems} == set("ABCD")
    assert problems[1].kind == "Biology"


def test_problems_of_ours_keep_ids_and_graders(tmp_path: Path) -> None:
    rows = [{"id": "x-1", "prompt": "q", "answer": "B", "grader": "choice", "kind": "k"}]
    benchmark = load_benchmark(str(write(tmp_path / "mine.v2.jsonl", rows)))
    assert benchmark.name == "mine"
    assert (benchmark.problems[0].id, benchmark.problems[0].grader) == ("x-1", "choice")


def test_the_embedded_task_is_held_out() -> None:
    from rstar2.problems.arithmetic import heldout

    benchmark = load_benchmark("arithmetic", 16)
    assert len(benchmark.problems) == 16
    assert all(heldout(p.meta["a"], p.meta["b"]) for p in benchmark.problems)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UserError, match="not one of aime24"):
        load_benchmark("imo25=")


@pytest.mark.parametrize(
    ("name", "file"),
    [("aime24", "aime24.jsonl"), ("math500", "math500.jsonl"), ("gsm8k", "gsm8k/test.jsonl")],
)
def test_the_real_sets_are_read_whole(name: str, file: str, shared_data: Path) -> None:
    benchmark = load_benchmark(f"{name}={shared_data / file}")
    assert len(benchmark.problems) == PUBLISHED[name].rows

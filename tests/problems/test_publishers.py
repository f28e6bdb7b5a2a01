"""Rows in the publishers' exact schemas, through the files and loaders they are published for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar2.problems.prepare import Dropped, ProblemSource, read_problems
from rstar2.problems.rows import DataRow
from rstar2.problems.sources import READERS, MalformedRow, recognise, to_problem
from rstar2.types import Problem

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "In triangle $ABC$, $\\sin A = 1$.\nFind $100 \\sin A$.\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
DAPO: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"content": DAPO_PROMPT, "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "100", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
OPENMATHREASONING: dict[str, Any] = {
    "expected_answer": "\\( C = 16 \\)",
    "problem_type": "has_answer_extracted",
    "problem_source": "aops_c4_high_school_math",
    "generation_model": "DeepSeek-R1",
    "pass_rate_72b_tir": "0.96875",
    "problem": "Given $\\sqrt{x^2+165}-\\sqrt{x^2-52}=7$, find all real $x$.",
    "generated_solution": "<think>\nOkay, so ...",
    "inference_mode": "cot",
    "used_in_kaggle": True,
}
GSM8K = {
    "question": "Weng earns $12 an hour. She worked 50 minutes. How much did she earn?",
    "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 a minute.\n#### 1,010",
}
MATH = {
    "problem": "If $x = 2$ what is $\\frac{x}{4}$?",
    "level": "Level 5",
    "type": "Algebra",
    "solution": "It is $\\frac{2}{4} = \\boxed{\\frac{1}{2}}$.",
}
MATH500 = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": "We get $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME = {
    "id": 60,
    "problem": "Every morning Aya goes for a walk. How long?",
    "solution": "...",
    "answer": "204",
    "url": "https://example.org",
    "year": "2024",
}
SVAMP: dict[str, Any] = {
    "ID": "chal-777",
    "Body": "There are 87 oranges and 290 bananas",
    "Question": "How big is each group of bananas?",
    "Equation": "( 290.0 / 2.0 )",
    "Answer": "145.0",
    "Type": "Common-Division",
    "question_concat": "There are 87 oranges and 290 bananas How big is each group of bananas?",
}
MAWPS = {
    "iIndex": 2598,
    "sQuestion": "Joan found 70 seashells. She has 27 left. How many did she give to Sam ?",
    "lEquations": ["X = 70 - 27"],
    "lSolutions": [43.0],
}
MAWPS_PORT = {"input": "How many shells are left ?", "target": 43.0, "type": "singleeq", "idx": 0}
EULER = {
    "id": 1,
    "title": "Multiples",
    "problem": "Find the sum of all multiples.",
    "answer": 233168,
}

SCHEMAS: list[tuple[Any, ...]] = [
    (
        "dapo", DAPO, "100", "In triangle $ABC$, $\\sin A = 1$.\nFind $100 \\sin A$.",
        {"origin": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    ),
    ("openmathreasoning", OPENMATHREASONING, "\\( C = 16 \\)", OPENMATHREASONING["problem"], {}),
    ("gsm8k", GSM8K, "1010", GSM8K["question"], {}),
    ("math", MATH, "\\frac{1}{2}", MATH["problem"], {}),
    ("math", MATH500, MATH500["answer"], MATH500["problem"], {"origin": MATH500["unique_id"]}),
    ("math", AIME, "204", AIME["problem"], {"origin": "60"}),
    (
        "svamp", SVAMP, "145",
        "There are 87 oranges and 290 bananas. How big is each group of bananas?",
        {"origin": "chal-777"},
    ),
    ("mawps", MAWPS, "43", MAWPS["sQuestion"], {"origin": "2598"}),
    ("mawps", MAWPS_PORT, "43", MAWPS_PORT["input"], {}),
    ("euler", EULER, "233168", EULER["problem"], {"origin": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "answer", "prompt", "meta"), SCHEMAS)
def test_a_publishers_row_is_read_whole(
    name: str, fields: dict[str, Any], answer: str, prompt: str, meta: dict[str, Any]
) -> None:
    assert recognise(fields) == name
    problem = to_problem(DataRow("f:3", 3, fields), READERS[name], "src")
    assert (problem.prompt, problem.answer, problem.meta) == (prompt, answer, meta)
    assert problem.id == "src-3"


def test_kinds_are_the_publishers() -> None:
    kinds = {name: READERS[name](fields).kind for name, fields, *_ in SCHEMAS}
    assert kinds["math"] == ""
    assert kinds["openmathreasoning"] == "aops_c4_high_school_math"
    assert kinds["svamp"] == "Common-Division"
    assert READERS["math"](MATH500).kind == "Precalculus"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("dapo", {**DAPO, "reward_model": None}, "'reward_model'"),
        ("dapo", {**DAPO, "prompt": "text"}, "'prompt' should be a non-empty list"),
        ("dapo", {**DAPO, "reward_model": {"ground_truth": ["1"]}}, "'ground_truth' is a list"),
        (
            "openmathreasoning",
            {**OPENMATHREASONING, "problem_type": "no_answer_extracted"},
            "no extracted answer",
        ),
        ("openmathreasoning", {**OPENMATHREASONING, "expected_answer": None}, "is null"),
        ("mawps", {**MAWPS, "lSolutions": [1.0, 2.0]}, "has 2 answers"),
        ("mawps", {**MAWPS, "lSolutions": []}, "'lSolutions'"),
        ("svamp", {**SVAMP, "Answer": {"value": 1}}, "'Answer' is a dict"),
        ("euler", {"problem": "Find it."}, "'answer' is missing; the row has"),
    ],
)
def test_a_row_without_its_publishers_shape_says_why(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(MalformedRow, match=message):
        READERS[name](fields)


# --------------------------------------------------------------------------- files and loaders


def read(path: str, name: str = "s") -> list[Problem | Dropped]:
    return [problem for _, problem in read_problems(ProblemSource(path, name))]


@pytest.mark.parametrize(
    "fields", [DAPO, OPENMATHREASONING, GSM8K, MATH500, SVAMP], ids=lambda f: recognise(f)
)
@pytest.mark.slow
def test_parquet_and_datasets_give_what_json_gives(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(fields) + "\n")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table = pa.Table.from_pylist([fields])
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    (one,) = read(str(tmp_path / "a.jsonl"))
    assert isinstance(one, Problem)
    assert read(str(tmp_path / "a.parquet")) == [one]
    assert read(f"hub:{tmp_path / 'hub'}") == [one]


def test_the_original_mawps_file_is_one_array(tmp_path: Path) -> None:
    (tmp_path / "MAWPS.json").write_text(json.dumps([MAWPS, {**MAWPS, "lSolutions": [1, 2]}]))
    good, bad = read(str(tmp_path / "MAWPS.json"))
    assert isinstance(good, Problem)
    assert isinstance(bad, Dropped)
    assert bad.where.endswith("MAWPS.json:2")


def test_mixed_types_and_repeated_ids_are_read_row_by_row(tmp_path: Path) -> None:
    rows = [
        {"id": "7", "prompt": "How much is it?", "answer": 4},
        {"id": "7", "prompt": "How much is that?", "answer": "4"},
        {"id": "7", "prompt": ["How", "much"], "answer": 4.0},
        {"id": 7, "prompt": "How much are they?", "answer": 4.0},
        {"id": "7", "prompt": "How much now?", "answer": True},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = read(str(tmp_path / "a.jsonl"))
    assert [isinstance(each, Problem) for each in kept] == [True, True, False, True, False]
    problems = [each for each in kept if isinstance(each, Problem)]
    assert [p.id for p in problems] == ["s-1", "s-2", "s-4"], "ids are ours, so they never repeat"
    assert {p.answer for p in problems} == {"4"}
    assert {p.meta["origin"] for p in problems} == {"7"}

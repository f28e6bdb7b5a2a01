"""Readers and cleaning steps on hand-made rows, broken ones included: nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rstar2.codeenv.protocol import VerifyRequest, VerifyResult
from rstar2.errors import DataError, UserError
from rstar2.problems import clean
from rstar2.problems.card import DataFilter
from rstar2.problems.overlap import words
from rstar2.problems.prepare import Card, ProblemSource, prepare, read_problems
from rstar2.problems.rows import DataRow
from rstar2.problems.sources import READERS, MalformedRow, mapped, recognise, to_problem
from rstar2.types import Problem

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "How many primes are below 10?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)

ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dapo": (
        {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "4"}},
        "How many primes are below 10?",
        "4",
    ),
    "openmathreasoning": (
        {"problem": "Find x.", "expected_answer": "7", "problem_type": "has_answer_extracted"},
        "Find x.",
        "7",
    ),
    "euler": ({"problem": "Sum the multiples.", "answer": 233168}, "Sum the multiples.", "233168"),
    "gsm8k": (
        {"question": "How many eggs?", "answer": "16 - 3 = 13\n#### 1,300"},
        "How many eggs?",
        "1300",
    ),
    "math": (
        {"problem": "Simplify.", "solution": r"So \boxed{\frac{1}{2}}.", "type": "Algebra"},
        "Simplify.",
        r"\frac{1}{2}",
    ),
    "svamp": (
        {"Body": "Ann has 3 pens", "Question": "How many?", "Answer": 3.0, "Type": "Sum"},
        "Ann has 3 pens. How many?",
        "3",
    ),
    "mawps": ({"input": "How many shells ?", "target": 43.0}, "How many shells ?", "43"),
    "rstar2": ({"prompt": "What is 6 * 7?", "answer": "42"}, "What is 6 * 7?", "42"),
}


def problem(prompt: str, answer: str = "1", **fields: Any) -> Problem:
    return Problem(id=prompt[:20], prompt=prompt, answer=answer, **fields)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return str(path)


# --------------------------------------------------------------------------- readers


@pytest.mark.parametrize("name", READERS)
def test_every_publishers_row_is_recognised_and_read(name: str) -> None:
    fields, prompt, answer = ROWS[name]
    assert recognise(fields) == name
    read = to_problem(DataRow("f:3", 3, fields), READERS[name], "src")
    assert (read.prompt, read.answer, read.id) == (prompt, answer, "src-3")


def test_integers_get_the_integer_grader() -> None:
    assert (
        to_problem(DataRow("f:1", 1, ROWS["euler"][0]), READERS["euler"], "s").grader == "integer"
    )
    assert to_problem(DataRow("f:1", 1, ROWS["math"][0]), READERS["math"], "s").grader == "math"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, "####"),
        ("gsm8k", {"answer": "#### 4"}, "'question' is missing"),
        ("math", {"problem": "p", "solution": "no box"}, "boxed"),
        ("dapo", {"prompt": [], "reward_model": {}}, "'prompt'"),
        ("dapo", {"prompt": ["x"], "reward_model": {"ground_truth": "1"}}, "messages"),
        ("mawps", {"input": "q", "target": [1]}, "'target' is a list"),
        ("mawps", {"input": "q", "target": float("nan")}, "nan"),
        ("mawps", {"input": "  ", "target": 1}, "'input' is empty"),
        ("mawps", {"input": "q", "target": True}, "'target' is a bool"),
        (
            "openmathreasoning",
            {"problem": "p", "expected_answer": "1", "problem_type": "converted_proof"},
            "converted_proof",
        ),
    ],
)
def test_a_malformed_row_names_its_field(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedRow, match=message):
        READERS[name](fields)


def test_a_field_map_reads_any_data_set() -> None:
    reader = mapped({"prompt": "q", "answer": "gold"})
    assert reader({"q": "How many?", "gold": 4}).answer == "4"
    with pytest.raises(UserError, match="needs prompt and answer"):
        mapped({"prompt": "q"})


def test_unknown_fields_list_the_choices() -> None:
    with pytest.raises(UserError, match="gsm8k"):
        recognise({"text": "hello"})


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no row"):
        list(read_problems(ProblemSource(write(tmp_path / "a.jsonl"), "a")))


# --------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("step", "kept", "dropped", "reason"),
    [
        (
            clean.OfKinds(frozenset({"algebra"})),
            problem("p", kind="algebra"),
            problem("p", kind="geometry"),
            "kind 'geometry' is not among algebra",
        ),
        (clean.IntegerAnswers(), problem("p", "-12"), problem("p", "1/2"), "not an integer"),
        (clean.NotGiant(), problem("p", "9" * 12), problem("p", "9" * 13), "13 digits"),
        (clean.NotGiant(), problem("p", "x" * 60), problem("p", "x" * 61), "61 characters"),
        (
            clean.VerifiableProblems(),
            problem("What is two plus two?"),
            problem("Prove that two is prime."),
            "prove",
        ),
        (
            clean.VerifiableProblems(),
            problem("Graph theory: how many edges has K5?"),
            problem("How long is AB in the figure below?"),
            "picture",
        ),
        (
            clean.VerifiableProblems(),
            problem("Find (a) x if (b) y is 2"),
            problem("Do this:\n(a) Find x.\n(b) Find y."),
            "several",
        ),
        (
            clean.VerifiableProblems(),
            problem("Find x now"),
            problem("Find x"),
            "fewer than 3 words",
        ),
        (
            clean.GoldsReadable(),
            problem("p", "7", grader="integer"),
            problem("p", "seven", grader="integer"),
            "cannot be checked",
        ),
    ],
)
def test_a_step_keeps_and_drops(
    step: DataFilter[Problem], kept: Problem, dropped: Problem, reason: str
) -> None:
    assert step.drop(kept) is None
    assert reason in (step.drop(dropped) or "kept")


def test_duplicates_exact_and_near_but_not_with_other_numbers() -> None:
    step = clean.UniqueProblems()
    text = (
        "A train leaves at 7 with 120 people and comes back at 9 with 80; how many got off in all?"
    )
    assert step.drop(problem(text)) is None
    assert "exact" in (step.drop(problem(text.upper().replace(" ", "  "))) or "kept")
    assert "near" in (step.drop(problem(text.replace("got off", "went off"))) or "kept")
    assert step.drop(problem(text.replace("120", "121"))) is None
    assert step.drop(problem("How many primes lie between 7 and 120?")) is None


EVAL = (
    r"Find the number of ordered pairs $(a,b)$ with $\frac{a}{b} \le 5$ "
    r"such that $1{,}000a + b$ is a perfect square."
)


@pytest.mark.parametrize(
    "planted",
    [
        EVAL,
        EVAL.lower(),
        EVAL.replace(" ", "   ").replace("$", ""),
        "Consider this. " + EVAL + " Answer as an integer.",
        r"find the number of ordered pairs (a, b) with a/b \leq 5 such that 1000a+b is a square",
        EVAL.replace(r"\frac", r"\dfrac").replace(r"\le", r"\,\leq\;"),
        EVAL.upper(),
    ],
)
def test_planted_overlaps_are_found(planted: str) -> None:
    step = clean.decontaminated([problem(EVAL)])
    assert "shares 8 words" in (step.drop(problem(planted)) or "kept")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"\frac12 + \tfrac{a}{b}", "1/2 + a/b"),
        (r"\dfrac{\sqrt{2}}{\frac{1}{3}}", "(sqrt 2)/(1/3)"),
        (r"$1{,}000 \times x$", "1000*X"),
        (r"\left( x \right) \; \text{and } y", "(x) and Y"),
        (r"x \leftarrow \textbf{y}", "x leftarrow textbf y"),
        ("ﬁnd ２ Äpfel", "find 2 äpfel"),
    ],
)
def test_mark_up_does_not_change_the_words(one: str, other: str) -> None:
    assert words(one) == words(other)


def test_a_control_text_is_not_contaminated() -> None:
    step = clean.decontaminated([problem(EVAL), problem("What is 6 times 7?")])
    assert step.drop(problem("Find the number of ordered triples that sum to 100.")) is None
    assert step.drop(problem("What is 6 times 8?")) is None
    assert step.drop(problem("what is $6$ times $7$")) is not None


# --------------------------------------------------------------------------- the whole


class PickyVerifier:
    """Accepts every truth but one."""

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        return VerifyResult(request.id, value=request.arguments["truth"] != r"\odd")


async def test_prepare_loses_nothing_and_counts_everything(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl",
        {"question": "How many eggs are there now?", "answer": "#### 7"},
        "{broken\n",
        {"question": "How many hens are there now?", "answer": "none"},
        {"question": "how many EGGS are there now", "answer": "#### 7"},
        {"question": "Prove that there are hens.", "answer": "#### 1"},
        {"question": "What odd answer is this one?", "answer": r"#### \odd"},
    )
    steps: list[DataFilter[Problem]] = [clean.VerifiableProblems(), clean.UniqueProblems()]
    out = tmp_path / "out"
    card = await prepare([ProblemSource(source, "eggs")], steps, out, verifier=PickyVerifier())
    kept = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    dropped = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    assert [row["id"] for row in kept] == ["eggs-1"]
    assert len(kept) + len(dropped) == 6
    assert {(row["step"], row["where"].rpartition(":")[2]) for row in dropped} == {
        ("read", "2"),
        ("read", "3"),
        ("no duplicates", "4"),
        ("verifiable and well formed", "5"),
        ("golds accepted by their grader", "6"),
    }
    assert [(step.entered, step.left) for step in card.steps] == [(6, 4), (4, 3), (3, 2), (2, 1)]
    assert "a.jsonl:5" in card.markdown()


async def test_prepare_refuses_to_overwrite_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    source = ProblemSource(write(tmp_path / "a.jsonl", ROWS["gsm8k"][0]), "a")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DataError, match="exists"):
        await prepare([source], [], out)
    with pytest.raises(DataError, match="does not exist"):
        await prepare([ProblemSource(str(tmp_path / "no.jsonl"), "n")], [], tmp_path / "new")
    with pytest.raises(DataError, match="repeat"):
        await prepare([source, source], [], tmp_path / "new")
    assert _names(tmp_path) == ["a.jsonl", "out"]


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_shared_data_becomes_problems(shared_data: Path, tmp_path: Path) -> None:
    files = {"gsm8k": "gsm8k/test.jsonl", "svamp": "svamp.jsonl", "mawps": "mawps.jsonl"}
    sources = [ProblemSource(str(shared_data / path), name) for name, path in files.items()]
    card: Card = await prepare(
        sources, [clean.IntegerAnswers(), clean.UniqueProblems()], tmp_path / "out"
    )
    assert card.sources == {"gsm8k": 1319, "svamp": 1000, "mawps": 2065}
    assert card.steps[0].left == 4384
    assert card.kept > 3000

"""Filters that ask a model: the verdicts, what is asked, and what a kill leaves to be asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rstar2.errors import DataError, EngineError, InfrastructureError, UserError
from rstar2.problems.model_filters import (
    Agreement,
    Asking,
    NotAlwaysSolved,
    Question,
    Rule,
    SampledAnswer,
)
from rstar2.tasks import OUTAGE
from rstar2.types import Failure, Problem

LOST = SampledAnswer(False, failure=Failure("engine", "gone"))


# --------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rule", "correct", "wrong", "stays"),
    [
        (Agreement(2, 16), 2, 0, True),
        (Agreement(2, 16), 1, 14, None),
        (Agreement(2, 16), 1, 15, False),
        (Agreement(2, 16), 0, 15, False),
        (Agreement(1, 1), 0, 0, None),
        (NotAlwaysSolved(8), 7, 0, None),
        (NotAlwaysSolved(8), 8, 0, False),
        (NotAlwaysSolved(8), 7, 1, True),
        (NotAlwaysSolved(8), 0, 8, True),
    ],
)
def test_rules(rule: Rule, correct: int, wrong: int, stays: bool | None) -> None:
    assert rule.decide(correct, wrong) is stays


@pytest.mark.parametrize("rule", [Agreement(2, 5), Agreement(5, 5), NotAlwaysSolved(4)])
def test_stopping_early_never_changes_a_verdict(rule: Rule) -> None:
    for bits in range(1 << rule.samples):
        marks = [bool(bits >> i & 1) for i in range(rule.samples)]
        whole = rule.decide(sum(marks), len(marks) - sum(marks))
        early = (rule.decide(sum(marks[:n]), n - sum(marks[:n])) for n in range(rule.samples + 1))
        assert next(verdict for verdict in early if verdict is not None) is whole


# --------------------------------------------------------------------------- asking


class Interrupted(Exception):
    """Ends a filter in the middle."""


class Model:
    """Answers by a table of marks per problem; remembers what it was asked."""

    def __init__(self, marks: dict[str, str]) -> None:
        self.marks = marks
        self.asked: Counter[tuple[str, int]] = Counter()
        self.seeds: dict[tuple[str, int], int] = {}
        self.stop_after: int | None = None

    async def __call__(self, problem: Problem, sample: int, seed: int) -> SampledAnswer:
        if self.stop_after is not None and self.asked.total() >= self.stop_after:
            raise Interrupted
        self.asked[problem.id, sample] += 1
        assert self.seeds.setdefault((problem.id, sample), seed) == seed
        mark = self.marks[problem.id][sample]
        return LOST if mark == "x" else SampledAnswer(mark == "1", mark)


def problems(folder: Path, *ids: str, source: str = "omr") -> Path:
    rows = [Problem(i, f"What is {i}?", "1", "integer", source=source) for i in ids]
    path = folder / "problems.jsonl"
    made = [{"id": p.id, "prompt": p.prompt, "answer": "1", "source": p.source} for p in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@contextmanager
def asking(path: Path, out: Path, rule: Rule, **fields: Any) -> Iterator[Asking]:
    made = Asking(path, out, Question(rule, fields.pop("model", {"model": "m"}), **fields))
    try:
        yield made
    finally:
        made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


MARKS = {"all": "1111", "none": "0000", "two": "0101", "one": "1000", "last": "0011"}


async def test_agreement_keeps_what_is_confirmed_and_asks_no_more_than_it_needs(
    tmp_path: Path,
) -> None:
    path, model = problems(tmp_path, *MARKS), Model(MARKS)
    with asking(path, tmp_path / "out", Agreement(2, 4)) as filter:
        await filter.ask(model, concurrency=2)
        card = filter.finish()
    kept, dropped = lines(tmp_path / "out/problems.jsonl"), lines(tmp_path / "out/dropped.jsonl")
    assert [row["id"] for row in kept] == ["all", "two", "last"]
    assert [(row["where"], row["reason"]) for row in dropped] == [
        ("none", "0 of 3 answers were right"),
        ("one", "1 of 4 answers were right"),
    ]
    assert Counter(id for id, _ in model.asked.elements()) == {
        **{"all": 2, "none": 3, "two": 4, "one": 4, "last": 4}
    }
    assert kept[1]["meta"]["agreement"] == {"correct": 2, "asked": 4}
    assert (card.steps[-1].entered, card.steps[-1].left, card.kept) == (5, 3, 3)
    assert "17 answers of m" in card.notes[0]


async def test_all_samples_can_be_taken_for_the_counts(tmp_path: Path) -> None:
    path, model = problems(tmp_path, *MARKS), Model(MARKS)
    with asking(path, tmp_path / "out", NotAlwaysSolved(4), exhaustive=True) as filter:
        await filter.ask(model, concurrency=3)
        filter.finish()
    kept = lines(tmp_path / "out/problems.jsonl")
    assert {row["id"]: row["meta"]["solved"]["correct"] for row in kept} == {
        **{"none": 0, "two": 2, "one": 1, "last": 2}
    }
    assert model.asked.total() == 20


async def test_an_interrupted_filter_resumes_and_asks_nothing_twice(tmp_path: Path) -> None:
    path, whole = problems(tmp_path, *MARKS), Model(MARKS)
    with asking(path, tmp_path / "whole", Agreement(2, 4)) as filter:
        await filter.ask(whole, concurrency=1)
        expected = filter.finish()
    model = Model(MARKS)
    for stop in (1, 4, 9, None):
        model.stop_after = stop
        with asking(path, tmp_path / "out", Agreement(2, 4)) as filter:
            if stop is None:
                await filter.ask(model, concurrency=1)
                card = filter.finish()
            else:
                with pytest.raises(Interrupted):
                    await filter.ask(model, concurrency=1)
        with (tmp_path / "out/answers.jsonl").open("ab") as file:
            file.write(b'{"row": 0, "torn')  # what a kill may leave
    assert model.asked == whole.asked
    assert model.seeds == whole.seeds
    assert max(model.asked.values()) == 1
    assert card == expected
    for name in ("problems.jsonl", "dropped.jsonl", "card.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


async def test_a_lost_answer_is_no_wrong_answer(tmp_path: Path) -> None:
    marks = {"a": "x011", "b": "xx10", "c": "1111"}
    path, model = problems(tmp_path, *marks), Model(marks)
    with asking(path, tmp_path / "out", Agreement(2, 4)) as filter:
        await filter.ask(model, concurrency=1)
        with pytest.raises(EngineError, match="1 problems are undecided, such as b: 3 answers"):
            filter.finish()
        assert not (tmp_path / "out/problems.jsonl").exists()
        card = filter.finish(drop_undecided=True)
    assert [row["id"] for row in lines(tmp_path / "out/problems.jsonl")] == ["a", "c"]
    assert "undecided" in lines(tmp_path / "out/dropped.jsonl")[0]["reason"]
    assert card.kept == 2
    model.marks["b"] = "1110"
    with asking(path, tmp_path / "out", Agreement(2, 4)) as filter:
        await filter.ask(model, concurrency=1)
        assert filter.finish().kept == 3
    assert model.asked["b", 0] == 2, "asked again, as it had no answer"
    assert model.asked["b", 2] == 1


async def test_a_dead_model_ends_the_filter_by_name(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(OUTAGE)]
    path, model = problems(tmp_path, *ids), Model(dict.fromkeys(ids, "xxxx"))
    with (
        asking(path, tmp_path / "out", Agreement(2, 4)) as filter,
        pytest.raises(InfrastructureError, match=f"{OUTAGE} answers in a row.*engine: gone"),
    ):
        await filter.ask(model, concurrency=2)


async def test_other_sources_are_neither_asked_nor_dropped(tmp_path: Path) -> None:
    path, model = problems(tmp_path, "a", "b", source="dapo"), Model({})
    with asking(path, tmp_path / "out", Agreement(2, 4), only=("omr",)) as filter:
        await filter.ask(model, concurrency=2)
        card = filter.finish()
    assert not model.asked
    assert [row["meta"] for row in lines(tmp_path / "out/problems.jsonl")] == [{}, {}]
    assert card.steps[-1].entered == 0


async def test_another_question_is_refused_in_the_same_directory(tmp_path: Path) -> None:
    path = problems(tmp_path, *MARKS)
    with asking(path, tmp_path / "out", Agreement(2, 4)):
        pass
    for rule, fields, message in (
        (Agreement(3, 4), {}, "rule: at least 2"),
        (Agreement(2, 4), {"model": {"model": "n"}}, "model: "),
        (Agreement(2, 4), {"seed": 1}, "seed: 0 -> 1"),
    ):
        with (
            pytest.raises(UserError, match=f"other settings.*{message}"),
            asking(path, tmp_path / "out", rule, **fields),
        ):
            pass
    problems(tmp_path, "other")
    with (
        pytest.raises(UserError, match="problems: "),
        asking(path, tmp_path / "out", Agreement(2, 4)),
    ):
        pass


def test_a_foreign_directory_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    path = problems(tmp_path, "a")
    with pytest.raises(UserError, match=r"not empty \(it contains problems.jsonl\)"):
        Asking(path, tmp_path, Question(Agreement(), {}))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        Asking(tmp_path / "bad.jsonl", tmp_path / "out", Question(Agreement(), {}))

"""`rstar2 entropy` on a real run: recorded entropies are the exact ones, and the page is whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from rstar2.agent.detokenizer import Detokenizer
from rstar2.cli import main
from rstar2.entropy.classes import recorded_entropies
from rstar2.entropy.sources import (
    LabelledRollouts,
    classed,
    course,
    evaluations,
    exact_entropies,
)
from rstar2.errors import UserError
from rstar2.types import StopReason, Trajectory, Turn


@pytest.mark.slow
def test_what_the_engine_recorded_is_what_the_learner_computes(finished: Path) -> None:
    samples = evaluations(finished, count=6)
    assert [sample.label for sample in samples] == ["sft", "short", "hard"]
    for sample in samples:
        exact = exact_entropies(finished / "exports" / sample.label)(sample.trajectories)
        for trajectory, values in zip(sample.trajectories, exact, strict=True):
            known = recorded_entropies(trajectory)
            assert known is not None
            for mine, theirs in zip(values, known, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
def test_the_course_of_training_takes_steps_evenly(finished: Path) -> None:
    steps = [(stage, step) for stage, step, _ in course(finished, count=5, points=2)]
    assert steps == [("short", 1), ("short", 2), ("hard", 1), ("hard", 2)]
    assert all(len(s.trajectories) == 5 for _, _, s in course(finished, count=5, points=2))


@pytest.mark.slow
def test_samples_are_drawn_by_the_seed(finished: Path) -> None:
    ids = [[t.id for t in s.trajectories] for s in evaluations(finished, count=3, seed=1)]
    assert ids == [[t.id for t in s.trajectories] for s in evaluations(finished, count=3, seed=1)]


@pytest.mark.slow
def test_the_command_writes_tables_and_a_page(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["entropy", str(finished), "--points", "2", "--out", str(tmp_path)])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert re.search(r"^ *sft +code ", out, re.MULTILINE)
    assert re.search(r"^ *hard 2 ", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines())
    document = json.loads((tmp_path / "entropy.json").read_text())
    assert [s["label"] for s in document["samples"]] == ["sft", "short", "hard"]
    assert len(document["course"]) == 4
    page = (tmp_path / "entropy.html").read_text()
    assert page.count('class="card example"') == 12
    assert "Over training" in page
    assert not (finished / "entropy").exists()


@pytest.mark.slow
def test_a_model_answers_problems_first(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(finished / "exports" / "sft", tmp_path / "model")
    problems = tmp_path / "problems.jsonl"
    rows = [{"id": f"{n}", "prompt": f"coin {n}", "answer": str(n % 2)} for n in range(40, 44)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ("--problems", str(problems), "--max-length", "128", "--out", str(tmp_path / "out"))
    with pytest.raises(SystemExit) as end:
        main(["entropy", str(model), *how, "--json"])
    assert end.value.code == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["label"] == "model"
    assert sample["trajectories"] == 4


@pytest.mark.slow
def test_a_model_without_problems_is_refused(finished: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["entropy", str(finished / "exports" / "sft")])
    assert end.value.code == 2


def test_rollouts_without_entropies_are_refused_by_name() -> None:
    turn = Turn((1, 2), (-0.1, -0.2), ((0, 2),))
    trajectory = Trajectory("t/1/0", "p", "t/1", 0, (1,), (turn,), StopReason.ANSWERED)
    with pytest.raises(UserError, match="t/1/0"):
        classed(LabelledRollouts("x", (trajectory,), ("",)), lambda ids: ["a"] * len(ids), None)


def test_hostile_text_stays_text_on_the_page(tmp_path: Path) -> None:
    from rstar2.entropy.classes import tokens_of
    from rstar2.entropy.report import HeatMap, pieces, write_page
    from rstar2.entropy.table import analyse

    bad = "<script>alert(1)</script>"
    turn = Turn((1,), (-0.1,), ((0, 1),), entropies=(1.0,))
    trajectory = Trajectory("t", bad, "g", 0, (1,), (turn,), StopReason.ANSWERED)
    tokens = tokens_of(trajectory, [[bad]], [[1.0]], share=1.0)
    heat = HeatMap(bad, bad, bad, False, pieces(tokens, 1, 1.0), (bad,))
    write_page(tmp_path / "x.html", [analyse(bad, [tokens])], [], [heat])
    assert "<script" not in (tmp_path / "x.html").read_text()


@pytest.mark.slow
def test_pieces_join_to_the_text_even_inside_a_character(finished: Path) -> None:
    from tokenizers import Tokenizer

    path = finished / "model" / "tokenizer.json"
    pieces, tokenizer = Detokenizer(path), Tokenizer.from_file(str(path))
    text = "naïve ∑ 😀 <tool_call> x\n</reason>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = pieces(ids)
    assert len(parts) == len(ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=False)
    assert Detokenizer(None)([5, 6]) == [" 5", " 6"]


def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        main(["entropy", str(tmp_path), "--out", str(tmp_path / "file" / "entropy")])
    assert exit_.value.code == 2
    assert "cannot be written: choose another directory with --out" in capsys.readouterr().err

"""`rstar2 eval` with every real part: model, engine, scheduler, code environment, grader."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rstar2.cli import main
from rstar2.evaluate.store import answers_file, read_answers
from rstar2.record import read_evaluations, read_groups
from tests import forked_cli

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

DEADLINE_S = 300


def call(*words: object) -> None:
    """Run the command in this process; it ends by SystemExit."""
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, words)])
    assert ended.value.code in (0, None), f"exit {ended.value.code}"


def results(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "results.json").read_text()))


def drawn(path: Path) -> dict[tuple[str, int], Any]:
    """What was sampled for each answer, and its verdict."""
    return {
        (a.problem_id, a.sample): (
            [turn.sampled_ids for turn in a.trajectory.turns],
            a.trajectory.seed,
            a.trajectory.correct,
        )
        for a in read_answers(path, "heldout")
    }


@pytest.fixture(scope="module")
def evaluations(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations that were never killed, of 8 problems: `greedy` of a run, which means its last
    export, `sampled` of the export after SFT, and `whole`, which adds six answers per problem."""
    root = tmp_path_factory.mktemp("evaluations")
    call(finished, "--preset", "run", "--greedy", "--out", root / "greedy")
    after_sft = (finished / "exports" / "sft", "--preset", "run")
    call(*after_sft, "--out", root / "sampled")
    shutil.copytree(root / "sampled", root / "whole")
    call(*after_sft, "-k", 8, "--out", root / "whole")
    return root


@pytest.fixture(scope="module")
def whole(evaluations: Path) -> Path:
    return evaluations / "whole"


@pytest.mark.parametrize(("stage", "mode"), [("hard", "greedy"), ("sft", "sampled")])
def test_it_is_the_pipelines_own_number(
    finished: Path, evaluations: Path, stage: str, mode: str
) -> None:
    (own,) = [e for e in read_evaluations(finished) if (e.stage, e.mode) == (stage, mode)]
    scores = results(evaluations / mode)["scores"]["heldout"]
    assert scores["average"] == {
        "mean": own.accuracy.mean,
        "low": own.accuracy.low,
        "high": own.accuracy.high,
        "count": own.accuracy.count,
    }
    assert scores["tokens"]["mean"] == own.mean_length
    assert scores["failing_calls_in_correct"] == own.failing_calls_in_correct
    rollouts = {
        (t.problem_id, index): [turn.sampled_ids for turn in t.turns]
        for line in read_groups(finished, f"eval-{stage}-{mode}")
        for index, t in enumerate(line.group.trajectories)
    }
    assert {key: ids for key, (ids, _, _) in drawn(evaluations / mode).items()} == rollouts


def test_killed_in_the_middle_it_ends_with_the_same_result(
    finished: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "e"
    words = [
        "eval",
        str(finished / "exports" / "sft"),
        "--preset",
        "run",
        "-k",
        "8",
        "--out",
        str(path),
    ]
    killed_after = kill_after(6, [*words, "--concurrency", "1"], answers_file(path, "heldout"))
    assert 6 <= killed_after < 64
    before = answers_file(path, "heldout").read_bytes()
    call(*words[1:])
    after = answers_file(path, "heldout").read_bytes()
    assert after.startswith(before[: before.rindex(b"\n") + 1]), "nothing was written again"
    lines = list(read_answers(path, "heldout"))
    assert len(lines) == 64 == len({(a.problem_id, a.sample) for a in lines}), "each answer once"
    assert drawn(path) == drawn(whole)
    one, other = results(path)["scores"]["heldout"], results(whole)["scores"]["heldout"]
    assert one | {"wall_s": 0} == other | {"wall_s": 0}


def kill_after(count: int, words: list[str], file: Path) -> int:
    """Start the command in its own process and kill it, -9, once so many answers are there."""
    started = forked_cli.start(words, file.parents[2], file.parents[2] / "printed")
    ends = time.monotonic() + DEADLINE_S
    try:
        while (lines := _lines(file)) < count:
            assert started.exitcode is None, "it ended by itself"
            assert time.monotonic() < ends, "it never answered"
            time.sleep(0.005)
    finally:
        started.kill()
        started.join(DEADLINE_S)
    return max(lines, _lines(file))


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_more_samples_keep_the_answers_there_are(evaluations: Path, whole: Path) -> None:
    first = answers_file(evaluations / "sampled", "heldout").read_bytes()
    assert first.count(b"\n") == 16
    assert answers_file(whole, "heldout").read_bytes().startswith(first)


def test_stored_answers_are_scored_again_without_generating(whole: Path, tmp_path: Path) -> None:
    before, stored = results(whole), answers_file(whole, "heldout").read_bytes()
    flipped = tmp_path / "flipped.jsonl"
    stored_problems = (whole / "problems" / "heldout.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in stored_problems]
    for problem in problems:
        problem["answer"] = str(1 - int(problem["answer"]))
    flipped.write_text("".join(json.dumps(p) + "\n" for p in problems))
    call(whole, "--rescore", "--on", f"heldout={flipped}")
    after = results(whole)["scores"]["heldout"]
    assert after["settled"]["to_wrong"] == sum(
        a.trajectory.correct for a in read_answers(whole, "heldout")
    )
    assert after["settled"]["to_right"] > 0
    assert answers_file(whole, "heldout").read_bytes() == stored
    call(whole, "--rescore")
    assert results(whole)["rescored"]
    assert results(whole)["scores"]["heldout"]["average"] == before["scores"]["heldout"]["average"]


def test_a_page_and_a_comparison_come_of_it(
    whole: Path, evaluations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (whole / "report.html").read_text()
    assert "pass@k" in page
    assert "http://" not in page
    assert "src=" not in page
    capsys.readouterr()
    call("compare", whole, evaluations / "greedy", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert row["problems"] == 8
    assert 0 < row["p"] <= 1
    assert row["difference"]["mean"] == pytest.approx(row["second"] - row["first"])
    call("compare", whole, whole)
    assert "1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give either a directory"),
        (["--url", "http://x", "--preset", "run"], "takes a run directory"),
        (["--url", "http://x"], "name a benchmark with --on"),
        (["--url", "http://x", "--on", "imo=nowhere.jsonl"], "nowhere"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

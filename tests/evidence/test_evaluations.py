"""Evaluations of the models that cells end with: made once, recorded by problem, resumable."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rstar2.cli import main
from rstar2.config import load_recipe
from rstar2.errors import UserError
from rstar2.evaluate.store import read_settings
from rstar2.evidence.claim import (
    Cell,
    Claim,
    ClaimEvaluation,
    cell_of,
    cells_of,
    read_claim,
)
from rstar2.evidence.evaluations import eval_command, read_evaluated
from rstar2.evidence.page import Judged, claim_page, curves, write_pages
from rstar2.evidence.results import CellResult, write_result
from rstar2.evidence.run import CellRunner, Places, missing_cells, missing_evaluations, recorded
from rstar2.evidence.verdict import judge, value_of
from rstar2.record import dump_recipe
from tests.evidence.fakes import Evaluator, Trainer, claim_file, runner

EVALUATIONS = {
    "bank-greedy": {"title": "one greedy answer", "benchmark": "bank=bank.jsonl"},
    "bank-sampled": {"title": "4", "benchmark": "bank=bank.jsonl", "samples": 4, "seeds": 1},
}
BANK = {"title": "bank", "column": "evaluated/bank-greedy/accuracy"}
RL_HELPS = {
    "title": "RL helps",
    "arms": {"roc": 1, "sft": -1},
    "metric": "bank",
    "expect": "greater",
    "smallest": 0.02,
}
ARMS: dict[str, dict[str, object]] = {
    "roc": {"title": "r"},
    "grpo": {"title": "g", "set": ["rl.roc.variant=none", "rl.roc.drawn=6"], "seeds": 1},
    "sft": {"title": "no RL", "set": ["rl.stages=[]"], "evaluate": ["bank-greedy"]},
}
WITH_EVALUATIONS = claim_file(
    arithmetic="native",
    seeds=2,
    arms=ARMS,
    evaluations=EVALUATIONS,
    metrics={"bank": BANK},
    primary=[RL_HELPS],
    descriptive=[{"title": "RoC", "arms": {"roc": 1, "grpo": -1}, "metric": "bank"}],
)


@pytest.fixture
def claim(places: Places) -> Claim:
    (places.claims / "two.yaml").write_text(yaml.safe_dump(WITH_EVALUATIONS, sort_keys=False))
    return read_claim(places.claims, "two")


async def test_the_model_of_every_cell_is_evaluated_once(places: Places, claim: Claim) -> None:
    """RL cells after training; the arm without RL with the SFT weights that they start from."""
    trainer, evaluator = Trainer(), Evaluator()
    cells = CellRunner(places, trainer, evaluator, print)
    await cells.run_all(claim)
    names = [f"{cell.arm}/{cell.seed}" for cell in cells_of(claim)]
    assert names == ["roc/0", "grpo/0", "sft/0", "roc/1", "sft/1"]
    assert [kind for kind, _, _ in trainer.done].count("two") == 3, "the arm sft trains nothing"
    assert trainer.arithmetic == {}, "native: the environment is left alone"
    evaluated = [Path(words[2]).relative_to(places.runs).parts[0] for words in evaluator.done]
    assert sorted(evaluated) == ["sft"] * 2 + ["two"] * 5
    sampled = next(words for words in evaluator.done if "--samples" in words)
    assert sampled[sampled.index("--on") + 1] == "bank=bank.jsonl"
    assert sampled[2] == str(places.runs / "two" / "roc-0" / "exports" / "rl")
    assert missing_cells(claim, places) == []
    await cells.run_all(claim)
    assert len(evaluator.done) == 7, "nothing is evaluated twice"


async def test_an_evaluation_records_right_answers_by_problem(places: Places, claim: Claim) -> None:
    await runner(places, Trainer()).run_all(claim)
    result = recorded(places, claim, Cell("two", "roc", 0))
    assert result is not None
    sampled = result.evaluations["bank-sampled"]
    assert sampled.correct == "01234"
    assert sampled.estimate("accuracy").mean == 0.5
    assert sampled.estimate("pass@4").mean == pytest.approx(0.8)
    assert sampled.made["core_seconds"] == 7.0
    metric = claim.metrics["bank"]
    assert value_of(metric, result) == 0.5
    assert value_of(metric, replace(result, evaluations={})) is None


@pytest.mark.parametrize("change", [{"samples": 8}, {"count": 4}])
async def test_an_evaluation_of_other_answers_is_refused(
    places: Places, claim: Claim, change: dict[str, int]
) -> None:
    await runner(places, Trainer()).run_all(claim)
    asked = claim.evaluations["bank-sampled"].model_copy(update=change)
    changed = claim.model_copy(update={"evaluations": {"bank-sampled": asked}})
    with pytest.raises(UserError, match="other settings"):
        recorded(places, changed, Cell("two", "roc", 0))


async def test_what_was_stopped_after_training_is_evaluated(places: Places, claim: Claim) -> None:
    cell = Cell("two", "roc", 0)
    first = CellRunner(places, Trainer(), Evaluator(), print, only=["bank-greedy"])
    await first.complete(claim, cell)
    assert missing_evaluations(claim, places, cell) == ["bank-sampled"]
    second = Trainer()
    await runner(places, second).complete(claim, cell)
    assert missing_evaluations(claim, places, cell) == []
    assert second.done == [], "the cell is not trained again"


class StoppedEvaluator(Evaluator):
    """Is stopped in its second evaluation."""

    async def __call__(
        self, words: Sequence[str], path: Path, environment: Mapping[str, str]
    ) -> float:
        if self.done:
            raise asyncio.CancelledError  # what Ctrl-C becomes in a task
        return await super().__call__(words, path, environment)


async def test_evaluations_of_a_stopped_cell_are_kept(places: Places, claim: Claim) -> None:
    cell = Cell("two", "roc", 0)
    with pytest.raises(asyncio.CancelledError):
        await CellRunner(places, Trainer(), StoppedEvaluator(), print).complete(claim, cell)
    result = recorded(places, claim, cell)
    assert result is not None
    assert list(result.evaluations) == ["bank-greedy"]


async def test_an_evaluation_without_weights_is_explained(places: Places, claim: Claim) -> None:
    """On another machine the result is there, but not the run directory."""
    cell = Cell("two", "roc", 0)
    result = await runner(places, Trainer()).run(claim, cell, places.runs / "elsewhere")
    write_result(places.results, result)
    with pytest.raises(UserError, match="are gone: delete"):
        await runner(places, Trainer()).complete(claim, cell)


async def test_pages_show_what_is_recorded(places: Places, claim: Claim, tmp_path: Path) -> None:
    """The rule applies when every decisive evaluation is recorded."""
    docs = tmp_path / "docs"
    nothing = Judged(claim, {}, judge(claim, {}))
    assert [page.name for page in write_pages(docs, {"two": nothing})] == ["README.md"]
    assert "| t | open (0 of 5 cells) |" in (docs / "README.md").read_text()

    start = await runner(places, Trainer()).run(claim, Cell("two", "sft", 0), tmp_path / "sft")
    trained = await runner(places, Trainer()).run(claim, Cell("two", "roc", 0), tmp_path / "roc")
    half: dict[tuple[str, int], CellResult] = {("sft", 0): start}
    assert curves(claim, half).startswith("<svg"), "an arm without RL has no curves"
    half["roc", 0] = trained
    assert judge(claim, half).word == "open (0 of 5 cells)"
    page = claim_page(Judged(claim, half, judge(claim, half)))
    assert "| `roc/0` | – | – | – |" in page

    await runner(places, Trainer()).run_all(claim)
    whole = {
        (arm, seed): result
        for arm in claim.arms
        for seed in claim.seeds_of(arm)
        if (result := recorded(places, claim, cell_of(claim, arm, seed))) is not None
    }
    assert judge(claim, whole).complete
    page = claim_page(Judged(claim, whole, judge(claim, whole)))
    assert "| `roc/0` | 50.0% (9.5 to 90.5) | 50.0% (20.0 to 80.0) | 80.0% (37.6 to 96.4) |" in page
    assert "| `grpo` | g | `rl.roc.variant=none`, `rl.roc.drawn=6` | 1 of 1 |" in page
    assert "`roc` - `grpo`" in page


async def test_accuracy_between_steps_is_a_curve(places: Places, claim: Claim) -> None:
    trained = await runner(places, Trainer()).run(claim, Cell("two", "roc", 0), places.runs / "r")
    columns = {**trained.numbers.columns, "evaluation/greedy": [0.2, None]}
    heldout: dict[str, dict[str, float | None]] = {
        "sft/greedy": {"accuracy": 0.1},
        "rl/greedy": {"accuracy": 0.3},
    }
    numbers = replace(trained.numbers, columns=columns, heldout=heldout)
    drawn = curves(claim, {("roc", 0): replace(trained, numbers=numbers)})
    assert "Greedy accuracy on 24 held-out problems, by step" in drawn
    assert "Greedy accuracy" not in curves(claim, {("roc", 0): trained})


@pytest.mark.slow
def test_the_command_of_an_evaluation_makes_it(finished: Path, tmp_path: Path) -> None:
    """`rstar2 eval` with the recipe of the cell, in a directory that no run made."""
    recipe = load_recipe(finished / "recipe.yaml").recipe
    model, settings, out = tmp_path / "model", tmp_path / "cell.yaml", tmp_path / "out"
    shutil.copytree(finished / "exports" / "sft", model)
    settings.write_text(dump_recipe(recipe))
    benchmark = f"coins={recipe.evaluation.problems}"
    asked = ClaimEvaluation(title="t", benchmark=benchmark, samples=2, count=5)
    with pytest.raises(SystemExit) as ended:
        main(eval_command(asked, recipe.evaluation, settings, model, out))
    assert ended.value.code in (0, None)
    made = read_evaluated(out, Cell("one", "sft", 0), "coins-sampled", "f", {})
    assert (made.benchmark, made.samples, made.temperature) == ("coins", 2, 1.0)
    assert (made.max_length, made.max_turns) == (128, 3)
    assert len(made.correct) == 5
    assert read_settings(out).tool["wall_s"] == recipe.codeenv.default.wall_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": {"bank": {**BANK, "column": "evaluated/none/accuracy"}}}, "no evaluation"),
        (
            {"metrics": {"bank": {**BANK, "column": "evaluated/bank-sampled/pass@8"}}},
            "'pass@8' is not a figure of bank-sampled: accuracy, pass@1, pass@2, pass@3, pass@4",
        ),
        ({"arms": {**ARMS, "x": {"title": "x", "evaluate": ["y"]}}}, "no eval"),
    ],
)
def test_wrong_evaluations_are_explained(
    places: Places, change: dict[str, object], message: str
) -> None:
    (places.claims / "bad.yaml").write_text(yaml.safe_dump({**WITH_EVALUATIONS, **change}))
    with pytest.raises(UserError, match=message):
        read_claim(places.claims, "bad")

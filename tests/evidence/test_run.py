"""Cells: one SFT run per seed, only what is missing, and a comparison of every digit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rstar2.config import Recipe
from rstar2.errors import UserError
from rstar2.evidence.claim import (
    Cell,
    cell_recipe,
    cells_of,
    claim_names,
    fingerprint,
    read_claim,
    sft_recipe,
)
from rstar2.evidence.results import difference, read_result, result_path, write_result
from rstar2.evidence.run import (
    Places,
    log_of,
    missing_cells,
    parse_cell,
    recorded,
    repeat,
)
from tests.evidence.fakes import Trainer, claim_file, runner

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = Places(ROOT / "experiments", ROOT / "runs" / "evidence")


async def test_all_cells_of_a_seed_share_one_sft_run(places: Places) -> None:
    trainer, said = Trainer(), list[str]()
    claim = read_claim(places.claims, "one")
    await runner(places, trainer, said.append, jobs=2).run_all(claim)
    sft = [seed for kind, _, seed in trainer.done if kind == "sft"]
    assert sorted(sft) == [0, 1], "two SFT seeds, each trained once"
    assert len(trainer.done) == 2 + 8
    assert missing_cells(claim, places) == []
    assert "8 of 8 cells" in said[-1]
    result = recorded(places, claim, Cell("one", "roc", 3))
    assert result is not None
    assert result.numbers.columns["reward"] == [0.6, 0.7]
    assert result.made["core_seconds"] == 12.5
    assert result.made["arithmetic"]["ATEN_CPU_CAPABILITY"] == "avx2"


class TrainerWithLog(Trainer):
    """Writes to its log, and ends once the last whole line of it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = asyncio.Event()

    async def __call__(self, recipe: Recipe, path: Path, environment: Mapping[str, str]) -> float:
        self.shown.clear()
        path.parent.mkdir(parents=True, exist_ok=True)
        log_of(path).write_text("step 1\nstep 2\nste")
        await asyncio.wait_for(self.shown.wait(), 60)
        return await super().__call__(recipe, path, environment)


async def test_the_last_line_of_a_running_cells_log_is_shown_once(places: Places) -> None:
    trainer, said = TrainerWithLog(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if "step" in text:
            trainer.shown.set()

    cells = runner(places, trainer, say)
    cells.progress_s = 0.01
    cell = Cell("one", "roc", 0)
    await cells.complete(read_claim(places.claims, "one"), cell)
    shown = [text for text in said if "step" in text]
    lines = [text.rpartition(": ")[2] for text in shown]
    assert lines == ["step 2", "step 2"], "SFT, then the cell"
    assert shown[1] == f"{cell}: step 2"


async def test_a_replication_has_seeds_of_its_own(places: Places) -> None:
    (places.claims / "two.yaml").write_text(yaml.safe_dump(claim_file(first_seed=10)))
    claim, trainer = read_claim(places.claims, "two"), Trainer()
    await runner(places, trainer).run_all(claim)
    assert sorted(seed for kind, _, seed in trainer.done if kind == "sft") == [10, 11]
    assert {cell.seed for cell in cells_of(claim)} == {10, 11, 12, 13}
    with pytest.raises(UserError, match="seeds 10 to 13"):
        parse_cell(claim, "roc/9")


async def test_stale_cells_that_were_stopped_start_again(places: Places) -> None:
    """Resumed, they would sample some steps with other weights."""
    (places.claims / "two.yaml").write_text(
        yaml.safe_dump(claim_file(set=["rl.staleness=1", "rl.loss.importance_cap=2.0"]))
    )
    claim, trainer = read_claim(places.claims, "two"), Trainer()
    half = places.runs / "two" / "roc-0"
    half.mkdir(parents=True)
    result = await runner(places, trainer).run(claim, Cell("two", "roc", 0), half)
    assert result.numbers.columns["reward"] == [0.6, 0.7]


async def test_only_missing_cells_run(places: Places) -> None:
    claim = read_claim(places.claims, "one")
    await runner(places, Trainer()).run_all(claim)
    result_path(places.results, Cell("one", "roc", 1)).unlink()
    second = Trainer()
    await runner(replace(places, runs=places.runs / "b"), second).run_all(claim)
    assert [kind for kind, _, _ in second.done] == ["sft", "one"]


async def test_a_repeated_cell_is_compared_in_every_digit(places: Places) -> None:
    claim = read_claim(places.claims, "one")
    cell = parse_cell(claim, "roc/1")
    first = await repeat(runner(places, Trainer()), claim, cell)
    write_result(places.results, first)
    kept = read_result(places.results, cell)
    assert kept == first
    same = await repeat(runner(places, Trainer()), claim, cell)
    assert difference(first.numbers, same.numbers) is None
    other = await repeat(runner(places, Trainer(0.5 + 1e-15)), claim, cell)
    found = difference(first.numbers, other.numbers)
    assert found is not None
    assert found.startswith("reward of step 1 is 0.6 against 0.6")


async def test_a_result_of_other_settings_is_refused(places: Places) -> None:
    claim = read_claim(places.claims, "one")
    await runner(places, Trainer()).run_all(claim)
    changed = claim.model_copy(update={"set": ("rl.optimizer.lr=0.1",)})
    with pytest.raises(UserError, match="other settings"):
        missing_cells(changed, places)


def test_arms_of_other_claims_are_not_run_again(places: Places) -> None:
    arms = {"roc": {"title": "r", "same_as": "one/roc"}, "grpo": {"title": "g"}}
    (places.claims / "two.yaml").write_text(yaml.safe_dump(claim_file(arms=arms)))
    two = read_claim(places.claims, "two")
    assert {cell.claim for cell in cells_of(two) if cell.arm == "roc"} == {"one"}
    with pytest.raises(UserError, match="cells of one/roc"):
        parse_cell(two, "roc/0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 1}, "seeds: Input should be greater than or equal to 2"),
        ({"verdict": "yes"}, "verdict: Extra inputs"),
        ({"arms": {"roc": {"title": "r"}}}, "no arm 'grpo'"),
        ({"metrics": {}}, "no metric 'reward'"),
    ],
)
def test_a_wrong_file_is_explained(places: Places, change: dict[str, object], message: str) -> None:
    (places.claims / "bad.yaml").write_text(yaml.safe_dump(claim_file(**change)))
    with pytest.raises(UserError, match=message):
        read_claim(places.claims, "bad")


def test_unknown_names_are_explained(places: Places) -> None:
    with pytest.raises(UserError, match="did you mean one"):
        read_claim(places.claims, "on")
    with pytest.raises(UserError, match="arms are grpo, roc, seeds 0 to 3"):
        parse_cell(read_claim(places.claims, "one"), "ppo/0")


@pytest.mark.parametrize("name", claim_names(REPOSITORY.claims))
def test_every_claim_of_the_repository_can_run(name: str) -> None:
    """Recipes load, and recorded cells have the settings and lengths of the claim."""
    claim = read_claim(REPOSITORY.claims, name)
    for cell in cells_of(claim):
        if cell.seed == claim.first_seed:
            owner = read_claim(REPOSITORY.claims, cell.claim)
            assert cell_recipe(owner, cell).deterministic == (owner.arithmetic == "avx2")
            without = "sft=null" in owner.arms[cell.arm].set
            assert (sft_recipe(owner, cell) is None) == without
    recorded_cells = [recorded(REPOSITORY, claim, cell) for cell in cells_of(claim)]
    assert len(recorded_cells) == sum(len(claim.seeds_of(arm)) for arm in claim.arms)
    lengths = {len(r.numbers.columns["reward"]) for r in recorded_cells if r is not None}
    assert len(lengths - {0}) <= 1


def test_a_fingerprint_is_of_settings(places: Places) -> None:
    claim = read_claim(places.claims, "one")
    roc, grpo = (cell_recipe(claim, Cell("one", arm, 2)) for arm in ("roc", "grpo"))
    assert fingerprint(roc) != fingerprint(grpo)
    first, second = (sft_recipe(claim, Cell("one", arm, 2)) for arm in ("roc", "grpo"))
    assert first is not None
    assert first == second, "arms that differ in RL alone share their SFT run"
    assert first.seed == 0


def test_core_seconds_of_a_command_and_its_status(tmp_path: Path) -> None:
    cost = tmp_path / "cost"
    code = "sum(range(10**6)); raise SystemExit(3)"
    command = [sys.executable, "-m", "rstar2.evidence.timed", str(cost), sys.executable, "-c", code]
    assert subprocess.run(command, timeout=60, check=False).returncode == 3
    assert float(cost.read_text()) >= 0.0

"""The reference pages: up to date, and complete. A real run records no metric that they lack."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from rstar2.config import Recipe, load_recipe
from rstar2.config.load import shipped_recipes
from rstar2.plan import make_plan, parse_cluster
from rstar2.plan.propose import propose
from rstar2.record import read_metrics
from rstar2.record.metric_names import METRICS, describe

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"stage", "step", "time"}
"""What a line of metrics.jsonl has besides metrics."""

NEEDS = {
    "heldout_loss": "100 steps of SFT",
    "rollouts/lost_<failure>": "a lost rollout",
    "staleness/": "rl.staleness, or groups that are used",
    "evaluation/": "evaluation.every",
    "time/evaluate": "evaluation.every",
    "tool_errors/<outcome>": "a failed call",
    "weights/rehearsal_gap": "LoRA",
    "weights/tolerance": "bfloat16",
}
"""Metrics that the miniature run need not record, and why."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("reference_pages")


def test_the_pages_are_up_to_date(script: ModuleType) -> None:
    old = [str(path.relative_to(ROOT)) for path in script.stale()]
    assert old == [], "run python scripts/reference_pages.py"


def test_every_setting_is_described(script: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", script.settings_page(), re.MULTILINE)
    assert len(rows) > 120
    assert [name for name, text in rows if not text] == []


def test_every_recorded_field_is_described(script: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+: .*)` \| (.*) \|$", script.files_page(), re.MULTILINE)
    assert len(rows) > 60
    assert [name for name, text in rows if not text.strip()] == []


def test_the_page_has_every_setting_of_a_recipe(script: ModuleType) -> None:
    page = script.settings_page()
    for section in Recipe.model_fields:
        assert f"## {section}\n" in page or f"| `{section}` |" in page, section
    assert "\n## rl.stages.until.plateau\n" in page


def test_every_command_is_on_the_page(script: ModuleType) -> None:
    page = script.cli_page()
    for name in ("quickstart", "codeenv serve", "data problems", "env check", "plan"):
        assert f" rstar2 {name}\n" in page
    assert "| `--cluster` |" in page


def test_every_shipped_recipe_loads() -> None:
    for name in shipped_recipes():
        load_recipe(name)


@pytest.mark.parametrize("machine", ["8xH100", "8xA100-80"])
def test_the_recipe_for_eight_gpus_fits(machine: str) -> None:
    plan = make_plan(load_recipe("qwen3-4b-8gpu").recipe, parse_cluster(machine))
    assert plan.problems == ()
    assert plan.layout.gpus == 8


def test_every_machine_of_the_page_has_a_recipe_that_fits(script: ModuleType) -> None:
    for machine, (name, _) in script.MACHINES.items():
        cluster = parse_cluster(machine)
        assert make_plan(propose(load_recipe(name).recipe, cluster), cluster).problems == ()


def test_metric_names_are_matched_whole() -> None:
    assert describe("engine/embedded-0/kv_peak") is not None
    assert describe("engine/kv_peak") is not describe("engine/embedded-0/kv_peak")
    assert describe("engine/a/b/kv_peak") is None
    assert describe("rewards") is None


def test_metrics_that_the_source_names_are_described() -> None:
    """Also those that the miniature run does not record."""
    families = "|".join({name.split("/")[0] for group in METRICS.values() for name in group})
    literal = re.compile(rf'"((?:{families})/[a-z0-9_]+)"')
    folders = ("learner", "grpo", "pipeline", "rollout", "problems", "cluster")
    named = {
        name
        for folder in folders
        for path in (ROOT / "src" / "rstar2" / folder).rglob("*.py")
        for name in literal.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert sorted(name for name in named if describe(name) is None) == []


def test_a_run_records_the_metrics_of_the_page(finished: Path) -> None:
    recorded = {name for line in read_metrics(finished) for name in line} - KEYS
    assert sorted(name for name in recorded if describe(name) is None) == []
    table = {name: note for group in METRICS.values() for name, note in group.items()}
    seen = {id(describe(name)) for name in recorded}
    missing = {name for name, note in table.items() if id(note) not in seen}
    assert sorted(name for name in missing if not name.startswith(tuple(NEEDS))) == []

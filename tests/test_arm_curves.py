"""The pages that compare variants of the learner are what their script makes of the numbers."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("arm_curves")


def test_the_pages_follow_from_the_recorded_numbers(script: ModuleType) -> None:
    files = script.rendered()
    assert "bfloat16" in {path.stem for path in files}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run scripts/arm_curves.py"


def test_arms_of_a_page_share_everything_but_what_they_compare(script: ModuleType) -> None:
    for comparison in script.COMPARISONS.values():
        arms = [script.ARMS[name] for name in comparison.arms]
        assert len({(arm.recipe, arm.base) for arm in arms}) == 1
        assert len({arm.set for arm in arms}) == len(arms)
        for arm in arms:
            arm.load()


def test_the_growth_of_a_gap_is_against_what_was_measured_before(script: ModuleType) -> None:
    steps = {"weights/probe_gap": [0.02, 0.06], "weights/tolerance": [0.08, 0.16]}
    recorded = script.Recorded(steps, {}, {})
    assert script.growth(recorded) == pytest.approx(1.5), "0.06 of 0.04, then 0.02 of 0.02"

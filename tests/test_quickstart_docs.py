"""Pictures and texts of the quickstart run in the documentation: not stale, and made from it."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.viewer.nasty import write_evaluated

ROOT = Path(__file__).resolve().parents[1]
PIECES = [
    *("README.md", "docs", "recipes/tiny.yaml", "src/rstar2/viewer/static"),
    *("src/rstar2/report", "src/rstar2/pipeline/progress.py"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("quickstart_docs")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The parts of the checkout that the script looks at."""
    for piece in PIECES:
        target = tmp_path / piece
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / piece).is_dir():
            shutil.copytree(ROOT / piece, target)
        else:
            shutil.copy(ROOT / piece, target)
    return tmp_path


def test_nothing_is_stale(script: ModuleType) -> None:
    """Renew with `python scripts/pictures.py runs/tiny-seed0` after `make quickstart`."""
    assert script.stale() == []


def test_pages_show_pictures_and_texts_of_the_run(script: ModuleType) -> None:
    assert {"live.png", "report.png", "viewer-run-desktop-light.png"} <= script.linked()
    named = {name for page in script.pages() for name, _ in script.BLOCK.findall(page.read_text())}
    assert named == {"table", "kinds", "group", "timeline"}


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("README.md", "99.6% 98–100", "99.9% 98–100", "README.md: the text 'table'"),
        ("docs/viewer.md", "RL steps, longer", "steps, longer", "docs/viewer.md: the text 'kinds'"),
        ("recipes/tiny.yaml", "steps: 640", "steps: 641", "recipes/tiny.yaml has changed"),
        ("src/rstar2/viewer/static/style.css", "#f7f7f5", "#f7f7f6", "viewer: src/rstar2"),
        ("src/rstar2/report/page.css", "#f7f7f5", "#f7f7f6", "report.png: src/rstar2"),
    ],
)
def test_what_is_stale_is_found(
    script: ModuleType, copy: Path, file: str, old: str, new: str, words: str
) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    (found,) = script.stale(copy)
    assert found.startswith(words)


def test_another_picture_is_found(script: ModuleType, copy: Path) -> None:
    shutil.copy(copy / "docs/images/report.png", copy / "docs/images/live.png")
    assert script.stale(copy) == ["docs/images/live.png is not the recorded picture"]


def test_comments_of_the_recipe_may_change(script: ModuleType, copy: Path) -> None:
    with (copy / "recipes/tiny.yaml").open("a") as file:
        file.write("# a comment\n")
    assert script.stale(copy) == []


def test_renewed_pages_are_not_stale(script: ModuleType, copy: Path, tmp_path: Path) -> None:
    run = write_evaluated(tmp_path / "run", {"sft": {"gcd1": [0, 1]}, "stage1": {"gcd1": [1, 1]}})
    table = script.end_table(run)
    assert "stage1" in table
    assert "50.0%" in table
    others = dict.fromkeys(("kinds", "group", "timeline"), "A sentence.\n")
    script.write(run, {"table": table, **others}, copy)
    assert script.stale(copy) == []
    assert "50.0%" in (copy / "README.md").read_text()


def rollout(correct: bool, weight: float, chosen: bool) -> dict[str, Any]:
    return {"correct": correct, "weight": weight, "chosen": chosen}


def test_sentences_by_hand(script: ModuleType) -> None:
    curve = {"stage1": {"metrics": {"accuracy/gcd": [0.0] * 6 + [1.0] * 6, "accuracy/sum": [1.0]}}}
    # means of five steps: 0.4 at step 8, 0.6 at step 9
    text = " ".join(script.slowest_kind(curve, ["stage1"]).split())
    assert "gcd is at or below 50% (mean of 5 steps) for 8 of the 12 RL steps" in text
    group = [rollout(True, 20.0, True), rollout(True, 1.82, False), rollout(False, 1.0, True)]
    text = " ".join(script.resampling({"rollouts": group}).split())
    assert "2 rollouts are correct. The cleanest has weight 20. One had failed calls" in text
    assert "weight 1.82; dropped of these: one." in text
    spans = [[0, 0, 0, 0.0, 9.0], [0, 1, 0, 100.0, 200.0], [0, 2, 0, 2345.0, 3000.0]]
    timeline = {"spans": spans, "trajectories": ["s/1/0/0", "s/1/1/0", "s/1/2/0"]}
    metrics = {"groups/drawn": 3, "groups/refilled": 1, "groups/dropped": 1}
    text = " ".join(script.first_step(timeline, metrics).split())
    assert "the first 2 groups start at once, and from second 2.3 on other groups replace" in text

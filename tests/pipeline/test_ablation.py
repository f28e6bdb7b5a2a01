"""The ablation: recipes differ in resampling alone, and figures are taken within seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rstar2.config import Recipe
from rstar2.errors import RecipeError
from rstar2.pipeline.ablation import (
    VARIANTS,
    AblationRun,
    ablate,
    last_quarter,
    over_seeds,
    recipe_of,
    summary,
    to_json,
)
from rstar2.pipeline.ablation_report import plot, table


def run(variant: str, seed: int, accuracy: float, drawn: int = 16) -> AblationRun:
    return AblationRun(
        variant=variant,
        seed=seed,
        steps=(1, 2, 3, 4),
        drawn=tuple(float(drawn * i) for i in (1, 2, 3, 4)),
        kept=(8.0, 16.0, 24.0, 32.0),
        reward=(0.1, 0.2, 0.3, accuracy),
        failing=(0.2, None, 0.1, 0.05),
        tool_errors=(0.3, 0.3, 0.2, 0.1),
        length=(100.0, 90.0, 80.0, 70.0),
        checkpoints=(0, 4),
        greedy=(0.2, accuracy),
        sampled=(0.1, accuracy - 0.1),
        heldout_failing=(None, 0.04),
    )


def test_variants_differ_in_resampling_alone() -> None:
    recipes = {v: recipe_of(v, 5, 40) for v in VARIANTS}
    base = recipes["roc"]
    for variant, recipe in recipes.items():
        assert recipe.seed == 5
        same = recipe.model_copy(
            update={"name": base.name, "rl": recipe.rl.model_copy(update={"roc": base.rl.roc})}
        )
        assert same == base, variant
        assert recipe.rl.roc.kept == base.rl.roc.kept
    assert len({r.rl.roc.model_dump_json() for r in recipes.values()}) == len(VARIANTS)
    assert recipes["grpo"].rl.roc.drawn == recipes["grpo"].rl.roc.kept


def test_steps_are_cut_into_parts_that_add_up() -> None:
    assert [s.steps for s in recipe_of("roc", 0, 10).rl.stages] == [2, 3, 2, 3]
    with pytest.raises(RecipeError, match="at least 4"):
        recipe_of("roc", 0, 3)


def test_interval_over_seeds_is_students() -> None:
    estimate = over_seeds([0.8, 0.9, 1.0])
    assert estimate.mean == pytest.approx(0.9)
    # sd 0.1, three seeds: 4.303 * 0.1 / sqrt(3)
    assert estimate.high - estimate.mean == pytest.approx(0.24843, abs=1e-4)
    assert math.isnan(over_seeds([0.5]).low)


def test_differences_are_taken_within_seeds() -> None:
    runs = [run("grpo", s, a, 8) for s, a in enumerate((0.5, 0.7, 0.9))]
    runs += [run("roc", s, a) for s, a in enumerate((0.6, 0.8, 1.0))]
    rows = summary(runs)
    difference = rows["grpo"]["held-out greedy"]["minus roc"]
    assert difference.mean == pytest.approx(-0.1)
    assert difference.high - difference.low == pytest.approx(0.0, abs=1e-9)
    assert "minus roc" not in rows["roc"]["held-out greedy"]
    assert rows["grpo"]["rollouts drawn"]["mean"].mean == 32
    assert last_quarter((None, 0.1, None, 0.05)) == 0.05


def test_table_plot_and_json_hold_every_variant() -> None:
    runs = [run(v, s, 0.8 + s / 10) for v in ("grpo", "roc") for s in (0, 1)]
    text = table(runs)
    assert "| grpo | 85.0% [" in text
    assert "Difference to `roc` within seeds" in text
    picture = ElementTree.fromstring(plot(runs))
    assert picture.tag.endswith("svg")
    assert len(json.loads(to_json(runs))["runs"]) == 4
    assert "85.0%" not in table([run("roc", 0, 0.8)]), "one seed has no interval"


async def test_every_variant_starts_from_the_same_policy(tmp_path: Path) -> None:
    done: list[tuple[str, str, bool]] = []

    async def execute(recipe: Recipe, path: Path) -> None:
        done.append((path.name, recipe.model.path, recipe.sft is None))

    await ablate(
        tmp_path, variants=("grpo", "roc"), seeds=(0, 1), steps=8, execute=execute, overrides=()
    )
    policy = {s: str(tmp_path / f"sft-seed{s}" / "exports" / "sft") for s in (0, 1)}
    assert sorted(done) == sorted(
        run
        for seed in (0, 1)
        for run in (
            (f"sft-seed{seed}", "tiny", False),
            (f"grpo-seed{seed}", policy[seed], True),
            (f"roc-seed{seed}", policy[seed], True),
        )
    )
    for seed in (0, 1):
        names = [name for name, _, _ in done]
        assert names.index(f"sft-seed{seed}") < names.index(f"grpo-seed{seed}")
    with pytest.raises(RecipeError, match="known are"):
        await ablate(tmp_path, variants=("ppo",), seeds=(0,), steps=8, execute=execute)

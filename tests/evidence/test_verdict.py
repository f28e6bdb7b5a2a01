"""Verdicts from synthetic cells: a planted effect is found, a null is not, gaps stay open."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rstar2.evidence.claim import Claim, ClaimMetric, metric_of
from rstar2.evidence.page import Judged, claim_page, curves, index_page
from rstar2.evidence.results import (
    COLUMNS,
    CellNumbers,
    CellResult,
    Repetition,
    read_repetitions,
    write_repetition,
)
from rstar2.evidence.verdict import contrast_values, judge

SEEDS = 12
CLAIM = Claim.model_validate(
    {
        "name": "planted",
        "title": "A planted effect",
        "question": "Is it found?",
        "why": "The effect is known.",
        "seeds": SEEDS,
        "sft_seeds": 4,
        "arms": {
            "grpo": {"title": "GRPO"},
            "again": {"title": "GRPO with other seeds", "seed_offset": 1000},
            "roc": {"title": "RoC", "set": ["rl.roc.variant=roc"]},
        },
        "metrics": {
            "errors": {"title": "tool errors", "column": "failing_calls_in_correct", "first": 2},
            "length": {"title": "length", "column": "response_length", "share": False},
        },
        "primary": [
            {
                "title": "RoC has fewer tool errors",
                "arms": {"roc": 1, "grpo": -1},
                "metric": "errors",
                "expect": "less",
                "smallest": 0.02,
            },
            {
                "title": "RoC is shorter",
                "arms": {"roc": 1, "grpo": -1},
                "metric": "length",
                "expect": "less",
                "smallest": 5,
            },
        ],
        "controls": [{"title": "null", "arms": {"grpo": 1, "again": -1}, "metric": "errors"}],
        "power": {"effect": 0.05, "sd": 0.04, "source": "made up"},
        "budget_core_minutes": 10,
    }
)


def cell(arm: str, seed: int, errors: list[float | None], length: float) -> CellResult:
    columns: dict[str, list[float | None]] = {name: [0.5] * len(errors) for name in COLUMNS}
    columns |= {"failing_calls_in_correct": errors, "response_length": [length] * len(errors)}
    heldout: dict[str, dict[str, float | None]] = {"rl/sampled": {"accuracy": 0.6}}
    made = {"core_seconds": 36.0, "cpu": "a CPU", "torch": "2", "commit": None}
    return CellResult("planted", arm, seed, "r", "s", CellNumbers(columns, heldout), made)


def cells(effect: float, bias: float = 0.0) -> dict[tuple[str, int], CellResult]:
    """Noisy curves whose seeds differ much; RoC's errors are `effect` higher."""
    rng = random.Random(4)
    out = {}
    for seed in range(SEEDS):
        level = rng.uniform(0.2, 0.5)
        for arm, shift in (("grpo", 0.0), ("again", bias), ("roc", effect)):
            errors: list[float | None] = [9.0]  # the first step is not part of the metric
            errors += [level + shift + rng.gauss(0, 0.05) for _ in range(10)]
            out[arm, seed] = cell(arm, seed, errors, 90.0 + rng.gauss(0, 2))
    return out


def test_a_planted_effect_is_found_and_a_null_is_not() -> None:
    verdict = judge(CLAIM, cells(-0.05))
    errors, length = verdict.primary
    assert errors.word == "confirmed"
    assert errors.test.low < -0.05 < errors.test.high
    assert length.word == "refuted", "no difference of 5 tokens is left"
    assert verdict.word == "mixed: 1 confirmed, 1 refuted"
    assert verdict.sentence == "Confirmed: RoC has fewer tool errors. Refuted: RoC is shorter."
    assert verdict.controls[0].adjusted_p > 0.05


def test_without_an_effect_the_claim_is_refuted() -> None:
    verdict = judge(CLAIM, cells(0.0))
    assert [f.word for f in verdict.primary] == ["refuted", "refuted"]


def test_an_effect_of_the_other_sign_refutes() -> None:
    assert judge(CLAIM, cells(0.1)).primary[0].word == "refuted"


def test_missing_cells_keep_a_claim_open() -> None:
    some = cells(-0.2)
    del some["roc", 3]
    verdict = judge(CLAIM, some)
    assert verdict.word == "open (35 of 36 cells)"
    assert verdict.primary[0].word is None
    assert verdict.primary[0].test.count == SEEDS - 1, "whole pairs only"


def test_a_control_that_shows_a_difference_keeps_a_claim_open() -> None:
    verdict = judge(CLAIM, cells(-0.2, bias=0.2))
    assert verdict.word == "open (control failed)"
    assert "null" in verdict.sentence


@pytest.mark.parametrize(("effect", "word"), [(-0.05, "mixed"), (0.0, "open (planted effect")])
def test_a_planted_effect_that_is_not_found_keeps_a_claim_open(effect: float, word: str) -> None:
    claim = CLAIM.model_copy(update={"planted": CLAIM.primary[:1]})
    made = cells(effect)
    verdict = judge(claim, made)
    assert verdict.word.startswith(word)
    assert "## Planted effects" in claim_page(Judged(claim, made, verdict))


def test_values_are_within_seeds_and_without_missing_steps() -> None:
    pair = {
        ("roc", 0): cell("roc", 0, [0.9, 0.1, None, 0.3], 80),
        ("grpo", 0): cell("grpo", 0, [0.9, 0.4, 0.4, 0.4], 90),
        ("roc", 1): cell("roc", 1, [0.9, None, None, None], 80),
        ("grpo", 1): cell("grpo", 1, [0.9, 0.4, 0.4, 0.4], 90),
    }
    assert contrast_values(CLAIM, CLAIM.primary[0], pair) == pytest.approx([0.2 - 0.4])
    assert contrast_values(CLAIM, CLAIM.primary[1], pair) == pytest.approx([-10, -10])


def test_a_metric_of_the_last_evaluation() -> None:
    metric = ClaimMetric(title="held-out accuracy", column="heldout/accuracy")
    heldout: dict[str, dict[str, float | None]] = {
        "sft/sampled": {"accuracy": 0.2},
        "rl/sampled": {"accuracy": 0.6},
        "rl/greedy": {"accuracy": 0.9},
    }
    assert metric_of(metric, {}, heldout) == 0.6
    assert metric_of(metric, {}, {}) is None


def test_the_page_says_what_the_verdict_says() -> None:
    made = cells(-0.05)
    verdict = judge(CLAIM, made)
    repeated = [Repetition("roc/3", True, "abc1234", "a CPU", "2.9")]
    judged = Judged(CLAIM, made, verdict, repeated)
    page = claim_page(judged)
    assert f"**Verdict: mixed: 1 confirmed, 1 refuted.** {verdict.sentence}" in page
    assert "0.36 core-hours for 36 cells" in page
    assert "RL seed + 1000" in page
    assert ElementTree.fromstring(curves(CLAIM, made)).tag.endswith("svg")
    assert "| `roc/3` | yes | abc1234 | a CPU, torch 2.9 |" in page
    index = index_page({"planted": judged})
    assert "| mixed: 1 confirmed, 1 refuted | 36 of 36 | 0.36 | `roc/3` |" in index
    empty = judge(CLAIM, {})
    assert "open (0 of 36 cells)" in claim_page(Judged(CLAIM, {}, empty))


def test_the_page_says_what_pairs_share() -> None:
    made = cells(-0.05)
    verdict = judge(CLAIM, made)
    same = "Arms of a seed start from the same one and see the same problems; `again` with"
    assert same in claim_page(Judged(CLAIM, made, verdict))
    other = {k: replace(v, sft="other") if k[0] == "roc" else v for k, v in made.items()}
    assert "start from SFT checkpoints of their own" in claim_page(Judged(CLAIM, other, verdict))


def test_a_failed_control_is_said_at_every_contrast() -> None:
    made = cells(-0.2, bias=0.2)
    page = claim_page(Judged(CLAIM, made, judge(CLAIM, made)))
    assert page.count("| open: a control failed |") == len(CLAIM.primary)
    assert "not yet" not in page


def test_repetitions_are_recorded_once_per_cell(tmp_path: Path) -> None:
    result = replace(cells(0.0)["roc", 3], made={"commit": "a", "cpu": "b", "torch": "c"})
    (tmp_path / result.claim).mkdir()
    assert read_repetitions(tmp_path, result.claim) == []
    write_repetition(tmp_path, result, equal=False)
    write_repetition(tmp_path, result, equal=True)
    assert read_repetitions(tmp_path, result.claim) == [Repetition("roc/3", True, "a", "b", "c")]

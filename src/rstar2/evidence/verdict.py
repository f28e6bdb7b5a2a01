"""From recorded cells to a verdict: contrasts by seed, corrected tests, one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rstar2.evidence.claim import (
    EVALUATED,
    Claim,
    ClaimMetric,
    Contrast,
    PrimaryContrast,
    evaluated_column,
    metric_of,
)
from rstar2.evidence.results import CellResult
from rstar2.evidence.statistics import ContrastTest, Word, combine, decide, holm, t_test

Recorded = Mapping[tuple[str, int], CellResult]
"""The cells of a claim by (arm, seed)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One contrast: its test, and for a primary contrast what it decides."""

    contrast: Contrast
    test: ContrastTest
    adjusted_p: float
    word: Word | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the recorded cells say about a claim."""

    word: str
    """confirmed, refuted, open or mixed; or open with the number of cells."""
    sentence: str
    primary: tuple[Finding, ...]
    controls: tuple[Finding, ...]
    planted: tuple[Finding, ...]
    cells: int
    total: int

    @property
    def complete(self) -> bool:
        return self.cells == self.total


def value_of(metric: ClaimMetric, result: CellResult) -> float | None:
    """A metric of a cell; None if it is not measured, or not yet."""
    if metric.column.startswith(EVALUATED):
        name, figure = evaluated_column(metric.column)
        evaluation = result.evaluations.get(name)
        return None if evaluation is None else evaluation.estimate(figure).mean
    return metric_of(metric, result.numbers.columns, result.numbers.heldout)


def contrast_values(claim: Claim, contrast: Contrast, cells: Recorded) -> list[float]:
    """One value per seed that has all arms of the contrast."""
    metric = claim.metrics[contrast.metric]
    values = []
    for seed in claim.all_seeds:
        parts = [
            (weight, value_of(metric, cells[arm, seed]))
            for arm, weight in contrast.arms.items()
            if (arm, seed) in cells
        ]
        if len(parts) == len(contrast.arms) and all(value is not None for _, value in parts):
            values.append(sum(weight * value for weight, value in parts if value is not None))
    return values


def is_complete(claim: Claim, arm: str, seed: int, result: CellResult) -> bool:
    """Whether a cell has the evaluations that the verdict depends on."""
    decisive = (*claim.primary, *claim.controls, *claim.planted)
    columns = {claim.metrics[contrast.metric].column for contrast in decisive}
    names = {evaluated_column(c)[0] for c in columns if c.startswith(EVALUATED)}
    return all(n in result.evaluations for n in names if n in claim.evaluations_of(arm, seed))


def judge(claim: Claim, cells: Recorded) -> Verdict:
    """Apply the claim's own rule."""
    total = sum(len(claim.seeds_of(arm)) for arm in claim.arms)
    done = sum(is_complete(claim, arm, seed, result) for (arm, seed), result in cells.items())
    primary = _tests(claim, claim.primary, cells)
    controls = _tests(claim, claim.controls, cells)
    planted = tuple(_decided(claim, f) for f in _tests(claim, claim.planted, cells))
    checks = (controls, planted)
    if done < total:
        word = f"open ({done} of {total} cells)"
        sentence = f"Open: {done} of {total} cells are recorded, so the rule does not apply yet."
        return Verdict(word, sentence, primary, *checks, done, total)
    if failed := [c for c in controls if c.adjusted_p < claim.alpha]:
        names = "; ".join(c.contrast.title for c in failed)
        sentence = f"Open: a control that must show nothing shows a difference ({names})."
        return Verdict("open (control failed)", sentence, primary, *checks, done, total)
    if missed := [f.contrast.title for f in planted if f.word != "confirmed"]:
        sentence = f"Open: an effect that must be there was not found ({'; '.join(missed)})."
        return Verdict("open (planted effect not found)", sentence, primary, *checks, done, total)
    decided = tuple(_decided(claim, finding) for finding in primary)
    words = [finding.word for finding in decided if finding.word is not None]
    sentence = " ".join(_sentences(decided))
    return Verdict(combine(words), sentence, decided, *checks, done, total)


def _tests(claim: Claim, contrasts: Sequence[Contrast], cells: Recorded) -> tuple[Finding, ...]:
    tests = [t_test(contrast_values(claim, c, cells), claim.alpha) for c in contrasts]
    adjusted = holm([test.p if test.count > 1 else 1.0 for test in tests])
    return tuple(map(Finding, contrasts, tests, adjusted))


def _decided(claim: Claim, finding: Finding) -> Finding:
    contrast = finding.contrast
    assert isinstance(contrast, PrimaryContrast)
    if finding.test.count < 2:
        return Finding(contrast, finding.test, finding.adjusted_p, "open")
    word = decide(finding.test, finding.adjusted_p, contrast.expect, contrast.smallest, claim.alpha)
    return Finding(contrast, finding.test, finding.adjusted_p, word)


def _sentences(findings: Sequence[Finding]) -> list[str]:
    words: tuple[Word, ...] = ("confirmed", "refuted", "open")
    grouped = {w: [f.contrast.title for f in findings if f.word == w] for w in words}
    return [f"{word.capitalize()}: {'; '.join(names)}." for word, names in grouped.items() if names]

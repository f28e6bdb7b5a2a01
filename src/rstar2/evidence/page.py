"""The page of a claim and the index of all claims, generated from the recorded cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rstar2.evidence.claim import (
    HELDOUT,
    Cell,
    Claim,
    ClaimMetric,
    Contrast,
    PrimaryContrast,
    cell_recipe,
)
from rstar2.evidence.evaluation_page import evaluation_tables, heldout_series
from rstar2.evidence.results import CellResult, Repetition
from rstar2.evidence.statistics import ContrastTest, power, t_test
from rstar2.evidence.verdict import Finding, Recorded, Verdict, contrast_values, value_of
from rstar2.report.chart_sheet import COLOURS, chart_sheet
from rstar2.report.svg import Series, line_chart, number, percent

CHARTS = {
    "reward": "Reward of the rollouts (accuracy), by step",
    "failing_calls_in_correct": "Tool-error rate in correct rollouts, by step",
    "response_length": "Response length in tokens, by step",
    "entropy": "Entropy of sampled tokens, by step",
}
FIGURES = {
    "roc": "accuracy, tool errors in correct rollouts, length and entropy over steps, RoC and GRPO",
    "curriculum": "lengths by stage, with short rollouts first and without",
}
"""Claims whose curves are figures of the paper."""
SHARES = ("reward", "failing_calls_in_correct")
SMOOTH = 3


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim, its recorded cells, what they say, and which of them were repeated."""

    claim: Claim
    cells: Recorded
    verdict: Verdict
    repetitions: Sequence[Repetition] = ()


def claim_page(judged: Judged) -> str:
    """The page of one claim, as Markdown."""
    claim, cells, verdict = judged.claim, judged.cells, judged.verdict
    parts = [
        f"# {claim.title}",
        f"**Verdict: {verdict.word}.** {verdict.sentence}",
        f"{claim.question.strip()}\n\n{claim.why.strip()}",
        _commands(claim),
        "## Arms",
        _arms(claim, cells),
        "## Primary contrasts",
        _primary(claim, verdict),
    ]
    if claim.controls:
        parts += ["## Controls", _controls(claim, verdict)]
    if claim.planted:
        parts += ["## Planted effects", _expected(claim, verdict.planted)]
    parts += ["## Means", _means(claim, cells), "## Other metrics", _other(claim, cells)]
    if claim.evaluations:
        parts += ["## Evaluations", evaluation_tables(claim, cells)]
    if cells:
        parts += ["## Curves", f"![Curves of all arms]({claim.name}.svg)"]
    parts += ["## Rule", _rule(claim, verdict), "## Cost", _cost(claim, cells)]
    if judged.repetitions:
        parts += ["## Repeated cells", _repeated(judged.repetitions)]
    if claim.limits:
        parts += ["## Limits", claim.limits.strip()]
    if claim.after_runs:
        parts += ["## Noticed after the runs", claim.after_runs.strip()]
    return "\n\n".join(parts) + "\n"


def index_page(claims: Mapping[str, Judged]) -> str:
    """The list of all claims with their verdicts."""
    contrasts = sum(len(judged.claim.primary) for judged in claims.values())
    lines = [
        "# Evidence",
        "",
        "Each claim is a file in `experiments/`, committed before its runs. It fixes the arms, the "
        "seeds, the metrics, the contrasts and the smallest effects that matter. The rule of the "
        "verdict is one for all claims (`evidence/statistics.py`). `rstar2 reproduce CLAIM` runs "
        "the missing cells (one run each: an arm with a seed) and writes its page. `rstar2 "
        "reproduce CLAIM --cell ARM/SEED` runs one cell, or resumes it. If it is recorded, it is "
        "repeated and every number compared, unless the claim's arithmetic is `native`. The "
        "numbers of all cells are in `experiments/results/`, and `rstar2 reproduce --pages` writes "
        "these pages from them.",
        "",
        "| claim | verdict | cells | core-hours | repeated alone, equal in every digit |",
        "|---|---|---|---|---|",
    ]
    for name, judged in claims.items():
        verdict, title = judged.verdict, judged.claim.title
        page = f"[{title}]({name}.md)" if judged.cells else title
        hours = core_hours(judged.claim, judged.cells)
        again = ", ".join(f"`{r.cell}`" for r in judged.repetitions if r.equal) or "–"
        lines.append(
            f"| {page} | {verdict.word} | {verdict.cells} of {verdict.total} | {hours:.2f} "
            f"| {again} |"
        )
    lines += ["", "## The paper's figures", "", *_figures(claims)]
    lines += [
        "",
        "## Limits",
        "",
        "Runs of the recipe `evidence/base` are at level 2 of the embedded task with a model of "
        "half a million parameters. A verdict holds for its task and model. It says nothing about "
        "larger models.",
        "",
        f"Holm's correction is within a claim. All claims together have {contrasts} primary "
        "contrasts, and several share cells (`same_as`), which were known when the later claim "
        "was written. Seeds of one SFT checkpoint count as independent, so a verdict holds for "
        "these checkpoints.",
        "",
        "The rule was changed once after results were known: a metric that is equal in every seed "
        "is open (commit d067e8e). By the first rule the n-gram penalty of `failed-attempts` was "
        "refuted.",
        "",
    ]
    return "\n".join(lines)


def _figures(claims: Mapping[str, Judged]) -> list[str]:
    """Where the curves that the paper shows are, from recorded cells."""
    lines = ["| figure | page | cells |", "|---|---|---|"]
    for name, figure in FIGURES.items():
        if name in claims:
            verdict, page = claims[name].verdict, f"[{claims[name].claim.title}]({name}.md)"
            lines.append(f"| {figure} | {page} | {verdict.cells} of {verdict.total} |")
    return [
        *lines,
        "",
        "[Entropy by class of token](entropy.md) is measured with the weights of the cells, "
        "because cells keep no rollouts.",
    ]


# --------------------------------------------------------------------------- parts


def _commands(claim: Claim) -> str:
    arm = next((name for name, a in claim.arms.items() if a.same_as is None), None)
    lines = [f"rstar2 reproduce {claim.name}            # run what is missing, write this page"]
    if arm is not None:
        cell = f"{arm}/{claim.first_seed}"
        exact = claim.arithmetic == "avx2"
        what = "repeat one cell, compare it" if exact else "run or resume one cell"
        lines.append(f"rstar2 reproduce {claim.name} --cell {cell}   # {what}")
    long = "hours" if claim.budget_core_minutes > 180 else "up to an hour"
    return f"<!-- not run: takes {long} -->\n```bash\n" + "\n".join(lines) + "\n```"


def _arms(claim: Claim, cells: Recorded) -> str:
    lines = ["| arm | what it does | settings | cells |", "|---|---|---|---|"]
    for name, arm in claim.arms.items():
        settings = ", ".join(f"`{text}`" for text in arm.set)
        if arm.same_as:
            settings = f"cells of `{arm.same_as}`"
        elif arm.seed_offset:
            settings += f"{', ' if settings else ''}RL seed + {arm.seed_offset}"
        done = sum(1 for owner, _ in cells if owner == name)
        planned = len(claim.seeds_of(name))
        lines.append(f"| `{name}` | {arm.title} | {settings} | {done} of {planned} |")
    common = ", ".join(f"`{text}`" for text in claim.set)
    return "\n".join(lines) + (
        f"\n\nAll arms: recipe `{claim.recipe}`{', ' + common if common else ''}. The seeds "
        f"take turns with {claim.sft_seeds} SFT checkpoints. {_shared(claim, cells)}"
    )


def _shared(claim: Claim, cells: Recorded) -> str:
    """What the arms of a seed have in common."""
    starts = {seed: {r.sft for (_, s), r in cells.items() if s == seed} for _, seed in cells}
    different = [name for name, arm in claim.arms.items() if arm.seed_offset]
    text = (
        "Arms of a seed start from the same one and see the same problems"
        if all(len(sft) == 1 for sft in starts.values())
        else "Arms of a seed see the same problems, but start from SFT checkpoints of their own "
        "where their SFT differs, so pairs share less"
    )
    if different:
        text += f"; `{'`, `'.join(different)}` with another RL seed sees other problems"
    return f"{text}."


def _primary(claim: Claim, verdict: Verdict) -> str:
    note = "" if verdict.complete else "\n\nInterim figures: the rule applies to all cells only."
    undecided = "open: a control failed" if verdict.complete else "not yet"
    return _expected(claim, verdict.primary, undecided) + note


def _expected(claim: Claim, findings: Sequence[Finding], undecided: str = "not yet") -> str:
    lines = [
        "| contrast, within seeds | metric | expected | mean | 95% interval | p (Holm) | seeds | "
        "verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for finding in findings:
        contrast = finding.contrast
        assert isinstance(contrast, PrimaryContrast)
        metric = claim.metrics[contrast.metric]
        lines.append(
            f"| {contrast.title}: {_weights(contrast)} | {metric.title} | {contrast.expect} than 0 "
            f"| {_test_cells(finding, metric)} | {_word(finding, undecided)} |"
        )
    return "\n".join(lines)


def _word(finding: Finding, undecided: str) -> str:
    if finding.test.count > 1 and finding.test.mean == finding.test.sd == 0.0:
        return "open: this metric is equal in every seed"
    return finding.word or undecided


def _controls(claim: Claim, verdict: Verdict) -> str:
    lines = [
        "| control, must show nothing | metric | mean | 95% interval | p (Holm) | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for finding in verdict.controls:
        metric = claim.metrics[finding.contrast.metric]
        weights = _weights(finding.contrast)
        lines.append(
            f"| {finding.contrast.title}: {weights} | {metric.title} | "
            f"{_test_cells(finding, metric)} |"
        )
    return "\n".join(lines)


def _means(claim: Claim, cells: Recorded) -> str:
    metrics = list(claim.metrics.values())
    lines = [
        "Mean over seeds with its 95% interval (Student's t).",
        "",
        "| arm | "
        + " | ".join(m.title for m in metrics)
        + f" | rollouts drawn | held-out sampled, {_heldout_count(claim)} problems |",
        "|---|" + "---|" * (len(metrics) + 2),
    ]
    for arm in claim.arms:
        mine = [result for (name, _), result in sorted(cells.items()) if name == arm]
        row = []
        for metric in metrics:
            values = [value_of(metric, result) for result in mine]
            row.append(_estimate(t_test([v for v in values if v is not None]), metric))
        row.append(_plain([sum(v or 0 for v in r.numbers.columns["rollouts/drawn"]) for r in mine]))
        row.append(_heldout_cell(mine))
        lines.append(f"| `{arm}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _other(claim: Claim, cells: Recorded) -> str:
    """Every two-arm contrast for every metric: descriptive, without correction."""
    shown = (*claim.primary, *claim.controls, *claim.descriptive)
    contrasts = [c for c in shown if len(c.arms) >= 2]
    distinct = {_weights(c): c for c in contrasts}
    metrics = list(claim.metrics.items())
    lines = [
        "Differences within seeds with uncorrected 95% intervals, for description only.",
        "",
        "| contrast | " + " | ".join(m.title for _, m in metrics) + " |",
        "|---|" + "---|" * len(metrics),
    ]
    for weights, contrast in distinct.items():
        row = []
        for name, metric in metrics:
            same = Contrast(title=contrast.title, arms=contrast.arms, metric=name)
            row.append(_estimate(t_test(contrast_values(claim, same, cells)), metric, signed=True))
        lines.append(f"| {weights} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _repeated(repetitions: Sequence[Repetition]) -> str:
    lines = ["| cell | every number equal | commit | machine |", "|---|---|---|---|"]
    for r in repetitions:
        equal = "yes" if r.equal else "**no**"
        lines.append(f"| `{r.cell}` | {equal} | {r.commit} | {r.cpu}, torch {r.torch} |")
    return "Run again alone, on a clean clone:\n\n" + "\n".join(lines)


def _rule(claim: Claim, verdict: Verdict) -> str:
    plan = claim.power
    tests = len(claim.primary)
    chance = power(plan.effect, plan.sd, claim.seeds, claim.alpha / tests)
    smallest = "; ".join(
        f"{c.title}: {_value(c.smallest, claim.metrics[c.metric])}" for c in claim.primary
    )
    return (
        "Each contrast has one value per seed and is tested against 0 with Student's t, two-sided. "
        f"The p-values of the {tests} primary contrasts are corrected by Holm's method at "
        f"{claim.alpha:g}. *Confirmed*: significant, with the expected sign. *Refuted*: "
        "significant with the other sign, or the 95% interval, which is not corrected for the "
        f"number of contrasts, excludes the smallest effect that matters ({smallest}). *Open*: "
        "anything else, a metric that is equal in every seed, or a control that shows a "
        "difference.\n\n"
        f"Planned power: an effect of {plan.effect:g} with a standard deviation of {plan.sd:g} "
        f"over seeds ({plan.source}) is found with probability {chance:.2f} by {claim.seeds} seeds."
        + _observed_power(claim, verdict)
    )


def _observed_power(claim: Claim, verdict: Verdict) -> str:
    """What the observed spread over seeds would have allowed to find."""
    lines = [
        "\n\nWith the observed standard deviations, and the strictest of Holm's levels:\n",
        "| contrast | observed sd | chance to find its smallest effect that matters |",
        "|---|---|---|",
    ]
    level = claim.alpha / len(claim.primary)
    for finding in verdict.primary:
        contrast, test = finding.contrast, finding.test
        assert isinstance(contrast, PrimaryContrast)
        if test.count > 1 and test.sd > 0:
            chance = power(contrast.smallest, test.sd, test.count, level)
            sd = _value(test.sd, claim.metrics[contrast.metric])
            smallest = _value(contrast.smallest, claim.metrics[contrast.metric])
            lines.append(f"| {contrast.title} | {sd} | {chance:.2f} ({smallest}) |")
    return "\n".join(lines) if len(lines) > 3 else ""


def _cost(claim: Claim, cells: Recorded) -> str:
    own = [r for r in cells.values() if r.claim == claim.name]
    text = (
        f"{core_hours(claim, cells):.2f} core-hours for {len(own)} cells of this claim, without "
        f"SFT (planned: {claim.budget_core_minutes / 60:.2f})."
    )
    evaluated = [float(e.made["core_seconds"]) for r in own for e in r.evaluations.values()]
    if evaluated:
        text += f" {sum(evaluated) / 3600:.2f} for {len(evaluated)} evaluations."
    machines = sorted({f"{r.made['cpu']}, torch {r.made['torch']}" for r in own})
    if machines:
        kernels = "AVX2 kernels, one thread" if claim.arithmetic == "avx2" else "its own kernels"
        text += f" {'; '.join(machines)}; {kernels}."
    return text


def core_hours(claim: Claim, cells: Recorded) -> float:
    """What the claim's own cells cost."""
    own = [r for r in cells.values() if r.claim == claim.name]
    return sum(float(r.made["core_seconds"]) for r in own) / 3600


def _weights(contrast: Contrast) -> str:
    terms = []
    for arm, weight in contrast.arms.items():
        sign = "-" if weight < 0 else "+"
        size = "" if abs(weight) == 1 else f"{abs(weight):g} "
        terms.append(f"{sign} {size}`{arm}`")
    return " ".join(terms).removeprefix("+ ")


def _test_cells(finding: Finding, metric: ClaimMetric) -> str:
    test = finding.test
    if test.count < 2:
        return f"– | – | – | {test.count}"
    low, high = (_value(v, metric, signed=True) for v in (test.low, test.high))
    p = "< .001" if finding.adjusted_p < 0.001 else f"{finding.adjusted_p:.3f}"
    return f"{_value(test.mean, metric, signed=True)} | {low} to {high} | {p} | {test.count}"


def _estimate(test: ContrastTest, metric: ClaimMetric, *, signed: bool = False) -> str:
    if not test.count:
        return "–"
    mean = _value(test.mean, metric, signed=signed)
    if math.isnan(test.low):
        return mean
    low, high = (_value(v, metric, signed=signed) for v in (test.low, test.high))
    return f"{mean} ({low} to {high})"


def _value(value: float, metric: ClaimMetric, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if metric.share:
        return f"{100 * value:{sign}.1f}%"
    return f"{value:{sign}.1f}" if abs(value) >= 10 else f"{value:{sign}.3g}"


def _plain(values: Sequence[float]) -> str:
    return f"{fmean(values):,.0f}" if values else "–"


def _heldout_cell(results: Sequence[CellResult]) -> str:
    metric = ClaimMetric(title="held-out accuracy", column=f"{HELDOUT}accuracy")
    values = [value_of(metric, result) for result in results]
    return _estimate(t_test([v for v in values if v is not None]), metric)


def _heldout_count(claim: Claim) -> int:
    own = next(name for name, arm in claim.arms.items() if arm.same_as is None)
    return cell_recipe(claim, Cell(claim.name, own, claim.first_seed)).evaluation.count


# --------------------------------------------------------------------------- curves


def curves(claim: Claim, cells: Recorded) -> str:
    """Accuracy, tool errors, length and entropy of every arm by step, as one SVG."""
    charts = {
        title: line_chart(
            _series(claim, cells, column),
            title=title,
            y_format=percent if column in SHARES else number,
        )
        for column, title in CHARTS.items()
    }
    if heldout := heldout_series(claim, cells):
        title = f"Greedy accuracy on {_heldout_count(claim)} held-out problems, by step"
        charts |= {title: line_chart(heldout, title=title, y_format=percent)}
    return chart_sheet(charts, list(claim.arms))


def _series(claim: Claim, cells: Recorded, column: str) -> list[Series]:
    """Mean over seeds per step, smoothed, of every arm."""
    out = []
    for index, arm in enumerate(claim.arms):
        mine = [r.numbers.columns[column] for (name, _), r in sorted(cells.items()) if name == arm]
        steps = range(max((len(values) for values in mine), default=0))
        if not steps:
            continue
        known = [[v[i] for v in mine if i < len(v)] for i in steps]
        means = [_mean(values) for values in known]
        out.append(Series(arm, [i + 1 for i in steps], means, index % len(COLOURS), smooth=SMOOTH))
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def write_pages(folder: Path, claims: Mapping[str, Judged]) -> list[Path]:
    """Write the page and curves of each claim that has cells, and the index of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "README.md"]
    for name, judged in claims.items():
        if judged.cells:
            page = folder / f"{name}.md"
            page.write_text(claim_page(judged))
            written.append(page)
            (folder / f"{name}.svg").write_text(curves(judged.claim, judged.cells))
    written[0].write_text(index_page(claims))
    return written

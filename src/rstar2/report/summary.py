"""What a report needs of a run directory: stages in order, curves by stage, evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2.record import (
    is_finished,
    read_environment,
    read_evaluations,
    read_events,
    read_metrics,
    read_recipe,
)
from rstar2.record.read import busy_seconds, rl_stage_names, stage_label
from rstar2.types import Evaluation

BASE = "base"
"""The model before SFT."""


def percent(value: float) -> str:
    """0.956 -> 95.6%; what is no share, such as a reward of 2.5, is shown as a number."""
    if not 0.0 <= value <= 1.0:
        return f"{value:.3g}"
    text = f"{100 * value:.1f}"
    return f"{text.removesuffix('.0')}%"


@dataclass(frozen=True, slots=True)
class StageCurve:
    """The recorded steps of one stage; `offset` is the number of RL steps before it."""

    name: str
    steps: tuple[dict[str, Any], ...]
    offset: int = 0

    @property
    def last(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def x(self) -> list[float]:
        return [self.offset + step["step"] for step in self.steps]

    def y(self, metric: str) -> list[float | None]:
        return [step.get(metric) for step in self.steps]

    def total(self, metric: str) -> float:
        return sum(step.get(metric) or 0.0 for step in self.steps)


@dataclass(frozen=True, slots=True)
class Summary:
    """All that the table and the page show, except trajectories."""

    path: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    sft: StageCurve | None
    stages: tuple[StageCurve, ...]
    evaluations: dict[tuple[str, str], Evaluation]
    """By (stage, mode), in the order of the stages."""
    events: tuple[dict[str, Any], ...]
    finished: bool

    @property
    def evaluated(self) -> list[str]:
        """Stages with an evaluation, in order."""
        return list(dict.fromkeys(stage for stage, _ in self.evaluations))

    @property
    def modes(self) -> list[str]:
        """Modes of evaluation that were used, greedy first."""
        return sorted({mode for _, mode in self.evaluations})

    def first_and_last(self, mode: str) -> tuple[Evaluation, Evaluation] | None:
        """The first and the last evaluation (before and after RL); None if there are not two."""
        evaluations = [e for (s, m), e in self.evaluations.items() if m == mode and s != BASE]
        return (evaluations[0], evaluations[-1]) if len(evaluations) > 1 else None

    def label(self, stage: str) -> str:
        """The name of an evaluated stage for people."""
        return stage_label(self.recipe, stage)

    def accuracy_curve(self, mode: str) -> tuple[list[float], list[float | None]]:
        """RL steps and accuracies: before RL (0), during it, and after each stage."""
        points: dict[float, float | None] = {}
        if ("sft", mode) in self.evaluations:
            points[0.0] = self.evaluations["sft", mode].accuracy.mean
        for stage in self.stages:
            for x, y in zip(stage.x(), stage.y(f"evaluation/{mode}"), strict=True):
                if y is not None:
                    points[x] = y
            if (stage.name, mode) in self.evaluations:
                end = float(stage.offset + stage.last)
                points[end] = self.evaluations[stage.name, mode].accuracy.mean
        return list(points), list(points.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds of the problems that were evaluated."""
        return list(dict.fromkeys(k for e in self.evaluations.values() for k in e.kinds))

    @property
    def busy_s(self) -> float:
        """Seconds of all recorded steps and evaluations, without pauses between runs."""
        curves = [*self.stages, *([self.sft] if self.sft else [])]
        return busy_seconds(
            (step for curve in curves for step in curve.steps),
            ((e.stage, e.wall_s) for e in self.evaluations.values()),
        )


def summarise(run: Path) -> Summary:
    """Read a run directory, finished or not."""
    recipe = read_recipe(run)
    metrics = read_metrics(run)
    names = rl_stage_names(recipe)
    curves, offset = [], 0
    for name in names:
        curve = StageCurve(name, tuple(m for m in metrics if m["stage"] == name), offset)
        if curve.steps:
            curves.append(curve)
            offset += curve.last
    sft = StageCurve("sft", tuple(m for m in metrics if m["stage"] == "sft"))
    return Summary(
        path=run,
        recipe=recipe,
        environment=read_environment(run),
        sft=sft if sft.steps else None,
        stages=tuple(curves),
        evaluations=_in_order(read_evaluations(run), [BASE, "sft", *names]),
        events=tuple(read_events(run)),
        finished=is_finished(run),
    )


def _in_order(
    evaluations: Sequence[Evaluation], names: Sequence[str]
) -> dict[tuple[str, str], Evaluation]:
    known = [e for e in evaluations if e.stage in names]
    known.sort(key=lambda e: (names.index(e.stage), e.mode))
    return {(e.stage, e.mode): e for e in known}


def duration(seconds: float) -> str:
    """Seconds as text: 48 s, 6 min 12 s, 3 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

"""A run's figures as JSON values for the page: summary, curves by stage, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rstar2.record import evaluation_stage, stage_order
from rstar2.record.read import busy_seconds, stage_label
from rstar2.viewer.run import ViewedRun

MOST_POINTS = 1200
"""The most points of a curve that are sent; longer curves are thinned out."""
MOST_EVENTS = 60
_HEAD = ("stage", "step", "time")


def head(run: ViewedRun) -> dict[str, Any]:
    """The summary of a run that lists of runs show."""
    if run.trouble:
        return {
            "name": run.name, "path": str(run.path), "status": "unreadable",
            "trouble": run.trouble, "version": 0,
        }  # fmt: skip
    rl = [m for m in run.metrics.values if m.get("stage") in run.stage_names]
    times = [m["time"] for m in run.metrics.values if _number(m.get("time"))]
    model = run.recipe.get("model") or {}
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "trouble": "",
        "version": run.version,
        "progress": run.progress,
        "unreadable": run.unreadable,
        "recipe": run.recipe.get("name"),
        "seed": run.recipe.get("seed"),
        "model": model.get("path"),
        "variant": ((run.recipe.get("rl") or {}).get("roc") or {}).get("variant"),
        "rl_steps": len(rl),
        "rl_steps_planned": sum(
            int(s.get("steps") or 0) for s in (run.recipe.get("rl") or {}).get("stages") or []
        ),
        "now": _now(run),
        "reward": _last(rl, "reward"),
        "failing": _last(rl, "failing_calls_in_correct"),
        "length": _last(rl, "response_length"),
        "busy_s": busy_seconds(
            run.metrics.values, ((e["stage"], e.get("wall_s")) for e in evaluations(run))
        ),
        "updated": max(times, default=None),
        "evaluations": [_evaluation(e, run.recipe) for e in evaluations(run)],
        "rollouts": run.catalog.rollout_count(),
    }


def overview(run: ViewedRun) -> dict[str, Any]:
    """All data of the page of one run except its curves."""
    about = head(run)
    if run.trouble:
        return about
    return about | {
        "stages": stages(run),
        "events": run.events.values[-MOST_EVENTS:],
        "environment": _facts(run.environment),
        "settings": run.recipe,
    }


def stages(run: ViewedRun) -> list[dict[str, Any]]:
    """The recorded stages in the order of the run, with the number of RL steps before each."""
    recorded = []
    offset = 0
    kinds = {"sft": "sft", **dict.fromkeys(run.stage_names, "rl")}
    for stage in stage_order(run.stage_names):
        steps = [int(m["step"]) for m in run.metrics.values if m.get("stage") == stage]
        has_groups = run.catalog.number_of(stage) is not None
        if not steps and not has_groups:
            continue
        kind = kinds.get(stage) or ("filter" if stage.startswith("filter-") else "evaluation")
        groups, rollouts = run.catalog.counts(stage)
        recorded.append(
            {
                "name": stage,
                "kind": kind,
                "offset": offset if kind == "rl" else 0,
                "steps": max(steps, default=0),
                "recorded": run.catalog.steps(stage),
                "groups": groups,
                "rollouts": rollouts,
            }
        )
        if kind == "rl":
            offset += max(steps, default=0)
    return recorded


def curves(run: ViewedRun) -> dict[str, Any]:
    """All metrics as columns by stage: {stage: {"step": [...], "metrics": {name: [...]}}}."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for line in run.metrics.values:
        by_stage.setdefault(str(line.get("stage")), []).append(line)
    columns = {}
    for stage, lines in by_stage.items():
        thinned = _thin(lines)
        names = dict.fromkeys(name for line in thinned for name in line if name not in _HEAD)
        columns[stage] = {
            "step": [line.get("step") for line in thinned],
            "time": [line.get("time") for line in thinned],
            "metrics": {name: [_finite(line.get(name)) for line in thinned] for name in names},
        }
    return {"version": run.version, "stages": columns}


def step_metrics(run: ViewedRun, stage: str, step: int) -> dict[str, Any]:
    """The recorded metrics of one step."""
    for line in run.metrics.values:
        if line.get("stage") == stage and line.get("step") == step:
            return {name: _finite(value) for name, value in line.items() if name not in _HEAD}
    return {}


# --------------------------------------------------------------------------- parts


def evaluations(run: ViewedRun) -> list[dict[str, Any]]:
    """In the order of stages, the last one for each stage and mode."""
    order = ["base", "sft", *run.stage_names]
    known = {
        (e.get("stage"), e.get("mode")): e
        for e in run.evaluations.values
        if e.get("stage") in order and isinstance(e.get("accuracy"), dict)
    }
    return sorted(known.values(), key=lambda e: (order.index(e["stage"]), str(e.get("mode"))))


def _evaluation(evaluation: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    kinds = evaluation.get("kinds") or {}
    return {
        "stage": stage_label(recipe, str(evaluation["stage"])),
        **{
            name: evaluation.get(name)
            for name in ("step", "mode", "accuracy", "failing_calls_in_correct")
        },
        **{
            name: evaluation.get(name)
            for name in ("tool_errors", "mean_length", "mean_turns", "truncated", "wall_s")
        },
        "kinds": kinds,
        "rollouts": evaluation_stage(str(evaluation["stage"]), str(evaluation.get("mode"))),
    }


def _now(run: ViewedRun) -> dict[str, Any] | None:
    """The last step on record."""
    if not run.metrics.values:
        return None
    line = run.metrics.values[-1]
    return {"stage": line.get("stage"), "step": line.get("step")}


def _last(lines: list[dict[str, Any]], name: str, window: int = 5) -> float | None:
    """Mean of the last values of a metric: the value of a single step is noisy."""
    values = [m[name] for m in lines[-window:] if _number(m.get(name))]
    return sum(values) / len(values) if values else None


def _thin(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th line and the last one."""
    stride = math.ceil(len(lines) / MOST_POINTS) or 1
    kept = lines[::stride]
    if lines and kept[-1] is not lines[-1]:
        kept.append(lines[-1])
    return kept


def _facts(about: dict[str, Any]) -> dict[str, Any]:
    packages = about.get("packages") or {}
    wanted: Iterable[tuple[str, Any]] = (
        ("rstar2", about.get("rstar2")),
        ("commit", str(about.get("commit") or "")[:12]),
        ("python", about.get("python")),
        *((name, packages.get(name)) for name in ("torch", "transformers", "vllm")),
        ("processor", about.get("cpu")),
        ("cores", about.get("cores")),
        ("memory", f"{about.get('memory_gb')} GB" if about.get("memory_gb") else None),
        ("GPU", about.get("gpu")),
        ("command", " ".join(map(str, about.get("command") or []))),
    )
    return {name: value for name, value in wanted if value not in (None, "")}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _finite(value: Any) -> Any:
    """None instead of NaN and infinity, which JSON does not have; the curve has a gap there."""
    return value if not isinstance(value, float) or math.isfinite(value) else None

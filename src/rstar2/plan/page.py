"""A plan as text, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields

from rstar2.plan.estimate import BESIDE, WRITE_HINT, MemoryFit, Plan
from rstar2.plan.workload import Assumptions

WIDTH = 80


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    """Lines of at most 80 columns; all but the first are indented by two more spaces."""
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def render(plan: Plan, others: dict[str, float], measured_gb: float | None = None) -> str:
    """Render a plan; `others` are the total seconds under changed assumptions, by change.

    `measured_gb` is the memory of a learner rank on fake GPUs, if it was measured.
    """
    memory = _memory(plan, measured_gb)
    return "\n".join([*_head(plan), *memory, *_steps(plan), *_total(plan, others)]) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    cluster, layout = plan.cluster, plan.layout
    where = "sharing GPUs" if layout.colocated else "on separate GPUs"
    yield f"{plan.recipe}: {plan.model}, {plan.shape.parameters / 1e9:.2f}B parameters"
    yield from _wrapped(
        f"on {cluster.gpus} x {cluster.gpu.name} ({cluster.nodes} node(s), {cluster.cores} cores): "
        f"{layout.engines} engine(s) of {layout.tensor_parallel} GPU(s), {layout.ranks} learner "
        f"rank(s), {where}"
    )
    yield ""
    for problem in plan.problems:
        yield from _wrapped(f"PROBLEM: {problem}")
    unused = cluster.gpus - layout.gpus
    if unused > 0:
        yield from _wrapped(
            f"note: the recipe uses {layout.gpus} of {cluster.gpus} GPUs; {WRITE_HINT} for all "
            "of them"
        )
    if plan.problems or unused > 0:
        yield ""


def _memory(plan: Plan, measured_gb: float | None) -> Iterator[str]:
    yield "memory per GPU, GB"
    for name, fit in (("generating", plan.engine), ("learning", plan.learner)):
        yield f"  {name:<12} {fit.total:7.1f} of {fit.limit:.1f}"
        yield from _wrapped(_parts(fit), "    ")
    if measured_gb is not None:
        formula = plan.learner.total - plan.learner.parts.get(BESIDE, 0.0)
        yield from _wrapped(
            f"a rank alone: {measured_gb:.1f} by its own step on fake GPUs, {formula:.1f} by the "
            f"formula ({formula / measured_gb - 1:+.0%})",
            "  ",
        )
    yield f"  each engine's KV cache holds {plan.kv_tokens:,} tokens"
    if plan.layout.colocated and plan.engine.fits:
        share = max(0.05, plan.engine_share - 0.005)
        what = "gives back" if "weights of the learner" in plan.engine.parts else "keeps"
        yield f"  an engine {what} its memory while the learner works; it gets {share:.2f}"
        yield "    of the GPU (engine.gpu_memory_share)"
    yield (
        f"  disk: up to {plan.checkpoints} checkpoints of {plan.checkpoint_gb:,.1f} GB "
        "(record.keep_checkpoints)"
    )
    if plan.rollouts_gb >= 0.05:
        yield f"    and rollouts of {plan.rollouts_gb:,.1f} GB in total (record.trajectories)"
    yield ""


def _parts(fit: MemoryFit) -> str:
    return ", ".join(f"{what} {size:.1f}" for what, size in fit.parts.items())


def _steps(plan: Plan) -> Iterator[str]:
    yield "seconds per step   steps  generate   tools   learn    sync   = step"
    for stage in plan.stages:
        yield (
            f"  {stage.load.name:<16} {stage.load.steps:5d} {stage.generate_s:9.0f} "
            f"{stage.tools_s:7.1f} {stage.learn_s:7.0f} {stage.sync_s:7.1f} {stage.step_s:8.0f}"
        )
    parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in plan.weights_s.items())
    if "write" in plan.weights_s:
        parts += f" (engine.weight_transfer = nccl: {plan.nccl_s:.1f} and fixed)"
    yield from _wrapped(f"sync, a weight update: {parts}", "  ")
    yield ""
    yield "rollouts         per step  length  held/engine  tok/s/engine  calls/s  cores"
    for stage in plan.stages:
        load = stage.load
        yield (
            f"  {load.name:<14} {load.drawn:9,d} {load.mean_completion:7,.0f} "
            f"{stage.rollouts_held:12d} {stage.tokens_per_s:13,.0f} {stage.calls_per_s:8.0f} "
            f"{stage.cores_needed:6.1f}"
        )
    yield ""


def _total(plan: Plan, others: dict[str, float]) -> Iterator[str]:
    steps = sum(stage.load.steps for stage in plan.stages)
    rows = (
        (f"RL, {steps} steps", plan.rl_s),
        ("SFT", plan.sft_s),
        ("difficulty filter", plan.filter_s),
        ("evaluation", plan.evaluation_s),
        ("total", plan.total_s),
    )
    yield "run time and cost"
    for name, seconds in rows:
        yield f"  {name:<20} {_duration(seconds):>12}"
    rate = f"{plan.cluster.dollars_per_hour:,.2f} $ per hour"
    yield f"  {'cost':<20} {plan.dollars:>10,.0f} $  ({rate})"
    yield ""
    yield "total time if"
    for what, seconds in others.items():
        yield f"  {what:<60} {_duration(seconds):>12}"
    yield ""
    yield "assumptions (change one with --assume NAME=VALUE)"
    for field in fields(Assumptions):
        yield f"  {field.name:<20} {getattr(plan.assume, field.name):g}"
    yield f"  {'train_mfu':<20} {plan.cluster.gpu.train_mfu:g} (from the GPU table)"


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"

"""`rstar2 plan`: estimates memory, time and cost of a recipe on a cluster of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rstar2.cli.waiting import waiting
from rstar2.config import Recipe, load_recipe
from rstar2.errors import UserError
from rstar2.extras import need
from rstar2.files import write_file
from rstar2.model_config import ModelShape
from rstar2.plan import Assumptions, Cluster, Plan, make_plan, parse_cluster
from rstar2.plan.propose import propose, recipe_text, source_name
from rstar2.types import encode


def plan(
    recipe: Annotated[
        str, typer.Argument(help="A recipe: a YAML file, or the name of a shipped recipe.")
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="GPUs as COUNTxNAME (64xMI300X) or NODESxCOUNTxNAME (8x8xH200)."
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="Override a setting. Can be repeated."
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume", "-a", metavar="NAME=VALUE", help="Change an assumption. Can be repeated."
        ),
    ] = None,
    cores: Annotated[int, typer.Option(min=0, help="CPU cores per node; 0 means 12 per GPU.")] = 0,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of one GPU in dollars per hour.")
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Estimate generation with the rollout simulator."),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure-memory",
            help="Also run the learner's step on fake GPUs and show the memory that it needs "
            "(seconds to minutes; needs PyTorch, no GPU).",
        ),
    ] = False,
    write_recipe: Annotated[
        Path | None,
        typer.Option(
            "--write-recipe",
            metavar="FILE",
            help="Choose the fastest layout that fits the cluster, write it as a recipe, and plan "
            "that.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Estimate memory, step time by part, total time and cost of a recipe on a cluster.

    The exit code is 1 if the recipe does not fit the cluster.
    """
    from rstar2.plan.page import render

    loaded = load_recipe(recipe, set_ or ()).recipe
    machines = parse_cluster(cluster, cores_per_node=cores, price=price)
    assumed = Assumptions.with_changes(_pairs(assume or []))
    if write_recipe is not None:
        if set_:
            raise UserError("--write-recipe with --set: put the settings into a recipe file first")
        with waiting("comparing layouts"):
            loaded = propose(loaded, machines, assumed)
        chosen = make_plan(loaded, machines, assumed)
        write_file(write_recipe, recipe_text(source_name(recipe), chosen, loaded))
        typer.echo(f"written: {write_recipe}", err=True)
    with waiting("simulating generation" if simulate else "planning", after_s=0.3):
        estimate = make_plan(loaded, machines, assumed, simulated=simulate)
    measured_gb = _measured_gb(loaded, estimate.shape) if measure else None
    if as_json:
        typer.echo(encode(_body(estimate, measured_gb)).decode())
    else:
        others = {
            change: make_plan(loaded, *variant).total_s
            for change, variant in _variants(machines, assumed).items()
        }
        typer.echo(render(estimate, others, measured_gb), nl=False)
    raise typer.Exit(1 if estimate.problems else 0)


def _body(estimate: Plan, measured_gb: float | None) -> dict[str, object]:
    """The plan as JSON."""
    return {
        "plan": estimate,
        "step_s": {s.load.name: s.step_s for s in estimate.stages},
        "total_s": estimate.total_s,
        "dollars": estimate.dollars,
        **({} if measured_gb is None else {"measured_learner_gb": measured_gb}),
    }


def _measured_gb(recipe: Recipe, shape: ModelShape) -> float:
    """Memory of a learner rank at the peak of its step, by fake GPUs."""
    need("torch", "transformers", feature="--measure-memory")
    if recipe.learner.lora is not None:
        need("peft", feature="--measure-memory with learner.lora")
    with waiting("running the learner's step on fake GPUs"):
        from rstar2.learner.measure import measure_memory

        return measure_memory(shape, recipe.learner).peak


def _variants(machines: Cluster, assume: Assumptions) -> dict[str, tuple[Cluster, Assumptions]]:
    """The assumptions with the largest effect on a plan, changed one at a time."""
    slower = replace(machines.gpu, train_mfu=machines.gpu.train_mfu / 2)
    longer = replace(
        assume,
        first_length=min(0.9, 1.5 * assume.first_length),
        middle_length=min(0.9, 1.5 * assume.middle_length),
        last_length=min(0.9, 1.5 * assume.last_length),
    )
    return {
        "training reaches half of the assumed FLOPs": (replace(machines, gpu=slower), assume),
        "decoding reaches half of the assumed bandwidth": (
            machines,
            replace(assume, decode_bandwidth=assume.decode_bandwidth / 2),
        ),
        "both": (
            replace(machines, gpu=slower),
            replace(assume, decode_bandwidth=assume.decode_bandwidth / 2),
        ),
        "rollouts are 50% longer (at most 0.9 of the limit)": (machines, longer),
        "the learner's state is in host memory during generation": (
            machines,
            replace(assume, host_state=1),
        ),
        "no groups are drawn again": (machines, replace(assume, extra_groups=0.0)),
    }


def _pairs(options: list[str]) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        try:
            pairs[name] = float(value)
        except ValueError:
            raise UserError(f"--assume {option}: write NAME=NUMBER") from None
        if not equals:
            raise UserError(f"--assume {option}: write NAME=NUMBER")
    return pairs

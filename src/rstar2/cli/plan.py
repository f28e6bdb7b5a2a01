"""`rstar2 plan`: does a recipe fit a cluster, how long would it take, and what would it cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from rstar2.config import load_recipe
from rstar2.errors import UserError
from rstar2.plan import Assumptions, Cluster, make_plan, parse_cluster
from rstar2.types import encode


def plan(
    recipe: Annotated[
        str, typer.Argument(help="a recipe: a YAML file or the name of a shipped one")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", help="GPUs: 64xMI300X, 8xH100, 1x4090, or nodes: 8x8xH200")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="override a setting (repeatable)"),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option("--assume", "-a", metavar="NAME=VALUE", help="change an assumption"),
    ] = None,
    cores: Annotated[int, typer.Option(help="CPU cores of a node [12 for each GPU]")] = 0,
    price: Annotated[float | None, typer.Option(help="dollars an hour for one GPU")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="generation by the simulator, with the real scheduler"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Say before paying for GPUs: does it fit, step time by part, total time and cost.

    Exit code 1 if the recipe would not work on that cluster as it is.
    """
    from rstar2.plan.page import render

    loaded = load_recipe(recipe, set_ or ()).recipe
    machines = parse_cluster(cluster, cores_per_node=cores, price=price)
    assumed = Assumptions.with_changes(_pairs(assume or []))
    made = make_plan(loaded, machines, assumed, simulated=simulate)
    if as_json:
        body = {
            "plan": made,
            "step_s": {s.load.name: s.step_s for s in made.stages},
            "total_s": made.total_s,
            "dollars": made.dollars,
        }
        typer.echo(encode(body).decode())
    else:
        others = {
            what: make_plan(loaded, *changed).total_s
            for what, changed in _instead(machines, assumed).items()
        }
        typer.echo(render(made, others), nl=False)
    raise typer.Exit(1 if made.problems else 0)


def _instead(machines: Cluster, assume: Assumptions) -> dict[str, tuple[Cluster, Assumptions]]:
    """The assumptions that carry a plan, changed one at a time."""
    slower = replace(machines.gpu, train_mfu=machines.gpu.train_mfu / 2)
    longer = replace(
        assume,
        first_length=min(0.9, 1.5 * assume.first_length),
        middle_length=min(0.9, 1.5 * assume.middle_length),
        last_length=min(0.9, 1.5 * assume.last_length),
    )
    return {
        "training reaches half of the assumed arithmetic": (replace(machines, gpu=slower), assume),
        "decoding reaches half of the assumed bandwidth": (
            machines,
            replace(assume, decode_bandwidth=assume.decode_bandwidth / 2),
        ),
        "both": (
            replace(machines, gpu=slower),
            replace(assume, decode_bandwidth=assume.decode_bandwidth / 2),
        ),
        "rollouts are half as long again (at most 0.9 of the limit)": (machines, longer),
        "the learner's state is on the host while engines generate": (
            machines,
            replace(assume, host_state=1),
        ),
        "no group has to be drawn again": (machines, replace(assume, extra_groups=0.0)),
    }


def _pairs(words: list[str]) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            pairs[name] = float(value)
        except ValueError:
            raise UserError(f"--assume {word}: write NAME=NUMBER") from None
        if not equals:
            raise UserError(f"--assume {word}: write NAME=NUMBER")
    return pairs

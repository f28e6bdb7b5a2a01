"""What a recipe needs and how long it takes on named GPUs, before any is paid for.

    recipe -> workload (tokens, calls) ─┐
    GPU table -> roofline ──────────────┴─> memory fit, step time by part, total time and cost

No torch, no I/O besides reading a model's configuration; every number that is not in the recipe or
in the data sheet of a GPU is an `Assumption` and is printed with the plan.
"""

from rstar2.model_config import ModelShape, find_shape
from rstar2.plan.estimate import Plan, make_plan
from rstar2.plan.hardware import GPUS, Cluster, parse_cluster
from rstar2.plan.workload import Assumptions

__all__ = [
    "GPUS",
    "Assumptions",
    "Cluster",
    "ModelShape",
    "Plan",
    "find_shape",
    "make_plan",
    "parse_cluster",
]

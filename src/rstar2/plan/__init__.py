"""Estimates memory, time and cost of a recipe on a cluster of GPUs.

    recipe -> workload (tokens, calls) ─┐
    GPU table -> roofline ──────────────┴─> memory fit, step time by phase, total time, cost

No torch, and no I/O except to read a model's configuration. Every number that is neither in the
recipe nor in a GPU's data sheet is a field of `Assumptions` and is printed with the plan.
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

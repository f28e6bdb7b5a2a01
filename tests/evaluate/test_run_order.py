"""Groups of an evaluation are recorded in the order of its problems, whenever they end."""

from __future__ import annotations

from rstar2.evaluate.run import in_order
from rstar2.types import Group, Problem


def group(index: int) -> Group:
    problem = Problem(id=f"p{index}", prompt="", answer="")
    return Group(id=f"g{index}", problem=problem, step=0, trajectories=())


def test_groups_that_end_early_wait_for_those_before_them() -> None:
    received: list[str] = []
    on_group = in_order(lambda ended: received.append(ended.id))
    on_group(2, group(2))
    on_group(0, group(0))
    assert received == ["g0"]
    on_group(1, group(1))
    on_group(3, group(3))
    assert received == ["g0", "g1", "g2", "g3"]

"""Placement: no resource is assigned twice, engines are spread, ranks with GPUs are packed."""

from __future__ import annotations

import random

import pytest

from rstar2.cluster.placement import (
    Ledger,
    Need,
    Node,
    check_room,
    engine_need,
    rank_need,
)
from rstar2.config import ClusterConfig, EngineConfig, LearnerConfig, Recipe
from rstar2.errors import InvariantError, RecipeError


def recipe(engines: int, ranks: int, **cluster: object) -> Recipe:
    return Recipe(
        name="r",
        engine=EngineConfig(count=engines),
        learner=LearnerConfig(ranks=ranks),
        cluster=ClusterConfig.model_validate(cluster),
    )


def nodes(count: int, cpus: float = 4, gpus: int = 0) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", cpus, gpus) for i in range(count)]


def test_engines_are_spread_over_nodes() -> None:
    ledger = Ledger(nodes(2))
    places = [ledger.take(Need(f"e{i}", 1)) for i in range(4)]
    assert [p.node.id for p in places if p] == ["n0", "n1", "n0", "n1"]


def test_ranks_with_gpus_fill_a_node_before_the_next() -> None:
    made, ledger = recipe(2, 4), Ledger(nodes(2, cpus=16, gpus=4))
    places = [ledger.take(rank_need(made, r, gpus=True)) for r in range(4)]
    assert {p.node.id for p in places if p} == {"n0"}
    assert sorted(g for p in places if p for g in p.gpus) == [0, 1, 2, 3]


@pytest.mark.parametrize(("colocate", "room"), [(True, 4), (False, 2)])
def test_colocated_parts_share_gpus_and_others_do_not(colocate: bool, room: int) -> None:
    made = recipe(4, 2, colocate=colocate)
    ledger = Ledger(nodes(1, cpus=16, gpus=4))
    for rank in range(2):
        assert ledger.take(rank_need(made, rank, gpus=True)) is not None
    places = [ledger.take(engine_need(made, i, gpus=True)) for i in range(4)]
    assert sum(place is not None for place in places) == room


def test_the_parts_of_a_lost_node_can_be_placed_elsewhere() -> None:
    ledger = Ledger(nodes(2, cpus=2))
    needs = [Need(f"p{i}", 1) for i in range(4)]
    for need in needs:
        ledger.take(need)
    assert ledger.take(Need("p4", 1)) is None
    lost = ledger.leave("n1")
    assert sorted(lost) == ["p1", "p3"]
    assert ledger.leave("n1") == ()
    assert ledger.take(needs[1]) is None, "the other node is full"
    ledger.join(Node("n2", "10.0.0.9", 2))
    place = ledger.take(needs[1])
    assert place is not None
    assert place.node.id == "n2"
    with pytest.raises(InvariantError, match="already"):
        ledger.take(needs[1])
    ledger.release("p1")
    ledger.release("p1")
    assert ledger.place_of("p1") is None


def test_no_resource_is_assigned_twice() -> None:
    rng = random.Random(0)
    ledger = Ledger(nodes(3, cpus=4, gpus=4))
    held: dict[str, tuple[str, tuple[int, ...]]] = {}
    for turn in range(2000):
        name = f"p{rng.randrange(20)}"
        if name in held:
            ledger.release(name)
            del held[name]
        elif (
            place := ledger.take(Need(name, 1, rng.randrange(3), pack=turn % 2 == 0))
        ) is not None:
            held[name] = (place.node.id, place.gpus)
        if turn % 97 == 0 and len(ledger.nodes) == 3:
            for part in ledger.leave("n2"):
                del held[part]
        elif turn % 97 == 40 and len(ledger.nodes) == 2:
            ledger.join(Node("n2", "10.0.0.2", 4, 4))
        for node in ledger.nodes:
            here = [gpus for where, gpus in held.values() if where == node.id]
            numbers = [g for gpus in here for g in gpus]
            assert len(here) <= 4
            assert len(numbers) == len(set(numbers))


def test_a_recipe_without_room_is_refused_by_name() -> None:
    check_room(recipe(2, 2), nodes(2, cpus=2))
    with pytest.raises(RecipeError, match=r"room for 2 of learner\.ranks = 3"):
        check_room(recipe(1, 3), nodes(1, cpus=2))
    with pytest.raises(RecipeError, match=r"room for 0 of engine\.count = 1"):
        check_room(recipe(1, 2), nodes(1, cpus=2))

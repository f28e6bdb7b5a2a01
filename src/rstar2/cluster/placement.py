"""Assigns engines and learner ranks to nodes, with a ledger of CPUs and GPUs. Pure, no Ray.

Invariants
- Resources taken on a node never exceed what it has; a part has one place until it is released.
- A GPU number is assigned once per *book*. With colocation, engines and learner ranks have separate
  books, so that they share GPUs and take turns; otherwise they share one book.
- Parts are spread: the node with the largest free share first. Learner ranks with GPUs are packed:
  the fullest node first, so that most of their traffic stays inside nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rstar2.config import Recipe
from rstar2.errors import InvariantError, RecipeError


@dataclass(frozen=True, slots=True)
class Node:
    """Resources of one machine."""

    id: str
    address: str
    cpus: float
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that one part needs."""

    name: str
    cpus: float
    gpus: int = 0
    book: str = "gpu"
    pack: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The node that a part runs on, and the GPUs assigned to it."""

    node: Node
    gpus: tuple[int, ...] = ()


@dataclass(slots=True)
class _NodeState:
    """A node and the parts placed on it."""

    node: Node
    parts: dict[str, tuple[Need, Place]] = field(default_factory=dict)

    @property
    def free_cpus(self) -> float:
        return self.node.cpus - sum(need.cpus for need, _ in self.parts.values())

    def free_gpus(self, book: str) -> list[int]:
        taken = {n for need, place in self.parts.values() if need.book == book for n in place.gpus}
        return [number for number in range(self.node.gpus) if number not in taken]


class Ledger:
    """Nodes and the parts on them."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes: dict[str, _NodeState] = {}
        for node in nodes:
            self.join(node)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(state.node for state in self._nodes.values())

    def join(self, node: Node) -> None:
        """Add a node."""
        if node.id in self._nodes:
            raise InvariantError(f"node {node.id} joined twice")
        self._nodes[node.id] = _NodeState(node)

    def leave(self, node_id: str) -> tuple[str, ...]:
        """Remove a lost node; returns the parts that were on it. Idempotent."""
        state = self._nodes.pop(node_id, None)
        return () if state is None else tuple(state.parts)

    def place_of(self, name: str) -> Place | None:
        """The place of a part; None if it has none."""
        for state in self._nodes.values():
            if name in state.parts:
                return state.parts[name][1]
        return None

    def take(self, need: Need) -> Place | None:
        """Reserve a place for a part; None if no node has room."""
        if self.place_of(need.name) is not None:
            raise InvariantError(f"{need.name} already has a place")
        fitting = [
            state
            for state in self._nodes.values()
            if state.free_cpus >= need.cpus and len(state.free_gpus(need.book)) >= need.gpus
        ]
        if not fitting:
            return None
        state = max(fitting, key=lambda candidate: self._preference(candidate, need))
        place = Place(state.node, tuple(state.free_gpus(need.book)[: need.gpus]))
        state.parts[need.name] = (need, place)
        return place

    def release(self, name: str) -> None:
        """Free the place of a part; a no-op if it has none."""
        for state in self._nodes.values():
            state.parts.pop(name, None)

    def _preference(self, state: _NodeState, need: Need) -> tuple[float, float]:
        """Sort key: the largest wins, and among equals the node that joined first."""
        share = state.free_cpus / state.node.cpus if state.node.cpus else 0.0
        gpus = len(state.free_gpus(need.book)) / state.node.gpus if state.node.gpus else 0.0
        sign = -1.0 if need.pack else 1.0
        return (sign * gpus, sign * share)


def engine_need(recipe: Recipe, index: int, *, gpus: bool) -> Need:
    """Resources of engine number `index` on a cluster with or without GPUs."""
    cluster = recipe.cluster
    assert cluster is not None
    book = "engine" if cluster.colocate else "gpu"
    count = cluster.gpus_per_engine if gpus else 0
    return Need(f"engine-{index}", cluster.engine_cpus, count, book)


def rank_need(recipe: Recipe, rank: int, *, gpus: bool) -> Need:
    """Resources of learner rank number `rank`."""
    cluster = recipe.cluster
    assert cluster is not None
    book = "rank" if cluster.colocate else "gpu"
    return Need(f"rank-{rank}", cluster.rank_cpus, 1 if gpus else 0, book, pack=gpus)


def check_room(recipe: Recipe, nodes: Iterable[Node]) -> None:
    """Raise RecipeError unless the nodes have room for all learner ranks and engines."""
    ledger = Ledger(nodes)
    gpus = any(node.gpus for node in ledger.nodes)
    for rank in range(recipe.learner.ranks):
        if ledger.take(rank_need(recipe, rank, gpus=gpus)) is None:
            raise RecipeError(_no_room(f"{rank} of learner.ranks = {recipe.learner.ranks}", ledger))
    for index in range(recipe.engine.count):
        if ledger.take(engine_need(recipe, index, gpus=gpus)) is None:
            raise RecipeError(_no_room(f"{index} of engine.count = {recipe.engine.count}", ledger))


def _no_room(what: str, ledger: Ledger) -> str:
    have = ", ".join(f"{n.cpus:g} CPUs and {n.gpus} GPUs" for n in ledger.nodes) or "no node"
    return f"the cluster ({have}) has room for {what}: use fewer or add nodes"

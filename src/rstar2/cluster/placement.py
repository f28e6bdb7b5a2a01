"""Which part runs on which node: a ledger of what nodes have and who takes it. Pure, no Ray.

Invariants
- What is taken of a node never exceeds what it has; a part has one place until it is released.
- GPUs have numbers, and one number is given once per *book*. Colocated, engines and learner ranks
  have a book each, so that they share GPUs and take turns; apart, they share one book.
- Parts are spread: the node with the largest free share first. Learner ranks with GPUs are packed:
  the fuller node first, so that most of their traffic stays inside nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rstar2.config import Recipe
from rstar2.errors import InvariantError, RecipeError


@dataclass(frozen=True, slots=True)
class Node:
    """What one machine offers."""

    id: str
    address: str
    cpus: float
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What one part wants."""

    name: str
    cpus: float
    gpus: int = 0
    book: str = "gpu"
    pack: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part runs, and which of the node's GPUs are its own."""

    node: Node
    gpus: tuple[int, ...] = ()


@dataclass(slots=True)
class _Held:
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
        self._nodes: dict[str, _Held] = {}
        for node in nodes:
            self.join(node)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(held.node for held in self._nodes.values())

    def join(self, node: Node) -> None:
        """A node can take parts."""
        if node.id in self._nodes:
            raise InvariantError(f"node {node.id} joined twice")
        self._nodes[node.id] = _Held(node)

    def leave(self, node_id: str) -> tuple[str, ...]:
        """A node was lost: returns the parts that were on it. A second call does nothing."""
        held = self._nodes.pop(node_id, None)
        return () if held is None else tuple(held.parts)

    def place_of(self, name: str) -> Place | None:
        """Where a part is; None if nowhere."""
        for held in self._nodes.values():
            if name in held.parts:
                return held.parts[name][1]
        return None

    def take(self, need: Need) -> Place | None:
        """Find a place for a part and keep it; None if no node has room."""
        if self.place_of(need.name) is not None:
            raise InvariantError(f"{need.name} has a place already")
        fitting = [
            held
            for held in self._nodes.values()
            if held.free_cpus >= need.cpus and len(held.free_gpus(need.book)) >= need.gpus
        ]
        if not fitting:
            return None
        held = max(fitting, key=lambda h: self._preference(h, need))
        place = Place(held.node, tuple(held.free_gpus(need.book)[: need.gpus]))
        held.parts[need.name] = (need, place)
        return place

    def release(self, name: str) -> None:
        """A part has ended; nothing happens if its node went before."""
        for held in self._nodes.values():
            held.parts.pop(name, None)

    def _preference(self, held: _Held, need: Need) -> tuple[float, float]:
        """The larger, the better; among equals the node that joined first."""
        share = held.free_cpus / held.node.cpus if held.node.cpus else 0.0
        gpus = len(held.free_gpus(need.book)) / held.node.gpus if held.node.gpus else 0.0
        sign = -1.0 if need.pack else 1.0
        return (sign * gpus, sign * share)


def engine_need(recipe: Recipe, index: int, *, gpus: bool) -> Need:
    """What engine number `index` wants on a cluster with or without GPUs."""
    cluster = recipe.cluster
    assert cluster is not None
    book = "engine" if cluster.colocate else "gpu"
    count = cluster.gpus_per_engine if gpus else 0
    return Need(f"engine-{index}", cluster.engine_cpus, count, book)


def rank_need(recipe: Recipe, rank: int, *, gpus: bool) -> Need:
    """What learner rank number `rank` wants."""
    cluster = recipe.cluster
    assert cluster is not None
    book = "rank" if cluster.colocate else "gpu"
    return Need(f"rank-{rank}", cluster.rank_cpus, 1 if gpus else 0, book, pack=gpus)


def check_room(recipe: Recipe, nodes: Iterable[Node]) -> None:
    """All ranks and at least one engine have a place, or the recipe is refused by name."""
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
    return f"the cluster ({have}) has room for {what}: ask for fewer, or add nodes"

"""Learner ranks as Ray actors, with the interface of ranks on one machine.

Commands and batches go to the ranks as actor calls; gradients and shards go between them over
torch.distributed (gloo on CPUs, nccl on GPUs). A rank that dies ends the group with RankError, as
on one machine: the trainer starts a new group and resumes from the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rstar2.cluster import nodes
from rstar2.cluster.actors import RankActor
from rstar2.cluster.placement import Ledger, rank_need
from rstar2.config import Recipe
from rstar2.errors import DeadlineError, DiskFullError, RankError, RecipeError, UserError
from rstar2.learner.heartbeat import HangWatch, OwnTime, Pulse

POLL_S = 0.2
PULSE = "pulse"
"""Ray's name for the thread of an actor that answers during a call."""


class RemoteRanks:
    """All ranks of one group; every method blocks."""

    def __init__(self, recipe: Recipe, ledger: Ledger, notify: Any) -> None:
        self._recipe, self._ledger, self._notify = recipe, ledger, notify
        self._watch, self._time = HangWatch(recipe.learner.hang_s), OwnTime()
        self._pulses: list[_RemotePulse] = []
        self._actors: list[Any] = []
        self._names: list[str] = []

    def start(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Place the ranks, form the process group and create a learner in each."""
        assert self._recipe.cluster is not None
        start_s = self._recipe.cluster.start_s
        ranks = self._recipe.learner.ranks
        gpus = any(node.gpus for node in self._ledger.nodes)
        places = []
        try:
            for rank in range(ranks):
                need = rank_need(self._recipe, rank, gpus=gpus)
                place = self._ledger.take(need)
                if place is None:
                    raise RecipeError(
                        f"the cluster has room for {rank} of learner.ranks = {ranks}: "
                        "use fewer ranks or add nodes"
                    )
                self._names.append(need.name)
                actor = nodes.make_actor(
                    RankActor, place, need.cpus, rank, place.gpus, groups={PULSE: 1}
                )
                self._actors.append(actor)
                self._pulses.append(_RemotePulse(actor))
                places.append(place)
            first = places[0].node.address
            rendezvous = [self._actors[0].rendezvous.remote(first)]
            address, _ = self._answers("rendezvous", rendezvous, start_s)[0]
            joined = [a.join.remote(address, ranks, args, options) for a in self._actors]
            pids = self._answers("start", joined, start_s)
        except BaseException:
            self.close(grace_s=0.0)
            raise
        for name, place, pid in zip(self._names, places, pids, strict=True):
            self._notify("placed", part=name, node=place.node.address, pids=[pid])

    def call(self, method: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        """Call a method on all ranks; returns rank 0's result once all have answered."""
        import ray

        packed = ray.put(args)
        return self._answers(
            method, [a.call.remote(method, packed) for a in self._actors], deadline_s
        )[0]

    def _answers(self, method: str, references: list[Any], deadline_s: float) -> list[Any]:
        """Results of all ranks; the first failure ends the wait for the others."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        ends = time.monotonic() + deadline_s
        self._watch.begin(method, self._time())
        missing = {reference: rank for rank, reference in enumerate(references)}
        answers: dict[int, Any] = {}
        while missing:
            ready, _ = ray.wait(list(missing), num_returns=1, timeout=POLL_S)
            for reference in ready:
                rank = missing.pop(reference)
                try:
                    answers[rank] = ray.get(reference)
                except RayTaskError as error:
                    if isinstance(error.cause, UserError | DiskFullError):
                        raise error.cause from None
                    raise RankError(f"learner rank {rank} failed in {method}: {error}") from error
                except RayError as error:
                    raise RankError(
                        f"learner rank {rank} died in {method} ({type(error).__name__})"
                    ) from error
            if not ready and (hang := self._hang(missing.values())):
                raise RankError(f"{hang} in {method}")
            if time.monotonic() > ends:
                raise DeadlineError(
                    f"learner rank(s) {sorted(missing.values())} did not answer {method} within "
                    f"{deadline_s:g} s"
                )
        self._watch.end(self._time())
        return [answers[rank] for rank in range(len(references))]

    def _hang(self, missing: Iterable[int]) -> str | None:
        """What hangs among the ranks that have not answered; a starting rank shows no pulse yet."""
        pulses = {rank: self._pulses[rank].read() for rank in missing}
        return self._watch.look({r: p for r, p in pulses.items() if p is not None}, self._time())

    def close(self, grace_s: float = 0.0) -> None:
        """Kill all ranks: the checkpoints hold their state."""
        for actor in self._actors:
            nodes.kill(actor)
        for name in self._names:
            self._ledger.release(name)
        self._actors, self._names, self._pulses = [], [], []


class _RemotePulse:
    """Asks one rank for its marks, one question at a time; each answer is a sign of life."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None
        self._answers = 0
        self._last: Pulse | None = None

    def read(self) -> Pulse | None:
        """The newest answer; None before the first."""
        import ray

        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            self._answers += 1
            self._last = Pulse(ray.get(asked), self._answers)
        if self._asked is None:
            self._asked = self._actor.marks.options(concurrency_group=PULSE).remote()
        return self._last

"""The interface of a scheduling policy, and all policies by their names in a recipe."""

from __future__ import annotations

from typing import Protocol

from rstar2.config import SchedulerConfig
from rstar2.errors import InvariantError
from rstar2.rollout.baselines import LeastKv, LeastRequests, RoundRobin, StaticSplit, StickyHash
from rstar2.rollout.caps import Aimd, MeanLengthCap, PrimeRl
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.reserve import ReservePolicy
from rstar2.rollout.state import Placement, SchedulerState
from rstar2.rollout.thunder_agent import ThunderAgent
from rstar2.rollout.worst_case import WorstCase
from rstar2.types import EngineLoad


class SchedulingPolicy(Protocol):
    """Chooses an engine for every turn. The other methods are events."""

    def decide(self, state: SchedulerState, now: float) -> list[Placement]:
        """Start, with `SchedulerState.start`, all turns that may start now."""
        ...

    def turn_ended(self, state: SchedulerState, name: str) -> None:
        """The session's turn has ended: its tools run, or the session is about to end."""
        ...

    def session_left(self, state: SchedulerState, name: str, engine: str) -> None:
        """The session has ended and is no longer on its engine."""
        ...

    def load_reported(self, state: SchedulerState, name: str, load: EngineLoad) -> None:
        """An engine reported its load."""
        ...


def make_policy(config: SchedulerConfig, lengths: LengthModel) -> SchedulingPolicy:
    """The policy with the name given in the recipe."""
    match config.policy:
        case "reserve":
            return ReservePolicy(config, lengths)
        case "worst_case":
            return WorstCase()
        case "static_split":
            return StaticSplit()
        case "round_robin":
            return RoundRobin()
        case "least_requests":
            return LeastRequests()
        case "least_kv":
            return LeastKv()
        case "sticky_hash":
            return StickyHash()
        case "aimd":
            return Aimd()
        case "prime_rl":
            return PrimeRl()
        case "mean_cap":
            return MeanLengthCap(lengths, config.cap_factor)
        case "thunder_agent":
            return ThunderAgent()
    raise InvariantError(f"there is no policy {config.policy}")

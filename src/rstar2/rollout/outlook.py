"""What `reserve.py` expects of one engine and of all engines together."""

from __future__ import annotations

from dataclasses import dataclass, field

from rstar2.rollout.forecast import KvDemand, KvForecast
from rstar2.rollout.speed import EngineSpeed
from rstar2.rollout.state import EngineState, SchedulerState, TurnRequest


@dataclass(slots=True)
class EngineOutlook:
    """The forecast for one engine. It exists as long as the engine's state does."""

    name: str
    engine: EngineState
    speed: EngineSpeed
    forecast: KvForecast
    demands: dict[str, KvDemand] = field(default_factory=dict)
    queued: bool = False
    """The last report had turns in the engine's own queue."""
    excess: float = 0.0
    """Reported KV use above the forecast."""
    sharing: float = 0.0
    """The share of prompt tokens that rollouts of a group have in common, from reports."""
    refused: TurnRequest | None = None
    """The last request that was not admitted; it is tried again only after a change here."""
    stays: str = ""
    """The waiting turn that was last found not to move; looked at again after a report."""
    total: int = field(init=False)
    """Tokens that its cache can hold."""

    def __post_init__(self) -> None:
        self.total = self.engine.budget.total

    @property
    def room(self) -> float:
        return self.total - self.excess

    @property
    def step_s(self) -> float:
        """Seconds of a step with the rollouts that are here now."""
        forecast = self.forecast
        share = min(1.0, self.total / max(1.0, forecast.now))
        return self.speed.seconds(share * float(forecast.alive[0]), share * forecast.now)

    @property
    def drain_s(self) -> float:
        """Seconds until its rollouts are done, if they fill the cache to the end."""
        return self.forecast.work / self.total * self.step_s

    @property
    def pace(self) -> tuple[float, float]:
        """`step_s` and `drain_s`, computed together: they are compared for every engine."""
        step_s = self.step_s
        return step_s, self.forecast.work / self.total * step_s


@dataclass(frozen=True, slots=True)
class FleetOutlook:
    """The remaining work of all engines."""

    done_s: float
    """Seconds until everything could be done."""
    least_s: float
    """Seconds until the first engine is done with what it has."""
    wait_s: float
    """Seconds until the first engine is expected to have room for another rollout."""
    steps: float
    """Steps that nine of ten new rollouts do not exceed."""


def shared_prompts(state: SchedulerState, engine: EngineState, used: int) -> float:
    """The share of their prompts that the running rollouts have in common, from KV use."""
    running = [state.sessions[name] for name in engine.running]
    prompts = sum(s.first_prompt for s in running)
    separate = sum(
        engine.budget.rounded(s.first_prompt + state.estimated_completion(s)) for s in running
    )
    return min(1.0, max(0.0, (separate - used) / prompts))

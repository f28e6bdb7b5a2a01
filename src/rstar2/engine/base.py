"""What the rest of rstar2 asks of an inference engine.

`Generator` is the only thing the agent loop knows; a single engine and the scheduled fleet both
are one. `Engine` adds what the scheduler and the learner need. Promises of every engine:

- `generate` returns the sampled ids with the logprob each had under the distribution it was
  sampled from (after temperature, top-p, top-k), and the weight version of each token.
- Awaiting never blocks the event loop; a deadline passed raises DeadlineError, a dead engine
  EngineError. Cancelling the awaiting task frees the request's KV.
- After `update_weights` no KV computed under older weights is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling, WeightVersion

if TYPE_CHECKING:
    import torch


WeightTransfer = Literal["files", "memory"]


class Generator(Protocol):
    """The one method the agent loop needs."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation. `session` names the trajectory whose prefix may be cached."""
        ...

    async def release(self, session: str) -> None:
        """The trajectory ended: its cached prefix may go. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights, by reference (same machine, in memory) or as a safetensors directory."""

    version: WeightVersion
    state: Mapping[str, torch.Tensor] | None = None
    path: Path | None = None
    hold: bool = False
    """Sample nothing under the new weights before `resume`: they are yet to be proven."""


class Engine(Generator, Protocol):
    """An engine that can be scheduled, updated and verified."""

    name: str
    weight_transfer: WeightTransfer
    """How it takes new weights: as a `WeightUpdate` with `path` or with `state`."""

    async def start(self) -> None:
        """Be able to serve; a no-op if it is. A restarted engine has stale weights."""
        ...

    def capacity(self) -> EngineCapacity:
        """The KV cache and the number of sequences it can hold."""
        ...

    async def load(self) -> EngineLoad:
        """What it holds and does now."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Install new weights between two steps; no KV of the old ones is reused."""
        ...

    async def resume(self) -> None:
        """Let running requests continue after an update with `hold`."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, at temperature 1: the probe of Invariant 7."""
        ...

    async def close(self) -> None:
        """End in order; pending calls raise EngineError. Idempotent."""
        ...

    async def abort(self) -> None:
        """End an engine that hangs or is unreachable, without asking it; as `close` otherwise."""
        ...

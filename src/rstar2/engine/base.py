"""The interface of inference engines.

`Generator` is all that the agent loop uses; a single engine and the scheduled fleet both implement
it. `Engine` adds what the scheduler and the learner need. Every engine guarantees:

- `generate` returns the sampled ids, the logprob of each under the distribution it was sampled from
  (after temperature, top-p, top-k), and the weight version of each token.
- Awaiting never blocks the event loop. A missed deadline raises DeadlineError, a dead engine
  EngineError. Cancelling the awaiting task frees the request's KV.
- After `update_weights` no KV computed under older weights is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rstar2.engine.checksums import HeldWeights
from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling, WeightVersion

if TYPE_CHECKING:
    import torch


WeightTransfer = Literal["files", "memory", "adapter"]


class Generator(Protocol):
    """The one method the agent loop needs."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation. `session` names the trajectory whose prefix may be cached.

        The caller has no clock of its own. An engine counts `deadline_s` from the call; the fleet,
        which queues turns, from the time at which an engine starts on the turn.
        """
        ...

    async def release(self, session: str) -> None:
        """Signal that the trajectory ended: its cached prefix may be evicted. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights, by reference (same machine, in memory) or as a safetensors directory."""

    version: WeightVersion
    state: Mapping[str, torch.Tensor] | None = None
    path: Path | None = None
    hold: bool = False
    """Sample nothing under the new weights before `resume`: they are not verified yet."""


class Engine(Generator, Protocol):
    """An engine that can be scheduled, updated and verified."""

    name: str
    weight_transfer: WeightTransfer
    """How it receives new weights: as a `WeightUpdate` with the `path` of a model directory or of a
    LoRA adapter, or with `state`."""

    async def start(self) -> None:
        """Start the engine; a no-op if it is running. A restarted engine has stale weights."""
        ...

    def capacity(self) -> EngineCapacity:
        """Size of the KV cache, and the limits on sequences and length."""
        ...

    async def load(self) -> EngineLoad:
        """Current KV usage, running and waiting requests, and weight version."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Install new weights between two steps; KV of the old weights is not reused."""
        ...

    async def resume(self) -> None:
        """Let running requests continue after an update with `hold`."""
        ...

    async def held_weights(self) -> HeldWeights:
        """Checksums of the weights that it computes with, read from its own tensors."""
        ...

    async def sleep(self) -> None:
        """Give back the memory of weights and KV; requests wait for `wake`. Idempotent.

        A no-op in an engine whose memory the learner cannot use.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, with the weights from before `sleep`. Idempotent."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, at temperature 1; the probe of Invariant 7."""
        ...

    async def close(self) -> None:
        """Shut down gracefully; pending calls raise EngineError. Idempotent."""
        ...

    async def abort(self) -> None:
        """Like `close`, but kill an engine that hangs or is unreachable instead of asking it."""
        ...

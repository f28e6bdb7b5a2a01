"""What the checks know about a machine. A method of `Machine` raises if it cannot find out."""

from __future__ import annotations

from typing import Protocol

import msgspec

from rstar2.errors import UserError


class NotPossibleError(UserError):
    """This machine cannot make a check, and that is no fault."""


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU as the driver sees it."""

    name: str
    memory_gb: float
    driver: str


class TorchFacts(msgspec.Struct, frozen=True):
    """The installed build of torch, and what it can use here."""

    version: str
    cuda: str | None
    """Version of CUDA (or HIP) that it was built for; None for a CPU build."""
    devices: int
    architectures: tuple[str, ...] = ()
    """Architectures that it has kernels for, such as sm_90."""
    capabilities: tuple[str, ...] = ()
    """Architecture of every visible GPU."""
    bfloat16: bool = True


class CollectiveFacts(msgspec.Struct, frozen=True):
    """An all-reduce over all GPUs."""

    backend: str
    version: str
    ranks: int
    sum: float
    """Of the numbers 1 to `ranks`."""
    gb_per_s: float


class FlashFacts(msgspec.Struct, frozen=True):
    """flash-attn's variable-length kernel against torch's attention in float32."""

    version: str | None
    """None: not installed."""
    gap: float = 0.0


class ServerFacts(msgspec.Struct, frozen=True):
    """A vLLM server that was started as a run starts it."""

    version: str
    seconds: float
    kv_tokens: int
    arguments: tuple[str, ...]


class NumericsFacts(msgspec.Struct, frozen=True):
    """Logprobs of one text by engine and learner."""

    dtype: str
    gap: float
    """Largest difference of engine and learner."""
    rounding: float
    """Largest difference of the learner in this number format and in float32."""


class SampleFacts(msgspec.Struct, frozen=True):
    """Tokens that the engine sampled, scored again by the learner."""

    asked: int
    sampled: int
    gap: float
    """Mean difference of the logprobs."""


class UpdateFacts(msgspec.Struct, frozen=True):
    """A weight update and its probe."""

    before: float
    """Difference of engine and learner before the update: what the probe has to see."""
    after: float
    tolerance: float
    seconds: float


class SleepFacts(msgspec.Struct, frozen=True):
    """Free memory of the GPU while a server is awake, asleep and awake again."""

    awake_gb: float
    asleep_gb: float
    again_gb: float
    gap: float
    """Largest difference of logprobs before and after."""


class StepFacts(msgspec.Struct, frozen=True):
    """One RL step with engine and learner on this machine."""

    steps: int
    updates: int
    probe_gap: float
    mismatch: float
    """Mean difference of the logprobs of sampled tokens, engine and learner."""
    seconds: float
    total_gb: float = 0.0
    least_free_gb: float = 0.0


class Machine(Protocol):
    """The machine under test; the checks call its methods in order."""

    async def gpus(self) -> tuple[GpuFacts, ...]: ...

    async def torch(self) -> TorchFacts: ...

    async def collective(self) -> CollectiveFacts: ...

    async def flash(self) -> FlashFacts: ...

    async def serve(self) -> ServerFacts: ...

    async def numerics(self) -> NumericsFacts: ...

    async def sample(self) -> SampleFacts: ...

    async def update_by_files(self) -> UpdateFacts: ...

    async def update_by_nccl(self) -> UpdateFacts: ...

    async def sleep(self) -> SleepFacts: ...

    async def step(self) -> StepFacts: ...

    async def close(self) -> None: ...

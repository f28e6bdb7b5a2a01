"""A scripted engine for tests: it answers, hangs or dies on command and counts its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rstar2.engine.base import WeightTransfer, WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.errors import EngineError
from rstar2.types import EngineCapacity, EngineLoad, Finish, Generation, Sampling


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the deadline is for a hang, not for a slow machine."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class ScriptedEngine:
    """Samples `tokens` times the id `seed % 97` after `delay_s`; a dead engine raises."""

    weight_transfer: WeightTransfer = "memory"

    def __init__(self, name: str, *, kv: int = 1000, sequences: int = 64, tokens: int = 5) -> None:
        self.name = name
        self.kv, self.sequences, self.tokens = kv, sequences, tokens
        self.delay_s = 0.001
        self.dead = False
        self.hang = False
        self.version = 0
        self.running: set[str] = set()
        self.peak_running = 0
        self.served: list[str] = []
        self.released: list[str] = []
        self.starts = 0
        self.loads = 0
        self.waiting = self.decoded = 0
        """What it reports in its load."""
        self._death = asyncio.Event()

    async def start(self) -> None:
        self.starts += 1
        self.dead = False
        self._death = asyncio.Event()

    def capacity(self) -> EngineCapacity:
        return EngineCapacity(self.kv, self.sequences, self.kv)

    async def load(self) -> EngineLoad:
        self.loads += 1
        return EngineLoad(0, len(self.running), self.waiting, 0, self.version, decoded=self.decoded)

    def kill(self) -> None:
        self.dead = True
        self._death.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        if self.dead:
            raise EngineError(f"{self.name} is dead")
        assert session not in self.running
        self.running.add(session)
        self.peak_running = max(self.peak_running, len(self.running))
        try:
            await asyncio.wait_for(self._death.wait(), None if self.hang else self.delay_s)
            raise EngineError(f"{self.name} died")
        except TimeoutError:
            count = min(self.tokens, sampling.max_new_tokens)
            self.served.append(session)
            return Generation(
                token_ids=(sampling.seed % 97,) * count,
                logprobs=(-1.0,) * count,
                versions=((self.version, count),),
                finish=Finish.STOP if count == self.tokens else Finish.LENGTH,
            )
        finally:
            self.running.discard(session)

    async def release(self, session: str) -> None:
        if self.dead:
            raise EngineError(f"{self.name} is dead")
        self.released.append(session)

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def abort(self) -> None:
        await self.close()

    async def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.version

    async def held_weights(self) -> HeldWeights:
        return HeldWeights("float32", {})

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def close(self) -> None:
        self.kill()

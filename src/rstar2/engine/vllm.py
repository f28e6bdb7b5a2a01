"""vLLM behind `base.Engine`: a server that we start and supervise, or one given by its URL.

Promises, beyond those of `base.Engine`:
- Tokens go in and come out as ids; logprobs are those of the distribution that was sampled from,
  and each token carries the label of the weights that sampled it.
- Prefixes are never shared across versions: the cache is dropped at every update, and each
  version's prompts are salted, so that a leftover block cannot match.
- No token is sampled under weights that were not proven. An update interrupts what runs: requests
  keep what they have sampled and wait, inside `generate`, until the update has succeeded and, with
  `hold`, until `resume` says that `score` has matched the learner; then they resume. An update that
  failed leaves them waiting, up to their deadlines, for one that does not.
- A (re)started server has the label STALE: it serves the weights of its model directory, which
  nobody has proven.
- `start` on an engine that is alive but does not answer replaces its server.

Weights travel as files (`weight_transfer = "files"`), or over NCCL between GPUs (`"memory"`, see
`vllm_nccl`). Temperature 0 is greedy and reports the model's own logprobs (temperature 1).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rstar2.engine.base import WeightTransfer, WeightUpdate
from rstar2.engine.vllm_client import VllmClient
from rstar2.engine.vllm_server import ServerSettings, VllmServer
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.types import EngineCapacity, EngineLoad, Finish, Generation, Sampling, WeightVersion

if TYPE_CHECKING:
    from rstar2.engine.vllm_nccl import NcclTransfer

log = logging.getLogger(__name__)

START_DEADLINE_S = 600.0
"""Longest wait for a server to be ready: imports, weights and, on GPUs, compilation."""
CONTROL_DEADLINE_S = 300.0
HEALTH_DEADLINE_S = 20.0
POLL_S = 0.25

STALE: WeightVersion = -1
"""Label of weights that no learner has given: those a server starts with."""


class VllmEngine:
    """`base.Engine` over one vLLM server."""

    def __init__(
        self,
        name: str,
        *,
        server: ServerSettings | None = None,
        url: str | None = None,
        max_sequences: int = 256,
        max_length: int | None = None,
        transfer: NcclTransfer | None = None,
    ) -> None:
        """Give `server` to start one, or the `url` of one, with the limits it was started with."""
        if (server is None) == (url is None):
            raise UserError(f"{name}: give either server settings or a url")
        self.name = name
        self.weight_transfer: WeightTransfer = "files" if transfer is None else "memory"
        self._url = url
        self._server = VllmServer(name, server) if server is not None else None
        self._max_sequences = server.max_sequences if server else max_sequences
        self._max_length = server.max_length if server else max_length
        self._transfer = transfer
        self._client: VllmClient | None = None
        self._version: WeightVersion = STALE
        self._capacity: EngineCapacity | None = None
        self._updating = asyncio.Lock()
        self._updates = 0
        self._open = asyncio.Event()

    # ------------------------------------------------------------------ life

    @property
    def pid(self) -> int | None:
        """The leader of the server's process group, if it is ours and was started."""
        return None if self._server is None else self._server.pid

    async def start(self) -> None:
        """Have a server that answers; a no-op while there is one."""
        if self._client is not None:
            if await self._answers():
                return
            log.warning("%s is replaced: %s", self.name, self.last_words())
            await self.close()
        if self._server is not None:
            self._server.start()
        client = self._client = VllmClient(
            self.name, url=self._url, socket=self._server.socket if self._server else None
        )
        try:
            await self._ready(client)
            self._capacity = await self._measure(client)
            await client.label(STALE, CONTROL_DEADLINE_S)
        except BaseException:
            await self.close()
            raise
        self._version = STALE
        self._open.set()

    def last_words(self) -> str:
        """How our server ended, if it has, and the end of its log; for people."""
        return "" if self._server is None else self._server.post_mortem()

    async def _answers(self) -> bool:
        if self._server is not None and not self._server.running:
            return False
        try:
            await self.client.health(HEALTH_DEADLINE_S)
        except (EngineError, DeadlineError):
            return False
        return True

    async def _ready(self, client: VllmClient) -> None:
        """Wait until the server answers, or has ended, or time is up."""
        ends = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                return await client.health(HEALTH_DEADLINE_S)
            except (EngineError, DeadlineError) as error:
                if self._server is None:
                    raise EngineError(
                        f"{self.name}: {self._url} does not answer: {error}"
                    ) from error
                if not self._server.running:
                    raise EngineError(f"{self.name}: {self._server.post_mortem()}") from error
                if time.monotonic() > ends:
                    raise DeadlineError(
                        f"{self.name}: not ready in {START_DEADLINE_S:g} s; the server's last "
                        f"words:\n{self._server.tail()}"
                    ) from error
            await asyncio.sleep(POLL_S)

    async def _measure(self, client: VllmClient) -> EngineCapacity:
        gauges = await client.gauges(CONTROL_DEADLINE_S)
        tokens = gauges.blocks * gauges.block_tokens
        return EngineCapacity(
            kv_tokens=tokens,
            max_sequences=self._max_sequences,
            max_length=self._max_length or tokens,
            block_tokens=gauges.block_tokens,
        )

    async def close(self) -> None:
        """Close connections; a server of ours ends, one given by URL keeps running. Idempotent."""
        client, self._client = self._client, None
        self._open.set()  # who waits there finds the engine gone
        try:
            if self._server is not None:
                await self._server.stop()  # first: pending calls then fail with its end
        finally:
            if client is not None:
                await client.close()

    async def abort(self) -> None:
        """As `close`: the server's supervisor ends also a server that hangs."""
        await self.close()

    @property
    def client(self) -> VllmClient:
        """The server's own interface; EngineError unless started."""
        if self._client is None:
            raise EngineError(f"{self.name}: not started")
        return self._client

    # ------------------------------------------------------------------ generation

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation; a weight update interrupts it, and it resumes afterwards."""
        started = time.monotonic()
        ends = started + deadline_s
        done = Generation((), (), (), Finish.CANCELLED)
        while True:
            await self._gate(ends, deadline_s)
            version, updates = self._version, self._updates
            part = await self.client.generate(
                [*prompt_ids, *done.token_ids],
                _rest(sampling, len(done.token_ids)),
                salt=f"rstar2-{version}",
                deadline_s=ends - time.monotonic(),
            )
            proven = _sampled_under(version, part)
            done = _joined(done, proven)
            interrupted = proven is not part or part.finish is Finish.CANCELLED
            if not interrupted or updates == self._updates:
                return replace(done, engine=self.name, wall_s=time.monotonic() - started)

    async def _gate(self, ends: float, deadline_s: float) -> None:
        """Wait while weights are being changed or proven."""
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                await self._open.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: weights were not proven within {deadline_s:g} s"
            ) from error

    async def release(self, session: str) -> None:
        """Nothing to do: vLLM keeps prefixes as long as nobody needs their blocks."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, at temperature 1, by the weights that serve."""
        return await self.client.score(token_ids, deadline_s=CONTROL_DEADLINE_S)

    # ------------------------------------------------------------------ what it holds

    def capacity(self) -> EngineCapacity:
        """What the server can hold, as it says; only once started."""
        if self._capacity is None:
            raise EngineError(f"{self.name}: not started")
        return self._capacity

    async def load(self) -> EngineLoad:
        """What the server is doing now."""
        client, capacity = self.client, self.capacity()
        gauges, version = await asyncio.gather(
            client.gauges(CONTROL_DEADLINE_S), client.weight_version(CONTROL_DEADLINE_S)
        )
        return EngineLoad(
            kv_used=round(gauges.used_share * capacity.kv_tokens),
            running=gauges.running,
            waiting=gauges.waiting,
            preemptions=gauges.preemptions,
            version=version,
        )

    # ------------------------------------------------------------------ weights

    async def update_weights(self, update: WeightUpdate) -> None:
        """Interrupt what runs, install, drop all KV, relabel; with `hold` until `resume`."""
        async with self._updating:
            client = self.client
            self._open.clear()
            self._updates += 1
            await client.pause(CONTROL_DEADLINE_S)
            if self._transfer is not None:
                await self._transfer.send(client, update)
            elif update.path is not None:
                await client.reload(update.path, CONTROL_DEADLINE_S)
            else:
                raise UserError(f"{self.name}: version {update.version} must come as files")
            await client.forget(CONTROL_DEADLINE_S)
            await client.label(update.version, CONTROL_DEADLINE_S)
            await client.resume(CONTROL_DEADLINE_S)
            self._version = update.version
        if not update.hold:
            await self.resume()

    async def resume(self) -> None:
        """The weights are verified: interrupted requests resume under them."""
        if self._client is None:
            raise EngineError(f"{self.name}: not started")
        self._open.set()


def _rest(sampling: Sampling, sampled: int) -> Sampling:
    """What is left of a request of which so many tokens have been sampled."""
    if not sampled:
        return sampling
    return replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - sampled,
        seed=sampling.seed + sampled,  # else the first tokens' noise would be drawn again
    )


def _sampled_under(version: WeightVersion, part: Generation) -> Generation:
    """The part itself, or what of it came before tokens of other weights: those are unproven."""
    count = part.versions[0][1] if part.versions and part.versions[0][0] == version else 0
    if count == len(part.token_ids):
        return part
    return replace(
        part,
        token_ids=part.token_ids[:count],
        logprobs=part.logprobs[:count],
        versions=part.versions[:1] if count else (),
        finish=Finish.CANCELLED,
    )


def _joined(done: Generation, part: Generation) -> Generation:
    """One generation of two that follow each other."""
    return replace(
        part,
        token_ids=done.token_ids + part.token_ids,
        logprobs=done.logprobs + part.logprobs,
        versions=done.versions + part.versions,
        cached_tokens=done.cached_tokens if done.token_ids else part.cached_tokens,
    )

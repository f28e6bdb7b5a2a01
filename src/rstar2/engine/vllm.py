"""vLLM behind `base.Engine`: a server that we start and supervise, or one given by its URL.

Guarantees, beyond those of `base.Engine`:
- Prompts and completions are token ids. Logprobs are those of the distribution sampled from, and
  each token carries the version of the weights it was sampled under.
- Cached prefixes are never shared across versions: the prefix cache is reset at every update, and
  each version has its own cache salt, so that a leftover block cannot match.
- No token is sampled under unverified weights. An update interrupts running requests: they keep
  their sampled tokens and wait, inside `generate`, until the update has succeeded and, with `hold`,
  until `resume` confirms that `score` matches the learner. After a failed update they wait, up to
  their deadlines, for a successful one.
- A (re)started server has the version STALE: it serves the weights of its model directory, which
  are unverified.
- `start` on an engine that is alive but does not answer replaces its server.

Weights are sent as files (`weight_transfer = "files"`), or over NCCL between GPUs (`"memory"`, see
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
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.vllm_client import VllmClient
from rstar2.engine.vllm_server import ServerSettings, VllmServer
from rstar2.errors import DeadlineError, EngineError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.types import EngineCapacity, EngineLoad, Finish, Generation, Sampling, WeightVersion

if TYPE_CHECKING:
    from rstar2.engine.vllm_nccl import NcclTransfer

log = logging.getLogger(__name__)

START_DEADLINE_S = 600.0
"""Deadline for a server to be ready: imports, weights and, on GPUs, compilation."""
CONTROL_DEADLINE_S = 300.0
HEALTH_DEADLINE_S = 20.0
POLL_S = 0.25

STALE: WeightVersion = -1
"""Version of the weights that a server starts with: no learner has published them."""


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
        seeded: bool = True,
    ) -> None:
        """Pass `server` to start a server, or the `url` and limits of a running one.

        Without `seeded` the seeds of requests are not sent: vLLM samples seeded requests one by
        one.
        """
        if (server is None) == (url is None):
            raise UserError(f"{name}: give either server settings or a url")
        self.name = name
        self._by_adapter = server is not None and server.lora_rank is not None
        self.weight_transfer: WeightTransfer = (
            "adapter" if self._by_adapter else "files" if transfer is None else "memory"
        )
        self._url = url
        self._server = VllmServer(name, server) if server is not None else None
        self._max_sequences = server.max_sequences if server else max_sequences
        self._max_length = server.max_length if server else max_length
        self._transfer = transfer
        self._seeded = seeded
        self._client: VllmClient | None = None
        self._version: WeightVersion = STALE
        self._capacity: EngineCapacity | None = None
        self._updating = asyncio.Lock()
        self._updates = 0
        self._open = asyncio.Event()
        self._asleep = False

    # ------------------------------------------------------------------ lifecycle

    @property
    def pid(self) -> int | None:
        """Process group of the server; None if we have not started one."""
        return None if self._server is None else self._server.pid

    @property
    def server_settings(self) -> ServerSettings | None:
        """Settings of our server; None for one given by URL."""
        return None if self._server is None else self._server.settings

    async def start(self) -> None:
        """Start a server, or connect to the given one; a no-op while it answers."""
        if self._client is not None:
            if await self._answers():
                return
            log.warning("%s: replacing the server: %s", self.name, self.last_words())
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
        self._asleep = False
        self._open.set()

    def last_words(self) -> str:
        """Exit status and last log lines of a server that we started, for error messages."""
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
        """Wait until the server answers; raises if it ends or misses the deadline."""
        ends = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                return await client.health(HEALTH_DEADLINE_S)
            except (EngineError, DeadlineError, LocalResourceError) as error:
                if self._server is None and isinstance(error, LocalResourceError):
                    raise
                if self._server is None:
                    raise EngineError(
                        f"{self.name}: {self._url} does not answer: {error}"
                    ) from error
                if not self._server.running:
                    raise EngineError(f"{self.name}: {self._server.post_mortem()}") from error
                if time.monotonic() > ends:
                    raise DeadlineError(
                        f"{self.name}: not ready within {START_DEADLINE_S:g} s; its last "
                        f"output:\n{self._server.tail()}"
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
        """Close connections and stop our server; one given by URL keeps running. Idempotent."""
        client, self._client = self._client, None
        self._open.set()  # waiting requests then fail: the engine is not started
        try:
            if self._server is not None:
                await self._server.stop()  # first, so that pending calls fail because it ended
        finally:
            if client is not None:
                await client.close()

    async def abort(self) -> None:
        """Same as `close`: the server's supervisor also kills a server that hangs."""
        await self.close()

    @property
    def client(self) -> VllmClient:
        """The HTTP client of the server; EngineError unless started."""
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
            await self._wait_for_weights(ends, deadline_s)
            version, updates = self._version, self._updates
            part = await self.client.generate(
                [*prompt_ids, *done.token_ids] if done.token_ids else prompt_ids,
                _rest(sampling, len(done.token_ids)),
                salt=f"rstar2-{version}",
                deadline_s=ends - time.monotonic(),
                seeded=self._seeded,
            )
            verified = _sampled_under(version, part)
            done = _joined(done, verified)
            interrupted = verified is not part or part.finish is Finish.CANCELLED
            if not interrupted or updates == self._updates:
                return replace(done, engine=self.name, wall_s=time.monotonic() - started)

    async def _wait_for_weights(self, ends: float, deadline_s: float) -> None:
        """Wait while weights are being updated or verified."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                await self._open.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: weights were not verified within {deadline_s:g} s"
            ) from error

    async def release(self, session: str) -> None:
        """No-op: vLLM evicts cached prefixes when it needs their blocks."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token after the first, at temperature 1, under the current weights."""
        return await self.client.score(token_ids, deadline_s=CONTROL_DEADLINE_S)

    async def held_weights(self) -> HeldWeights:
        """Checksums of the weights in the server's workers."""
        return await self.client.held_weights(CONTROL_DEADLINE_S)

    # ------------------------------------------------------------------ capacity and load

    def capacity(self) -> EngineCapacity:
        """KV cache size and limits as the server reports them; EngineError unless started."""
        if self._capacity is None:
            raise EngineError(f"{self.name}: not started")
        return self._capacity

    async def load(self) -> EngineLoad:
        """Current load of the server; turns that wait for a connection to it wait, too."""
        capacity, client = self.capacity(), self.client
        unsent = client.unsent
        load = (await client.gauges(CONTROL_DEADLINE_S)).load(capacity.kv_tokens, self._version)
        return replace(load, waiting=load.waiting + max(unsent, client.unsent))

    # ------------------------------------------------------------------ weights

    async def update_weights(self, update: WeightUpdate) -> None:
        """Interrupt running requests, install the weights, drop all KV and set the version."""
        async with self._updating:
            client = self.client
            self._open.clear()
            self._updates += 1
            await client.pause(CONTROL_DEADLINE_S)
            if self._transfer is not None:
                await self._transfer.send(client, update)
            elif update.path is not None and self._by_adapter:
                await client.load_adapter(update.path, CONTROL_DEADLINE_S)
            elif update.path is not None:
                await client.reload(update.path, CONTROL_DEADLINE_S)
            else:
                raise UserError(f"{self.name}: version {update.version} must be given as files")
            await client.forget(CONTROL_DEADLINE_S)
            await client.label(update.version, CONTROL_DEADLINE_S)
            await client.resume(CONTROL_DEADLINE_S)
            self._version = update.version
        if not update.hold:
            await self.resume()

    async def sleep(self) -> None:
        """Interrupt running requests and free the GPU; a no-op without `sleep_mode`."""
        if self._server is None or not self._server.settings.sleep_mode or self._asleep:
            return
        async with self._updating:
            self._open.clear()
            self._updates += 1
            await self.client.sleep(CONTROL_DEADLINE_S)
            self._asleep = True

    async def wake(self) -> None:
        """Take the GPU's memory again; requests continue, with an empty KV cache."""
        if not self._asleep:
            return
        async with self._updating:
            await self.client.wake(CONTROL_DEADLINE_S)
            await self.client.forget(CONTROL_DEADLINE_S)
            self._asleep = False
        await self.resume()

    async def resume(self) -> None:
        """Let interrupted requests continue: the weights are verified."""
        if self._client is None:
            raise EngineError(f"{self.name}: not started")
        self._open.set()


def _rest(sampling: Sampling, sampled: int) -> Sampling:
    """Sampling parameters for the rest of a request after `sampled` tokens."""
    if not sampled:
        return sampling
    return replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - sampled,
        seed=sampling.seed + sampled,  # otherwise the first random numbers would repeat
    )


def _sampled_under(version: WeightVersion, part: Generation) -> Generation:
    """The tokens up to the first one of another, unverified version; `part` if there is none."""
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
    """Concatenate two consecutive parts of one generation."""
    if not done.token_ids:
        return part
    return replace(
        part,
        token_ids=[*done.token_ids, *part.token_ids],
        logprobs=[*done.logprobs, *part.logprobs],
        versions=done.versions + part.versions,
        cached_tokens=done.cached_tokens,
    )

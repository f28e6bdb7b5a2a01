"""Weights from the learner's GPU to a vLLM server's GPUs over NCCL, in vLLM's four phases.

**Untested**: it needs two GPUs, and the machines this was developed on have none. It follows the
trainer interface of vLLM 0.32; the probe after every update (Invariant 7) detects failures.
`engine.weight_transfer: files` is tested.

    init_weight_transfer_engine   once per server: learner (rank 0) and workers form an NCCL group
    start_weight_update           the workers prepare their layers
    update_weights                the workers receive while the learner broadcasts
    finish_weight_update          the workers finalise their layers

vLLM's trainer-side engine calls four synchronous methods, one per phase; `_Phases` maps each to our
client. It runs in a separate thread, so the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rstar2.engine.base import WeightUpdate
from rstar2.engine.vllm_client import VllmClient
from rstar2.errors import EngineError, InfrastructureError, UserError, WeightUpdateError

if TYPE_CHECKING:
    import torch

DEADLINE_S = 300.0


class NcclTransfer:
    """The learner's end of one server's NCCL group; created at the first update."""

    def __init__(self, dtype: str, *, address: str = "127.0.0.1") -> None:
        self._dtype, self._address = dtype, address
        self._sender: Any = None
        self._source: Any = None
        self._client: VllmClient | None = None

    async def send(self, client: VllmClient, update: WeightUpdate) -> None:
        """Broadcast the learner's tensors into the server's workers."""
        if update.state is None:
            raise UserError(f"{client.name}: NCCL needs tensors; version {update.version} has none")
        if self._sender is None or self._client is not client:
            await self._open(client)
        self._source.state = update.state
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.to_thread(self._sender.send_weights)
        except (RuntimeError, TimeoutError, InfrastructureError) as error:
            self._sender = None  # the group cannot be used again
            raise WeightUpdateError(
                f"{client.name}: NCCL transfer of version {update.version} failed: {error!r}"
            ) from error

    async def _open(self, client: VllmClient) -> None:
        """Form the NCCL group: this process is rank 0, the server's workers follow."""
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self._source = make_source(self._dtype)
        info = NCCLTrainerInitInfo(
            master_address=self._address,
            master_port=_free_port(self._address),
            world_size=1 + await client.world_size(DEADLINE_S),
            rank=0,
        )
        phases = _Phases(client, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(DEADLINE_S):
                self._sender = await asyncio.to_thread(
                    NCCLTrainerWeightTransferEngine.trainer_init,
                    info,
                    client=phases,
                    source=self._source,
                )
        except (RuntimeError, TimeoutError) as error:
            raise EngineError(f"{client.name}: the NCCL group was not formed: {error!r}") from error
        self._client = client


class _Phases:
    """The methods that vLLM's trainer engine calls from its threads; they use our client."""

    def __init__(self, client: VllmClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        body = {"init_info": init_info}
        self._do(self._client.control("/init_weight_transfer_engine", DEADLINE_S, body))

    def start_weight_update(self) -> None:
        self._do(self._client.control("/start_weight_update", DEADLINE_S, {}))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        body = {"update_info": update_info}
        self._do(self._client.control("/update_weights", DEADLINE_S, body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._do(self._client.control("/finish_weight_update", DEADLINE_S, body))


def make_source(dtype: str) -> Any:
    """A `WeightSource` over a state dict that is set before each update."""
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    sent_dtype: torch.dtype = getattr(torch, dtype)

    class StateSource(WeightSource):  # type: ignore[misc, unused-ignore]  # vllm has no types here
        """Each tensor once, in the transfer dtype, on this process's GPU."""

        state: Mapping[str, torch.Tensor] = {}

        def _unique(self) -> Iterator[tuple[str, torch.Tensor]]:
            seen: set[int] = set()
            for name, value in self.state.items():
                if value.data_ptr() not in seen:  # tied weights are sent under their first name
                    seen.add(value.data_ptr())
                    yield name, value

        def metadata(self) -> list[Any]:
            return [
                ParamMeta(name, sent_dtype, tuple(value.shape)) for name, value in self._unique()
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in self._unique():
                yield name, value.to("cuda", sent_dtype)

    return StateSource()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port

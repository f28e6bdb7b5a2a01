"""The load balancer for verl, loaded and called as verl's server client does, on a real Ray.

As trainers/test_verl.py, it runs with `make test-cluster`. The servers' actors are scripted: they
answer with as many tokens as asked for, without a GPU. Their metrics come over HTTP from scripted
servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.scripted_vllm import ScriptedVllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of verl and its dependencies, about themselves
    pytest.mark.skipif(find_spec("ray") is None, reason="verl needs Ray: make test-cluster"),
]
ROOT = Path(__file__).resolve().parents[2]


class ScriptedActor:
    """Stands for verl's server actor: answers once `open` was called."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def open(self) -> None:
        self.gate.set()

    async def generate(self, request_id: str, sampling_params: Any, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        await self.gate.wait()
        return TokenOutput(token_ids=list(range(sampling_params["max_tokens"])))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture
async def servers() -> AsyncIterator[list[ScriptedVllm]]:
    started = [ScriptedVllm(blocks=64), ScriptedVllm(blocks=64)]
    for server in started:
        await server.start()
    yield started
    for server in started:
        await server.stop()


@pytest.fixture
def balancer(
    cluster: Any, servers: list[ScriptedVllm], tmp_path: Path
) -> Iterator[SimpleNamespace]:
    """verl's client with our balancer, made from the configuration file as verl makes it."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    config = tmp_path / "router.yaml"
    config.write_text("router_class: rstar2.router.verl.ScheduledServers\nmax_sequences: 8\n")
    scripted = cluster.remote(num_cpus=0)(ScriptedActor)
    actors = {server.name: scripted.remote() for server in servers}
    handle = get_router_handle(actors, router_config_path=str(config))
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    client = LLMServerClient(
        SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), handle
    )
    yield SimpleNamespace(handle=handle, client=client, actors=actors)
    for actor in (handle, *actors.values()):
        cluster.kill(actor)


async def _until(balancer: SimpleNamespace, key: str, value: int) -> dict[str, Any]:
    """Wait for a figure of the balancer; the deadline is for a hang."""
    async with asyncio.timeout(120):
        while (status := await balancer.handle.get_status.remote())[key] != value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    result: dict[str, Any] = status
    return result


async def test_turns_wait_for_room_and_later_turns_stay(balancer: SimpleNamespace) -> None:
    """Two prompts of 900 tokens do not fit the 1,024 tokens of a server's cache."""
    client = balancer.client
    turns = [
        asyncio.ensure_future(
            client.generate(f"r{i}", prompt_ids=[1] * 900, sampling_params={"max_tokens": 100})
        )
        for i in range(4)
    ]
    await _until(balancer, "waiting", 2)
    status = await _until(balancer, "total_inflight", 2)
    assert sorted(status["servers"].values()) == [1, 1]
    await asyncio.gather(*(actor.open.remote() for actor in balancer.actors.values()))
    async with asyncio.timeout(120):
        outputs = await asyncio.gather(*turns)
    assert [len(output.token_ids) for output in outputs] == [100] * 4
    await _until(balancer, "total_inflight", 0)

    acquire = balancer.handle.acquire_server.remote
    first, _ = await acquire("again", prompt_ids=[1] * 50, sampling_params={"max_tokens": 20})
    await balancer.handle.release_server.remote(first, "again")
    second, _ = await acquire("again", prompt_ids=[1] * 80, sampling_params={"max_tokens": 20})
    assert second == first
    await balancer.handle.release_server.remote(second, "again")
    cleared = await balancer.handle.clear_sticky_cache.remote()
    assert cleared["cleared_entries"] == 5
    assert set(cleared["server_loads"].values()) == {0}


async def test_a_removed_server_gets_no_turns_until_it_is_added(balancer: SimpleNamespace) -> None:
    await asyncio.gather(*(actor.open.remote() for actor in balancer.actors.values()))
    gone, kept = balancer.actors
    await balancer.handle.remove_servers.remote([gone])
    assert await balancer.handle.get_all_servers.remote() == [kept]
    for name in ("a", "b", "c"):
        server, _ = await balancer.handle.acquire_server.remote(
            name, prompt_ids=[1] * 10, sampling_params={"max_tokens": 10}
        )
        assert server == kept
    await balancer.handle.add_servers.remote({gone: balancer.actors[gone]})
    await balancer.handle.remove_servers.remote([kept])  # with three turns that run there
    assert await balancer.handle.get_total_inflight.remote() == 0
    await balancer.handle.release_server.remote(kept, "a")
    server, _ = await balancer.handle.acquire_server.remote(
        "a", prompt_ids=[1] * 10, sampling_params={"max_tokens": 10}
    )
    assert server == gone


async def test_without_servers_that_report_a_request_fails(
    balancer: SimpleNamespace, servers: list[ScriptedVllm]
) -> None:
    await balancer.handle.remove_servers.remote([server.name for server in servers])
    with pytest.raises(RuntimeError, match="disable_log_stats"):
        await balancer.handle.acquire_server.remote(
            "a", prompt_ids=[1], sampling_params={"max_tokens": 10}
        )

"""Tests of the vLLM engine that need no vLLM; `tests/vllm` has those with real servers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rstar2.config import load_recipe
from rstar2.config.preflight import check_descriptors, check_supported
from rstar2.config.schema import DifficultyFilter
from rstar2.engine import http
from rstar2.engine.base import Engine
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.make import GpuDevice, device_names, make_engines, server_settings
from rstar2.engine.vllm import VllmEngine, _joined, _rest, _sampled_under
from rstar2.engine.vllm_client import ServerGauges, VllmClient, read_gauges
from rstar2.engine.vllm_server import ServerSettings, arguments_of, environment_of
from rstar2.engine.vllm_supervisor import members
from rstar2.errors import EngineError, RecipeError, UserError
from rstar2.http_client import LocalResourceError
from rstar2.types import Finish, Generation, Sampling

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="/m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="/m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="/m"} 7.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="65",sliding="None"} 1.0
vllm:iteration_tokens_total_count{engine="0",model_name="/m"} 40.0
vllm:generation_tokens_total{engine="0",model_name="/m"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="/m"} 500.0
vllm:prompt_tokens_cached_total{engine="0",model_name="/m"} 300.0
"""


def test_metrics_report_the_usable_blocks() -> None:
    """Block 0 is vLLM's own: 65 blocks hold 64 blocks of tokens."""
    assert read_gauges(METRICS) == ServerGauges(
        blocks=64,
        block_tokens=32,
        used_share=0.25,
        running=3,
        waiting=2,
        preemptions=7,
        steps=40,
        decoded=100,
        prefilled=200,
    )


def test_missing_metrics_are_named() -> None:
    with pytest.raises(KeyError, match="num_preemptions_total"):
        read_gauges(METRICS.replace("num_preemptions", "other"))


def settings(**changes: object) -> ServerSettings:
    values = {"model": "/m", "kv_tokens": 2048, "max_sequences": 8, "max_length": 512}
    return ServerSettings(**(values | changes))  # type: ignore[arg-type]


def test_a_server_gets_one_block_more_than_it_can_use() -> None:
    words = arguments_of(settings(), Path("/s"))
    assert words[words.index("--num-gpu-blocks-override") + 1] == "65"
    assert "--num-gpu-blocks-override" not in arguments_of(settings(kv_tokens=None), Path("/s"))


def test_extra_arguments_come_last() -> None:
    assert arguments_of(settings(arguments=("--seed", "3")), Path("/s"))[-2:] == ["--seed", "3"]


def test_linears_are_packed_only_on_request(tmp_path: Path) -> None:
    assert environment_of(settings(), tmp_path)["RSTAR2_ENGINE_PACKED"] == "0"
    assert environment_of(settings(packed_linears=True), tmp_path)["RSTAR2_ENGINE_PACKED"] == "1"


# --------------------------------------------------------------------------- interrupted requests


def generation(ids: range, *versions: tuple[int, int], finish: Finish = Finish.STOP) -> Generation:
    return Generation(tuple(ids), tuple(-float(i) for i in ids), versions, finish)


def test_tokens_of_other_weights_than_asked_for_are_dropped() -> None:
    mixed = generation(range(10), (4, 6), (5, 4))
    kept = _sampled_under(4, mixed)
    assert kept.token_ids == tuple(range(6))
    assert len(kept.logprobs) == 6
    assert kept.versions == ((4, 6),)
    assert kept.finish is Finish.CANCELLED
    assert _sampled_under(5, mixed).token_ids == ()
    whole = generation(range(10), (4, 10))
    assert _sampled_under(4, whole) is whole


def test_parts_of_an_interrupted_request_make_one() -> None:
    first = generation(range(3), (4, 3), finish=Finish.CANCELLED)
    both = _joined(first, generation(range(3, 8), (5, 5)))
    assert both.token_ids == tuple(range(8))
    assert both.versions == ((4, 3), (5, 5))
    assert both.finish is Finish.STOP
    rest = _rest(Sampling(10, seed=7), 3)
    assert (rest.max_new_tokens, rest.seed) == (7, 10)


# --------------------------------------------------------------------------- recipes


def test_recipe_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[check_supported.__module__], "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="vLLM is not installed"):
        check_supported(load_recipe("tiny-vllm").recipe)
    given = load_recipe("tiny-vllm", ["engine.urls=[http://a:1, http://b:2]"]).recipe
    check_supported(given)


def test_engines_are_made_as_the_recipe_says() -> None:
    own = make_engines(load_recipe("tiny-vllm").recipe, "/m")
    assert [e.name for e in own] == ["vllm-0", "vllm-1"]
    assert all(isinstance(e, VllmEngine) and e.weight_transfer == "files" for e in own)
    given = load_recipe("tiny-vllm", ["engine.urls=[http://a:1, http://b:2]"]).recipe
    assert len(make_engines(given, "/m")) == 2


def gpus(count: int, memory_gb: float = 80.0, visible: str | None = None) -> list[GpuDevice]:
    return [GpuDevice(name, memory_gb) for name in device_names(count, visible)]


def test_devices_are_those_that_the_user_listed() -> None:
    assert device_names(2, None) == ["0", "1"]
    assert device_names(3, "4, 5,6") == ["4", "5", "6"]
    assert device_names(2, "GPU-8932f937,GPU-46ab01c2") == ["GPU-8932f937", "GPU-46ab01c2"]
    recipe = load_recipe("tiny-vllm", ["engine.count=4"]).recipe
    servers = [server_settings(recipe, "/m", i, gpus(4, visible="4,5,6,7")) for i in range(4)]
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in servers] == ["5", "6", "7", "4"]
    one = server_settings(recipe, "/m", 0, gpus(1, visible="3"))
    assert one.environment == {}, "the server inherits the user's variable"


def share_of(settings: ServerSettings) -> float:
    arguments = arguments_of(settings, Path("/s"))
    return float(arguments[arguments.index("--gpu-memory-utilization") + 1])


def test_a_server_beside_the_learner_leaves_it_its_memory() -> None:
    recipe = load_recipe("tiny-vllm", ["engine.count=2"]).recipe

    def beside(memory_gb: float) -> float:
        return 0.9 - 30 / memory_gb

    two = [server_settings(recipe, "/m", i, gpus(2), beside) for i in range(2)]
    assert share_of(two[0]) == 0.9, "on GPU 1 there is no learner rank"
    assert share_of(two[1]) == pytest.approx(0.9 - 30 / 80)
    both = [server_settings(recipe, "/m", i, gpus(1), beside) for i in range(2)]
    assert [share_of(s) for s in both] == pytest.approx([(0.9 - 30 / 80) / 2] * 2, abs=1e-3)
    alone = server_settings(recipe, "/m", 0, gpus(1))
    assert share_of(alone) == pytest.approx(0.45), "an evaluation has no learner"
    given = load_recipe("tiny-vllm", ["engine.gpu_memory_share=0.4"]).recipe
    assert share_of(server_settings(given, "/m", 0, gpus(1), beside)) == 0.4
    on_cpu = arguments_of(server_settings(given, "/m", 0, ()), Path("/s"))
    assert "--gpu-memory-utilization" not in on_cpu


def test_an_engine_has_a_server_or_a_url() -> None:
    with pytest.raises(UserError, match="either"):
        VllmEngine("x")


async def test_a_server_that_is_not_there_is_an_engine_error() -> None:
    client = VllmClient("gone", url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match="gone: /health"):
        await client.health(120.0)
    await client.close()


async def test_an_invalid_response_is_an_engine_error() -> None:
    """A real socket that returns valid HTTP with an unexpected body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = VllmClient("odd", url=f"http://127.0.0.1:{port}")
    with pytest.raises(EngineError, match="invalid response"):
        await client.weight_version(120.0)
    with pytest.raises(EngineError, match="/metrics: missing"):
        await client.gauges(120.0)
    await client.close()
    server.close()
    await server.wait_closed()


# --------------------------------------------------------------------------- the supervisor

SERVER = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep({seconds})"
SUPERVISOR = (
    "import sys; from rstar2.engine.vllm_supervisor import supervise; "
    "sys.exit(supervise([sys.executable, '-c', {server!r}]))"
)
PARENT = (
    "import signal, sys, time; from rstar2.child import Child; "
    "child = Child('x', [sys.executable, '-c', {supervisor!r}], grace_s=60, "
    "parent_death_signal=signal.SIGTERM, kills_group=False); "
    "print(child.pid, flush=True); time.sleep(600)"
)


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("death", ["parent", "server", "asked"])
def test_the_supervisor_leaves_nothing_behind(death: str) -> None:
    """Neither the server nor a grandchild survives, whichever process ends first."""
    supervisor = SUPERVISOR.format(server=SERVER.format(seconds=600))
    command = [sys.executable, "-c", PARENT.format(supervisor=supervisor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        wait_for(lambda: len(members(group)) == 3)
        if death == "parent":
            parent.kill()
        elif death == "asked":
            os.kill(group, signal.SIGTERM)
        else:
            for pid in members(group):
                if b"Popen" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != group:
                    os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not members(group))
        parent.kill()


# --------------------------------------------------------------------------- connections


@asynccontextmanager
async def listening(path: Path, answer: Callable[[], Awaitable[None]]) -> AsyncIterator[list[int]]:
    """A server on a socket; yields the number of requests per connection so far."""
    requests: list[int] = []
    open_: set[int] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = len(requests)
        open_.add(index)
        requests.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                requests[index] += 1
                await answer()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        open_.discard(index)

    async with await asyncio.start_unix_server(serve, path):
        yield requests
        async with asyncio.timeout(60):
            while open_:  # noqa: ASYNC110 - the clients have closed their ends
                await asyncio.sleep(0.001)


async def test_all_turns_of_an_engine_are_requested_at_once(tmp_path: Path) -> None:
    """The client does not limit concurrency: each of 300 requests waits for all the others."""
    together = asyncio.Barrier(300)

    async def answer() -> None:
        await together.wait()

    async with listening(tmp_path / "s", answer):
        client = VllmClient("e", socket=tmp_path / "s")
        await asyncio.gather(*(client._ask("GET", "/", 120.0) for _ in range(300)))
        await client.close()


async def test_a_connection_that_the_server_may_close_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.2)

    async def answer() -> None: ...

    async with listening(tmp_path / "s", answer) as requests:
        client = VllmClient("e", socket=tmp_path / "s")
        await client._ask("GET", "/", 120.0)
        await asyncio.sleep(0.5)
        await client._ask("GET", "/", 120.0)
        await client.close()
    assert requests == [1, 1]


# --------------------------------------------------------------------------- descriptors


async def test_a_local_error_is_not_an_engines_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors a generation waits for one; other requests name the local error."""

    async def answer() -> None: ...

    async def no_descriptor(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with listening(tmp_path / "s", answer):
        client = VllmClient("e", socket=tmp_path / "s")
        loop = asyncio.get_running_loop()
        real = loop.create_unix_connection
        monkeypatch.setattr(loop, "create_unix_connection", no_descriptor)
        with pytest.raises(LocalResourceError, match="Too many open files"):
            await client.health(120.0)
        patient = asyncio.ensure_future(client._ask("GET", "/", 120.0, patient=True))
        await asyncio.sleep(0.01)
        assert not patient.done()
        monkeypatch.setattr(loop, "create_unix_connection", real)
        assert await patient == b""
        with pytest.raises(EngineError):
            await VllmClient("gone", socket=tmp_path / "nobody").health(120.0)
        await client.close()


def count_entries(directory: Path) -> int:
    return len(list(directory.iterdir()))


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
async def test_a_process_that_cannot_be_started_is_a_local_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is named, nothing is left open, and the next start may succeed."""

    def no_descriptor(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", no_descriptor)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine: Engine = (
        EmbeddedEngine(tmp_path, kv_tokens=64, max_sequences=1, max_length=64)
        if kind == "embedded"
        else VllmEngine("e", server=ServerSettings("m", 64, 1, 64))
    )
    before = count_entries(Path("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(LocalResourceError, match="Too many open files"):
            await engine.start()
    await engine.close()
    assert count_entries(Path("/proc/self/fd")) == before
    assert count_entries(tmp_path) == 0


DESCRIPTORS = """
import asyncio, resource
from pathlib import Path
from rstar2.descriptors import raise_descriptor_limit
from rstar2.engine.vllm_client import VllmClient

async def serve(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    await together.wait()
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")

async def main():
    global together
    together = asyncio.Barrier(400)
    async with await asyncio.start_unix_server(serve, "s", backlog=1000):
        client = VllmClient("e", socket=Path("s"))
        await asyncio.gather(*(client._ask("GET", "/", 60.0, patient=True) for _ in range(400)))
        await client.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
assert raise_descriptor_limit() == 4096
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_soft_limit_of_descriptors_does_not_bound_the_turns(tmp_path: Path) -> None:
    """400 requests at once, server and client in one process whose soft limit was 256."""
    done = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS.replace("\\\\", "\\")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_preflight_counts_the_connections() -> None:
    recipe = load_recipe("tiny-vllm", ["engine.urls=[http://a:1, http://b:2]"]).recipe
    check_descriptors(recipe, 1024)
    many = recipe.engine.model_copy(update={"max_sequences": 4096})
    rl = recipe.rl.model_copy(update={"prompts_per_step": 512})
    recipe = recipe.model_copy(update={"engine": many, "rl": rl})
    with pytest.raises(UserError, match=r"8192 turns at once.*may open 1024 files"):
        check_descriptors(recipe, 1024)


def test_preflight_counts_the_connections_of_a_difficulty_filter() -> None:
    """A step has few rollouts, but the filter before it keeps all engines full."""
    recipe = load_recipe("tiny-vllm", ["engine.urls=[http://a:1, http://b:2]"]).recipe
    many = recipe.engine.model_copy(update={"max_sequences": 4096})
    recipe = recipe.model_copy(update={"engine": many})
    check_descriptors(recipe, 1024)
    stage = recipe.rl.stages[0].model_copy(update={"difficulty": DifficultyFilter()})
    rl = recipe.rl.model_copy(update={"stages": (stage,)})
    with pytest.raises(UserError, match="8192 turns at once"):
        check_descriptors(recipe.model_copy(update={"rl": rl}), 1024)


# --------------------------------------------------------------------------- seeds


async def seeds_sent(path: Path, *, seeded: bool) -> list[object]:
    """The seeds that a server receives in a request for a generation."""
    seeds: list[object] = []
    choice = {
        "token_ids": [5],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(size))
        seeds.append(body["sampling_params"].get("seed"))
        answer = json.dumps({"choices": [choice]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        client = VllmClient("e", socket=path)
        made = await client.generate(
            (1, 2), Sampling(4, seed=77), salt="", deadline_s=60.0, seeded=seeded
        )
        assert made.token_ids == (5,)
        await client.close()
        await asyncio.sleep(0.01)
    return seeds


async def test_seeds_are_sent_only_if_asked_for(tmp_path: Path) -> None:
    assert await seeds_sent(tmp_path / "a", seeded=True) == [77]
    assert await seeds_sent(tmp_path / "b", seeded=False) == [None]


@pytest.mark.parametrize(("changes", "seeded"), [([], False), (["engine.seeded=true"], True)])
def test_recipes_seed_vllm_only_on_request(changes: list[str], seeded: bool) -> None:
    recipe = load_recipe("tiny-vllm", [*changes, "engine.urls=[http://a:1, http://b:2]"]).recipe
    engine, _ = make_engines(recipe, "/m")
    assert isinstance(engine, VllmEngine)
    assert engine._seeded is seeded

"""The embedded engine with a real worker, which is killed, cancelled and updated."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import GPT2Config

from rstar2.config import Recipe
from rstar2.engine.base import WeightUpdate
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.make import make_engines
from rstar2.errors import DeadlineError, EngineError, RecipeError, UserError
from rstar2.learner.model import load_policy
from rstar2.types import Finish, Generation, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = Sampling(max_new_tokens=20, temperature=0.0)
LONG = Sampling(max_new_tokens=1900, temperature=0.0)
DEADLINE_S = 120.0


def make(model: Path, **options: Any) -> EmbeddedEngine:
    sizes = {"kv_tokens": 8192, "max_sequences": 8, "max_length": 2048}
    return EmbeddedEngine(model, **(sizes | options))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(llama: Any) -> AsyncIterator[EmbeddedEngine]:
    """One worker process for the tests that do not change its state."""
    engine = make(llama.path)
    await engine.start()
    yield engine
    await engine.close()


async def go(engine: EmbeddedEngine, prompt: list[int], **options: Any) -> Generation:
    call: dict[str, Any] = {"sampling": GREEDY, "session": "", "deadline_s": DEADLINE_S} | options
    sampling = call.pop("sampling")
    return await engine.generate(prompt, sampling, **call)


async def until(condition: Callable[[], Any]) -> None:
    """Poll an async or plain condition; the test's own time-out is the deadline."""
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def open_files() -> set[Path]:
    gc.collect()  # or it may close files of earlier tests at any time
    return set(Path("/proc/self/fd").iterdir())


def worker_pid(engine: EmbeddedEngine) -> int:
    assert engine.pid is not None
    return engine.pid


async def test_concurrent_requests_equal_transformers(shared: EmbeddedEngine, llama: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(96) for _ in range(rng.randint(1, 60))] for _ in range(24)]
    outs = await asyncio.gather(*(go(shared, p, session=f"s{i}") for i, p in enumerate(prompts)))
    for prompt, out in zip(prompts, outs, strict=True):
        llama.check(prompt, out.token_ids, out.logprobs)
        assert out.finish is Finish.LENGTH
        assert out.versions == ((0, 20),)
        assert out.engine == "embedded-0"
        assert out.entropies is not None
        assert len(out.entropies) == 20
    again = await go(shared, [*prompts[0], *outs[0].token_ids, 5], session="s0")
    assert again.cached_tokens == len(prompts[0]) + 19
    for i in range(24):
        await shared.release(f"s{i}")
        await shared.release(f"s{i}")
    load = await shared.load()
    assert (load.kv_used, load.running, load.waiting, load.version) == (0, 0, 0, 0)


async def test_score_matches_generation(shared: EmbeddedEngine) -> None:
    out = await go(shared, [1, 2, 3])
    scored = await shared.score([1, 2, 3, *out.token_ids])
    assert scored[2:] == pytest.approx(list(out.logprobs), abs=1e-4)


async def test_capacity_is_in_whole_blocks(shared: EmbeddedEngine) -> None:
    capacity = shared.capacity()
    assert capacity.kv_tokens % capacity.block_tokens == 0
    assert (capacity.kv_tokens, capacity.max_sequences, capacity.max_length) == (8192, 8, 2048)


async def test_tokens_stream_in_order(shared: EmbeddedEngine) -> None:
    seen: list[int] = []
    pieces: list[int] = []

    def on_token(tokens: list[int]) -> None:
        seen.extend(tokens)
        pieces.append(len(tokens))

    out = await go(shared, [4, 5, 6], on_token=on_token)
    assert tuple(seen) == out.token_ids
    assert len(pieces) > 1


async def test_cancelling_frees_the_request(shared: EmbeddedEngine) -> None:
    tasks = [asyncio.create_task(go(shared, [i], sampling=LONG, session="x")) for i in range(12)]
    await until(lambda: _busy(shared))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: _empty(shared))


async def _busy(engine: EmbeddedEngine) -> bool:
    load = await engine.load()
    return load.running == 8 and load.waiting == 4


async def _empty(engine: EmbeddedEngine) -> bool:
    load = await engine.load()
    return load.running == load.waiting == load.kv_used == 0


async def test_a_deadline_raises_and_frees_the_request(shared: EmbeddedEngine) -> None:
    with pytest.raises(DeadlineError, match="generation"):
        await go(shared, [1], sampling=LONG, deadline_s=0.05)
    await until(lambda: _empty(shared))


async def test_bad_requests_are_the_callers_error(shared: EmbeddedEngine) -> None:
    with pytest.raises(UserError, match="exceeds"):
        await go(shared, [1] * 2000, sampling=LONG)
    with pytest.raises(UserError, match="vocabulary"):
        await shared.score([1, 1000])
    assert (await go(shared, [1])).finish is Finish.LENGTH


@pytest.mark.parametrize("process", [True, False])
async def test_the_event_loop_keeps_ticking(llama: Any, process: bool) -> None:
    engine = make(llama.path, process=process)
    await engine.start()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    try:
        out = await go(engine, [1], sampling=Sampling(max_new_tokens=300, temperature=0.0))
        assert len(out.token_ids) == 300
        assert ticks > 300
    finally:
        ticker.cancel()
        await engine.close()


@pytest.mark.parametrize("how", ["state", "path"])
async def test_weight_updates_reach_the_worker(llama: Any, other_llama: Any, how: str) -> None:
    engine = make(llama.path, process=how == "state", version=3)
    await engine.start()
    try:
        before = await go(engine, [1, 2, 3], session="a")
        assert before.versions == ((3, 20),)
        update = WeightUpdate(4, state=other_llama.model.state_dict())
        if how == "path":
            update = WeightUpdate(4, path=other_llama.path)
        await engine.update_weights(update)
        load = await engine.load()
        assert (load.version, load.kv_used) == (4, 0)
        after = await go(engine, [1, 2, 3], session="a")
        assert after.versions == ((4, 20),)
        assert after.cached_tokens == 0
        other_llama.check([1, 2, 3], after.token_ids, after.logprobs)
        with pytest.raises(UserError, match="missing"):
            await engine.update_weights(WeightUpdate(5, state={}))
        assert (await engine.load()).version == 4
    finally:
        await engine.close()


async def test_an_update_does_not_wait_for_running_requests(llama: Any, other_llama: Any) -> None:
    engine = make(llama.path)
    await engine.start()
    try:
        sampling = Sampling(max_new_tokens=900, temperature=0.0)
        task = asyncio.create_task(go(engine, [1], sampling=sampling))
        await until(lambda: _any_running(engine))
        await engine.update_weights(WeightUpdate(1, state=other_llama.model.state_dict()))
        assert not task.done()
        out = await task
        assert [version for version, _ in out.versions] == [0, 1]
        assert sum(count for _, count in out.versions) == 900
    finally:
        await engine.close()


async def test_a_killed_worker_fails_its_calls_by_name_and_can_be_restarted(llama: Any) -> None:
    engine = make(llama.path)
    await engine.start()
    try:
        tasks = [asyncio.create_task(go(engine, [i], sampling=LONG)) for i in range(3)]
        await until(lambda: _any_running(engine))
        os.kill(worker_pid(engine), signal.SIGKILL)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "killed by SIGKILL" in str(result)
        with pytest.raises(EngineError, match="start"):
            await go(engine, [1])
        with pytest.raises(EngineError):
            await engine.load()
        await engine.release("anything")
        await engine.start()
        out = await go(engine, [1, 2])
        llama.check([1, 2], out.token_ids, out.logprobs)
    finally:
        await engine.close()


async def _any_running(engine: EmbeddedEngine) -> bool:
    return (await engine.load()).running > 0


@pytest.mark.parametrize("process", [True, False])
async def test_close_fails_what_is_pending_and_leaves_nothing(llama: Any, process: bool) -> None:
    files = open_files()
    threads = {t.name for t in threading.enumerate() if t.name.startswith("engine-")}
    engine = make(llama.path, process=process)
    await engine.start()
    pid = worker_pid(engine) if process else None
    task = asyncio.create_task(go(engine, [1], sampling=LONG))
    await until(lambda: _any_running(engine))
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="not started"):
        await engine.load()
    assert pid is None or not alive(pid)
    assert {t.name for t in threading.enumerate() if t.name.startswith("engine-")} == threads
    assert open_files() == files


async def test_models_it_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        await make(tmp_path).start()
    GPT2Config().save_pretrained(tmp_path)
    engine = make(tmp_path, process=False)
    with pytest.raises(UserError, match="'gpt2'; the embedded engine runs llama"):
        await engine.start()
    await engine.close()


async def test_damaged_weights_are_named(tmp_path: Path, tiny_dir: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    engine = EmbeddedEngine(tmp_path, kv_tokens=256, max_sequences=1, max_length=64)
    with pytest.raises(UserError, match=r"weights in .*model\.safetensors cannot be read"):
        await engine.start()
    with pytest.raises(RecipeError, match=r"cannot be read .* Copy or download it again"):
        load_policy(tmp_path, "cpu")


async def test_a_worker_that_fails_to_start_says_why(tmp_path: Path, tiny_dir: Path) -> None:
    """An error without a name of ours reaches the engine, not "None"."""
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    engine = EmbeddedEngine(tmp_path, kv_tokens=256, max_sequences=1, max_length=64)
    with pytest.raises((EngineError, UserError)) as raised:
        await engine.start()
    assert not str(raised.value).endswith("None")


PARENT = """
import asyncio, sys
from rstar2.config import Recipe
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.make import make_engines

async def main():
    engine = EmbeddedEngine(sys.argv[1], kv_tokens=1024, max_sequences=2, max_length=256)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_worker_dies_with_its_parent(llama: Any) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(llama.path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.communicate()
    await until(lambda: not alive(pid))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_a_recipe_chooses_the_number_format_of_its_engines(
    llama: Any, quantization: str
) -> None:
    """Logprobs are near those of transformers in float32, and not equal to them."""
    recipe = Recipe.model_validate(
        {
            "name": "narrow",
            "model": {"path": str(llama.path), "dtype": "bfloat16", "max_length": 256},
            "engine": {"kv_tokens": 1024, "max_sequences": 4, "quantization": quantization},
        }
    )
    (engine,) = make_engines(recipe, llama.path)
    await engine.start()
    try:
        assert (await engine.held_weights()).dtype == "bfloat16"
        ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
        exact = llama.logprobs(ids).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        gaps = (torch.tensor(await engine.score(ids)) - exact).abs()
        assert 0 < gaps.max() < 0.1
        held = await engine.held_weights()
        await engine.update_weights(WeightUpdate(1, state=llama.model.state_dict()))  # float32
        assert await engine.held_weights() == held
    finally:
        await engine.close()

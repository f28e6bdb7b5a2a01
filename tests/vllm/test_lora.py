"""LoRA adapters that a real server loads at run time, and the proof that it applies them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rstar2.config import LearnerConfig, LoraConfig, OptimizerConfig
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.errors import WeightUpdateError
from rstar2.learner.learner import Learner
from rstar2.learner.lora import rehearse
from rstar2.learner.tiny import make_tiny
from rstar2.learner.weights import publish
from rstar2.types import Sampling
from tests.vllm.serving import KV_TOKENS, MAX_LENGTH, SEQUENCES

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE = tuple(range(10, 60))
ROWS = [((20, 21, 22, 23) * 8, (0, 1, 1, 1) * 8)]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, 0)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    settings = ServerSettings(
        model=str(model),
        kv_tokens=KV_TOKENS,
        max_sequences=SEQUENCES,
        max_length=MAX_LENGTH,
        lora_rank=4,
    )
    made = VllmEngine("lora", server=settings)
    await made.start()
    yield made
    await made.close()


def learner_of(model: Path) -> Learner:
    config = LearnerConfig(lora=LoraConfig(rank=4, alpha=8))
    return Learner(model, config, OptimizerConfig(lr=1e-2), total_steps=20, seed=0)


async def test_an_adapter_is_loaded_proven_and_replaced(model: Path, engine: VllmEngine) -> None:
    assert engine.weight_transfer == "adapter"
    learner = learner_of(model)
    before = learner.logprobs([PROBE])[0]
    rehearsed = await rehearse(
        learner, [engine], PROBE, tolerance=TOLERANCE, in_thread=asyncio.to_thread
    )
    assert rehearsed.metrics["weights/rehearsal_gap"] >= 4 * TOLERANCE
    for version in (1, 2):
        for _ in range(3):
            learner.sft_step(ROWS)
        now = learner.logprobs([PROBE])[0]
        assert max(abs(a - b) for a, b in zip(before, now, strict=True)) > 10 * TOLERANCE
        metrics = (await publish(learner, [engine], version, PROBE)).metrics
        print({name: value for name, value in metrics.items() if "probe" in name or "mega" in name})
        before = now
    made = await engine.generate(PROBE, Sampling(8, seed=1), session="s", deadline_s=120)
    whole = [*PROBE, *made.token_ids]
    scored = learner.logprobs([whole])[0][-8:]
    gaps = [abs(a - b) for a, b in zip(made.logprobs, scored, strict=True)]
    assert max(gaps) < TOLERANCE, "rollouts are sampled from the adapted policy"
    assert made.versions == ((2, 8),)


async def test_a_loaded_adapter_that_requests_do_not_use_is_refused(
    model: Path, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update succeeds and the server lists the adapter, but serves the model without it."""
    load = engine.client.load_adapter

    async def forgetful(path: Path, deadline_s: float) -> None:
        await load(path, deadline_s)
        engine.client.adapter = None

    monkeypatch.setattr(engine.client, "load_adapter", forgetful)
    learner = learner_of(model)
    await publish(learner, [engine], 3, PROBE)  # nothing to see: a new adapter has no effect
    with pytest.raises(WeightUpdateError, match="does not apply LoRA adapters"):
        await rehearse(learner, [engine], PROBE, tolerance=TOLERANCE, in_thread=asyncio.to_thread)

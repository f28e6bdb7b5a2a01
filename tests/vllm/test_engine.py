"""One vLLM engine against transformers: tokens, logprobs, weights, caches, cancellation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rstar2.engine.base import WeightUpdate
from rstar2.engine.vllm import STALE, VllmEngine
from rstar2.engine.vllm_server import STEP_TOKENS
from rstar2.errors import DeadlineError, EngineError, UserError, WeightUpdateError
from rstar2.learner.weights import publish
from rstar2.types import EngineCapacity, Finish, Generation, Sampling
from tests.vllm.reference import Reference, learner_of
from tests.vllm.serving import KV_TOKENS, MAX_LENGTH, SEQUENCES, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPTS = [[1, 40, 41, 42], list(range(30, 130)), [7, *range(300, 340)], [1, 1, 2, 3, 5, 8, 13, 21]]
PROBE = list(range(20, 84))
LONG = 400

Engines = tuple[VllmEngine, VllmEngine, VllmEngine]


async def sample(engine: VllmEngine, prompt: list[int], count: int, **how: object) -> Generation:
    sampling = Sampling(max_new_tokens=count, **how)  # type: ignore[arg-type]
    return await engine.generate(prompt, sampling, session="g/0", deadline_s=120.0)


async def test_capacity_and_load_are_reported(engines: Engines) -> None:
    capacity = engines[0].capacity()
    assert capacity == EngineCapacity(KV_TOKENS, SEQUENCES, MAX_LENGTH, block_tokens=32)
    load = await engines[0].load()
    assert (load.kv_used, load.running, load.waiting) == (0, 0, 0)


async def test_a_started_server_is_stale(engines: Engines) -> None:
    assert await engines[2].client.weight_version(60.0) == STALE


async def test_greedy_tokens_equal_transformers(engines: Engines, stage: Path) -> None:
    reference = Reference(stage)
    outs = await asyncio.gather(*(sample(engines[0], p, 48, temperature=0.0) for p in PROMPTS))
    for prompt, generation in zip(PROMPTS, outs, strict=True):
        assert list(generation.token_ids) == reference.greedy(prompt, 48)
        assert generation.finish is Finish.LENGTH
        assert generation.engine == "vllm-0"


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.3, 20)])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engines: Engines, stage: Path, temperature: float, top_k: int
) -> None:
    reference = Reference(stage)
    for seed, prompt in enumerate(PROMPTS):
        generation = await sample(
            engines[0], prompt, 32, temperature=temperature, top_k=top_k, seed=seed
        )
        expected = reference.logprobs(
            prompt, generation.token_ids, temperature=temperature, top_k=top_k
        )
        assert generation.logprobs == pytest.approx(expected, abs=1e-3)
        assert sum(n for _, n in generation.versions) == len(generation.token_ids)


async def test_scores_equal_the_learners(engines: Engines, stage: Path) -> None:
    expected = learner_of(stage).logprobs([PROBE])[0]
    assert await engines[0].score(PROBE) == pytest.approx(expected, abs=1e-4)


async def test_stop_tokens_end_a_turn_and_are_its_last(engines: Engines) -> None:
    free = await sample(engines[0], PROMPTS[1], 24, temperature=0.0)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    stopped = await sample(engines[0], PROMPTS[1], 24, temperature=0.0, stop_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish is Finish.STOP


async def test_a_seed_draws_the_same_whatever_runs_beside_it(engines: Engines) -> None:
    alone = await sample(engines[0], PROMPTS[0], 24, seed=11)
    crowd = [sample(engines[0], PROMPTS[0], 24, seed=seed) for seed in range(12)]
    beside = await asyncio.gather(*crowd)
    assert beside[11].token_ids == alone.token_ids
    assert len({g.token_ids for g in beside}) > 1


async def test_seeded_prompts_may_be_more_than_one_step_computes(engines: Engines) -> None:
    prompts = [[10 + i, *range(40, 240)] for i in range(3 * STEP_TOKENS // 400)]
    outs = await asyncio.gather(
        *(sample(engines[0], prompt, 4, seed=i) for i, prompt in enumerate(prompts))
    )
    assert [len(generation.token_ids) for generation in outs] == [4] * len(prompts)


async def test_what_cannot_be_served_is_the_callers_mistake(engines: Engines) -> None:
    with pytest.raises(UserError, match="answered 400"):
        await sample(engines[0], [1] * (MAX_LENGTH + 5), 4)


async def sample_without_end(engine: VllmEngine) -> None:
    """Keep one request running; on a busy machine one alone may end before it is observed."""
    while True:
        await sample(engine, PROMPTS[0], LONG)


async def test_cancelling_frees_the_engine(engines: Engines) -> None:
    task = asyncio.ensure_future(sample_without_end(engines[0]))
    await until(engines[0], lambda load: load.running > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    load = await until(engines[0], lambda load: load.running == 0)
    assert load.kv_used == 0


async def test_a_deadline_is_named_and_frees_the_engine(engines: Engines) -> None:
    with pytest.raises(DeadlineError, match="vllm-0"):
        await engines[0].generate(
            PROMPTS[0], Sampling(max_new_tokens=LONG), session="g/0", deadline_s=0.05
        )
    await until(engines[0], lambda load: load.running == 0)


async def test_an_engine_that_was_never_started_says_so() -> None:
    engine = VllmEngine("nobody", url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match="not started"):
        await engine.score(PROBE)
    with pytest.raises(EngineError, match="does not answer"):
        await engine.start()


# --------------------------------------------------------------------------- weights


async def test_new_weights_serve_once_they_are_verified(
    engines: Engines, stage: Path, other: Path
) -> None:
    """In both directions: after an update the engine serves the new policy, token for token."""
    for version, path in ((1, other), (2, stage)):
        made = await publish(learner_of(path), engines[:2], version, PROBE)
        assert made.proven == tuple(engines[:2])
        assert made.metrics["weights/probe_gap"] < 1e-4
        reference = Reference(path)
        for engine in engines[:2]:
            assert await engine.client.weight_version(60.0) == version
            generation = await sample(engine, PROMPTS[1], 32, temperature=0.0)
            assert list(generation.token_ids) == reference.greedy(PROMPTS[1], 32)
            assert generation.versions == ((version, 32),)


async def test_a_cached_prefix_does_not_cross_versions(engines: Engines, stage: Path) -> None:
    prompt = [9, *range(200, 330)]
    assert (await sample(engines[0], prompt, 4)).cached_tokens == 0
    assert (await sample(engines[0], prompt, 4)).cached_tokens >= 96, "within a version it is used"
    await publish(learner_of(stage), [engines[0]], 3, PROBE)
    assert (await sample(engines[0], prompt, 4)).cached_tokens == 0


async def interrupted_by_an_update(
    engine: VllmEngine, old: Path, new: Path
) -> tuple[int, list[asyncio.Task[Generation]]]:
    """Requests that were running when new weights arrived, and the version of the old weights.

    On a busy machine requests may end before the update arrives: then others are started.
    """
    for version in range(4, 44, 2):
        await publish(learner_of(old), [engine], version, PROBE)
        running = [
            asyncio.ensure_future(sample(engine, PROMPTS[0], LONG, temperature=0.0))
            for _ in range(3)
        ]
        ended = asyncio.gather(*running)
        await until(engine, lambda load: load.kv_used > 96, unless=ended)  # tokens are sampled
        await engine.update_weights(WeightUpdate(version + 1, path=new, hold=True))
        if not any(task.done() for task in running):
            return version, running
        await engine.resume()
        await ended
    raise AssertionError("all requests ended before an update could interrupt them")


async def test_requests_interrupted_by_an_update_continue_under_the_new_weights(
    engines: Engines, stage: Path, other: Path
) -> None:
    """They keep their tokens and wait for verification; each token carries its version."""
    engine = engines[0]
    version, running = await interrupted_by_an_update(engine, stage, other)
    for _ in range(3):  # each score is a step of the engine in which the others could sample
        assert await engine.score(PROBE) == pytest.approx(
            learner_of(other).logprobs([PROBE])[0], abs=1e-4
        )
        assert (await engine.load()).running == 0, "nothing is sampled before resume"
    assert not any(task.done() for task in running)
    await engine.resume()
    reference = {version: Reference(stage), version + 1: Reference(other)}
    for generation in await asyncio.gather(*running):
        (old, before), (new, after) = generation.versions
        assert (old, new, before + after) == (version, version + 1, LONG)
        assert before > 0
        ids = list(generation.token_ids)
        early, late = min(16, before), min(16, after)
        assert ids[:early] == reference[old].greedy(PROMPTS[0], early)
        assert ids[before : before + late] == reference[new].greedy(
            [*PROMPTS[0], *ids[:before]], late
        )


async def test_packed_linears_keep_old_weights_and_are_refused(
    engines: Engines, stage: Path, other: Path
) -> None:
    """vLLM's default on CPUs: all calls of the update succeed, but the old policy still serves."""
    packed = engines[2]
    learner = learner_of(other)
    gap = [
        abs(a - b)
        for a, b in zip(learner.logprobs([PROBE])[0], await packed.score(PROBE), strict=True)
    ]
    assert max(gap) > 0.05, "the two policies differ"
    with pytest.raises(WeightUpdateError, match="packed holds other weights"):
        await publish(learner, [packed], 1, PROBE)
    waiting = asyncio.ensure_future(
        packed.generate(PROMPTS[0], Sampling(4), session="g/0", deadline_s=2.0)
    )
    with pytest.raises(DeadlineError, match="not verified"):
        await waiting

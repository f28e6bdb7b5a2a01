"""Continuous batching equals transformers under arrivals, cancels, evictions and preemptions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rstar2.engine import batcher as batcher_module
from rstar2.engine.batcher import Batcher
from rstar2.engine.decoder import read_weights
from rstar2.engine.sequences import EndedRequest, EngineRequest
from rstar2.engine.worker import WorkerSettings, build
from rstar2.errors import UserError
from rstar2.types import Finish, Sampling

VOCABULARY = 96


def engine(reference: Any, *, kv_tokens: int = 4096, max_sequences: int = 16) -> Batcher:
    return build(
        WorkerSettings(
            model=str(reference.path),
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
            max_length=256,
            version=0,
            threads=1,
        )
    )


def request(
    id: int, prompt: list[int], session: str = "", *, new: int = 20, **sampling: Any
) -> EngineRequest:
    options = {"max_new_tokens": new, "temperature": 0.0} | sampling
    return EngineRequest(
        id=id,
        prompt=np.array(prompt, dtype=np.int64),
        sampling=Sampling(**options),
        session=session,
        arrived=0.0,
    )


def drain(batcher: Batcher) -> dict[int, EndedRequest]:
    ended: dict[int, EndedRequest] = {}
    while not batcher.idle:
        ended |= {end.request.id: end for end in batcher.step()}
        check_budget(batcher)
    return ended


def check_budget(batcher: Batcher) -> None:
    """The blocks in use equal those of rows and parked prefixes, and never exceed the total."""
    rows = sum(
        len(slab.owners) * slab.length // batcher.blocks.block for slab in batcher._slabs.values()
    )
    parked = sum(p.blocks for p in batcher._parked.values())
    assert rows + parked == batcher.blocks.used <= batcher.blocks.total
    assert batcher.load().running <= batcher.max_sequences


def ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


def test_greedy_tokens_are_those_of_transformers_generate(reference: Any) -> None:
    rng, batcher = random.Random(0), engine(reference)
    prompts = [ids(rng, n, n) for n in (1, 2, 15, 31, 32, 33, 70)]
    for i, prompt in enumerate(prompts):
        batcher.submit(request(i, prompt, new=50))
    ended = drain(batcher)
    for i, prompt in enumerate(prompts):
        expected = reference.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ended[i].request.tokens == expected[0, len(prompt) :].tolist()
        assert ended[i].finish is Finish.LENGTH


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_equals_transformers(
    reference: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrivals, cancels, releases, turns that extend their prefix, and a small KV cache."""
    monkeypatch.setattr(batcher_module, "PREFILL_TOKENS", 48)  # long prompts span steps
    rng = random.Random(seed)
    batcher = engine(reference, kv_tokens=640, max_sequences=6)
    popular = ids(rng, 60, 60)
    prompts: dict[int, list[int]] = {}
    history: dict[str, list[int]] = {}
    busy: dict[int, str] = {}
    cancelled: set[int] = set()
    checked = reused = 0
    for id in range(400):
        session = f"s{rng.randrange(12)}"
        if id < 300 and rng.random() < 0.35 and session not in busy.values():
            past = history.get(session, [])
            new = rng.randint(1, 40)
            prompt = past + ids(rng, 1, 60)
            if len(prompt) + new > 256:
                batcher.release(session)
                prompt = ids(rng, 1, 60)
            if not past and rng.random() < 0.5:
                prompt = popular
            prompts[id], busy[id] = prompt, session
            batcher.submit(request(id, prompt, session, new=new))
        if busy and rng.random() < 0.03:
            victim = rng.choice(sorted(busy))
            assert batcher.cancel(victim)
            history.pop(busy.pop(victim), None)
            cancelled.add(victim)
        for end in batcher.step():
            sampled = end.request.tokens
            reference.check(prompts[end.request.id], tuple(sampled), tuple(end.request.logprobs))
            assert (
                sum(n for _, n in end.request.versions)
                == len(sampled)
                == len(end.request.entropies)
            )
            history[busy.pop(end.request.id)] = prompts[end.request.id] + sampled
            checked += 1
            reused += end.request.cached > 0
        check_budget(batcher)
    ended = drain(batcher)
    assert cancelled.isdisjoint(ended)
    assert set(busy) == set(ended)
    assert checked + len(ended) + len(cancelled) == len(prompts)
    assert checked > 20
    assert reused > 3
    for session in [f"s{i}" for i in range(12)]:
        batcher.release(session)
    assert batcher.blocks.used == 0


def test_preemption_keeps_what_was_sampled(llama: Any) -> None:
    rng, batcher = random.Random(1), engine(llama, kv_tokens=256)
    prompts = [ids(rng, 25, 30) for _ in range(6)]
    for i, prompt in enumerate(prompts):
        batcher.submit(request(i, prompt, f"s{i}", new=100))
    ended = drain(batcher)
    assert batcher.load().preemptions > 0
    assert any(end.request.preempted_s > 0 for end in ended.values()), "preemption time is recorded"
    for i, prompt in enumerate(prompts):
        done = ended[i].request
        assert len(done.tokens) == 100
        llama.check(prompt, tuple(done.tokens), tuple(done.logprobs))


def test_a_turn_reuses_the_prefix_of_its_session(llama: Any) -> None:
    rng, batcher = random.Random(2), engine(llama)
    prompt = ids(rng, 40, 40)
    batcher.submit(request(0, prompt, "a"))
    first = drain(batcher)[0].request
    longer = prompt + first.tokens + ids(rng, 9, 9)
    batcher.submit(request(1, longer, "a"))
    batcher.submit(request(2, longer, "b"))
    ended = drain(batcher)
    assert (first.cached, ended[1].request.cached, ended[2].request.cached) == (0, 59, 0)
    assert ended[1].request.tokens == ended[2].request.tokens
    # A prompt that differs from the cached one reuses the common prefix.
    batcher.submit(request(3, [*longer[:50], (longer[50] + 1) % VOCABULARY], "a"))
    third = drain(batcher)[3].request
    assert third.cached == 50
    llama.check(
        [*longer[:50], (longer[50] + 1) % VOCABULARY], tuple(third.tokens), tuple(third.logprobs)
    )
    batcher.release("a")
    batcher.submit(request(4, longer, "a"))
    assert drain(batcher)[4].request.cached == 0


def test_equal_prompts_are_computed_once_and_sampled_as_if_alone(llama: Any) -> None:
    rng, batcher = random.Random(11), engine(llama)
    prompt = ids(rng, 50, 50)
    options: dict[str, Any] = {"temperature": 1.0, "new": 40}
    for i in range(6):
        batcher.submit(request(i, prompt, f"s{i}", seed=i, **options))
    batcher.step()
    batcher.submit(request(6, prompt, "late", seed=6, **options))
    ended = drain(batcher)
    assert [ended[i].request.cached for i in range(7)] == [0, 50, 50, 50, 50, 50, 50]
    for i in range(7):
        alone = engine(llama)
        alone.submit(request(i, prompt, seed=i, **options))
        expected = drain(alone)[i].request
        assert ended[i].request.tokens == expected.tokens
        np.testing.assert_allclose(ended[i].request.logprobs, expected.logprobs, atol=1e-5)


def test_a_shared_prompt_survives_the_request_that_computed_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "PREFILL_TOKENS", 48)
    rng, batcher = random.Random(12), engine(llama)
    prompt = ids(rng, 120, 120)
    for i in range(5):
        batcher.submit(request(i, prompt))
    batcher.step()
    batcher.cancel(0)  # in the middle of the prompt: the next request computes it
    batcher.step()
    batcher.cancel(2)  # a request that waits for the prompt
    ended = drain(batcher)
    assert {i: end.request.cached for i, end in ended.items()} == {1: 0, 3: 120, 4: 120}
    for end in ended.values():
        llama.check(prompt, tuple(end.request.tokens), tuple(end.request.logprobs))


def test_least_recently_used_prefixes_are_evicted_first(llama: Any) -> None:
    rng, batcher = random.Random(3), engine(llama, kv_tokens=320)  # ten blocks of 32
    prompts = {s: ids(rng, 70, 70) for s in "abcd"}  # three blocks each
    for i, session in enumerate("abcd"):
        batcher.submit(request(i, prompts[session], session, new=5))
        drain(batcher)
    for i, (session, cached) in enumerate([("d", 69), ("c", 69), ("a", 0)]):
        batcher.submit(request(10 + i, prompts[session], session, new=5))
        assert drain(batcher)[10 + i].request.cached == cached


def test_a_result_does_not_depend_on_neighbours_or_preemption(llama: Any) -> None:
    rng = random.Random(4)
    prompt = ids(rng, 20, 20)
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 30, "seed": 77}
    alone = engine(llama)
    alone.submit(request(0, prompt, new=60, **options))
    expected = drain(alone)[0].request
    crowded = engine(llama, kv_tokens=256)
    for i in range(1, 6):
        crowded.submit(request(i, ids(rng, 5, 40), new=60, temperature=1.0, seed=i))
        crowded.step()
    crowded.submit(request(0, prompt, new=60, **options))
    got = drain(crowded)[0].request
    assert crowded.load().preemptions > 0
    assert got.tokens == expected.tokens
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
    alone.submit(request(1, prompt, new=60, **(options | {"seed": 78})))
    assert drain(alone)[1].request.tokens != expected.tokens


def test_stop_tokens_end_a_request_and_are_kept(llama: Any) -> None:
    rng, batcher = random.Random(5), engine(llama)
    prompt = ids(rng, 20, 20)
    batcher.submit(request(0, prompt, new=30))
    free = drain(batcher)[0].request.tokens
    stop = free[10]
    batcher.submit(request(1, prompt, new=30, stop_ids=(VOCABULARY - 1, stop, 3)))
    batcher.submit(request(2, prompt, new=30))
    ended = drain(batcher)
    cut = min(i for i, t in enumerate(free) if t in (VOCABULARY - 1, stop, 3)) + 1
    assert ended[1].finish is Finish.STOP
    assert ended[1].request.tokens == free[:cut]
    assert ended[2].request.tokens == free


def test_new_weights_answer_as_the_new_model_and_drop_every_prefix(
    llama: Any, other_llama: Any
) -> None:
    rng, batcher = random.Random(6), engine(llama)
    prompt = ids(rng, 40, 40)
    batcher.submit(request(0, prompt, "a"))
    drain(batcher)
    assert batcher.load().kv_used > 0
    batcher.install(read_weights(other_llama.path), version=1)
    assert batcher.load().kv_used == 0
    batcher.submit(request(1, prompt, "a"))
    done = drain(batcher)[1].request
    assert done.cached == 0
    assert done.versions == [(1, 20)]
    other_llama.check(prompt, tuple(done.tokens), tuple(done.logprobs))


def test_a_running_request_continues_under_new_weights(llama: Any, other_llama: Any) -> None:
    rng, batcher = random.Random(7), engine(llama)
    prompt = ids(rng, 40, 40)
    batcher.submit(request(0, prompt, "a", new=30))
    for _ in range(12):
        batcher.step()
    batcher.install(read_weights(other_llama.path), version=5)
    done = drain(batcher)[0].request
    assert done.versions == [(0, 12), (5, 18)]
    assert batcher.load().preemptions == 0
    llama.check(prompt, tuple(done.tokens[:12]), tuple(done.logprobs[:12]))
    other_llama.check(prompt + done.tokens[:12], tuple(done.tokens[12:]), tuple(done.logprobs[12:]))


def test_weights_that_do_not_fit_change_nothing(llama: Any) -> None:
    rng, batcher = random.Random(8), engine(llama)
    prompt = ids(rng, 10, 10)
    state = read_weights(llama.path)
    missing = {k: v for k, v in state.items() if "layers.1.mlp.up" not in k}
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        batcher.install(missing, version=1)
    with pytest.raises(UserError, match="shape"):
        batcher.install(state | {"model.norm.weight": torch.ones(7)}, version=1)
    with pytest.raises(UserError, match="unknown tensors"):
        batcher.install(state | {"model.extra": torch.ones(7)}, version=1)
    batcher.submit(request(0, prompt))
    done = drain(batcher)[0].request
    assert done.versions == [(0, 20)]
    llama.check(prompt, tuple(done.tokens), tuple(done.logprobs))


def test_broken_weights_are_an_error_of_the_request_and_leave_no_trace(llama: Any) -> None:
    rng, batcher = random.Random(9), engine(llama)
    prompt = ids(rng, 10, 10)
    state = read_weights(llama.path)
    batcher.install({k: v * torch.nan for k, v in state.items()}, version=1)
    batcher.submit(request(0, prompt, "a"))
    assert "not finite" in str(drain(batcher)[0].error)
    batcher.install(state, version=2)
    batcher.submit(request(1, prompt, "a"))
    done = drain(batcher)[1].request
    llama.check(prompt, tuple(done.tokens), tuple(done.logprobs))


def test_score_is_transformers_logprob_of_each_token(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "PREFILL_TOKENS", 48)
    rng, batcher = random.Random(10), engine(reference)
    tokens = ids(rng, 100, 100)
    expected = reference.logprobs(tokens).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    scored = batcher.score(np.array(tokens))
    torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-4, rtol=0)
    assert batcher.score(np.array(tokens[:1])) == []
    assert batcher.blocks.used == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(0, []), "empty"),
        (request(0, [VOCABULARY]), "vocabulary"),
        (request(0, [1], new=0), "max_new_tokens"),
        (request(0, [1], new=256), "exceeds 256"),
        (request(0, [1], temperature=-1.0), "temperature"),
        (request(0, [1], top_p=0.0), "top_p"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(
    llama: Any, bad: EngineRequest, message: str
) -> None:
    batcher = engine(llama)
    with pytest.raises(UserError, match=message):
        batcher.submit(bad)
    assert batcher.idle


def test_a_request_larger_than_the_cache_is_refused(llama: Any) -> None:
    batcher = engine(llama, kv_tokens=100)
    with pytest.raises(UserError, match="KV for 96"):
        batcher.submit(request(0, [1] * 50, new=50))

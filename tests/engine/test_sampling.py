"""Sampling compared with transformers' logits warpers and with token frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rstar2.engine.sampling import RowSampling, sample, uniforms

WarpSettings = tuple[float, float, int]
"""Temperature, top_p and top_k of a row."""


def policy(rows: list[WarpSettings]) -> RowSampling:
    temperature, top_p, top_k = zip(*rows, strict=True)
    return RowSampling(
        np.array(temperature, np.float32), np.array(top_p, np.float32), np.array(top_k, np.int64)
    )


def warped(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Logprobs after transformers' own temperature, top-k and top-p, for one row."""
    z, ids = logits[None].clone(), torch.zeros(1, 1, dtype=torch.long)
    if temperature not in (0.0, 1.0):
        z = TemperatureLogitsWarper(temperature)(ids, z)
    if temperature and top_k:
        z = TopKLogitsWarper(top_k)(ids, z)
    if temperature and top_p < 1:
        z = TopPLogitsWarper(top_p)(ids, z)
    return torch.log_softmax(z[0], dim=-1)


rows = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0, 1, 5, 40, 1000]),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(rows, min_size=1, max_size=6), st.integers(0, 2**31))
def test_logprobs_and_entropies_are_those_of_the_warped_distribution(
    settings_: list[WarpSettings], seed: int
) -> None:
    logits = torch.randn(len(settings_), 50, generator=torch.Generator().manual_seed(seed)) * 3
    u = np.random.default_rng(seed).random(len(settings_))
    draw = sample(logits, policy(settings_), u)
    for i, row in enumerate(settings_):
        expected = warped(logits[i], *row)
        token = int(draw.tokens[i])
        if row[0] == 0:
            assert token == int(logits[i].argmax())
        assert draw.logprobs[i] == pytest.approx(float(expected[token]), abs=1e-5)
        entropy = float(torch.special.entr(expected.exp()).sum())
        assert draw.entropies[i] == pytest.approx(entropy, abs=1e-4)


@settings(deadline=None, max_examples=60)
@given(rows, st.lists(rows, min_size=1, max_size=5), st.integers(0, 2**31))
def test_a_row_does_not_see_its_neighbours(
    row: WarpSettings, others: list[WarpSettings], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1 + len(others), 50, generator=generator)
    u = np.random.default_rng(seed).random(1 + len(others))
    alone = sample(logits[:1], policy([row]), u[:1])
    among = sample(logits, policy([row, *others]), u)
    assert alone.tokens[0] == among.tokens[0]
    assert alone.logprobs[0] == pytest.approx(float(among.logprobs[0]), abs=1e-6)


@pytest.mark.parametrize("row", [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 7), (1.0, 0.9, 12)])
def test_frequencies_follow_the_distribution(row: tuple[float, float, int]) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3))
    n = 20_000
    u = (np.arange(n) + 0.5) / n  # evenly spaced: counts are exact to one sample
    draw = sample(logits.expand(n, -1), policy([row] * n), u)
    counts = np.bincount(draw.tokens, minlength=30) / n
    expected = warped(logits, *row).exp().numpy()
    np.testing.assert_allclose(counts, expected, atol=2 / n)


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.tensor([[-1e9, 0.0, 1.0, -1e9]]).expand(2, -1)
    draw = sample(logits, policy([(1.0, 1.0, 0)] * 2), np.array([0.0, 1.0 - 2.0**-53]))
    assert draw.tokens.tolist() == [1, 2]


def test_noise_is_a_function_of_seed_and_position_and_looks_uniform() -> None:
    seeds, positions = np.meshgrid(np.arange(64, dtype=np.uint64), np.arange(256, dtype=np.int64))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert np.array_equal(u[::-1], uniforms(seeds.ravel()[::-1], positions.ravel()[::-1]))
    assert len(np.unique(u)) == u.size
    assert u.min() >= 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=16, range=(0, 1))
    assert counts.min() > 0.85 * u.size / 16
    table = u.reshape(seeds.shape)
    # Neighbouring seeds and neighbouring positions are not correlated.
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03

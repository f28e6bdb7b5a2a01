"""Sampling: temperature, top-k and top-p, with random numbers that depend on the request alone.

Invariants:
- The random number of a token is a hash of (request seed, position in the sequence). It does not
  depend on other requests in the batch, arrival order, preemption or the engine.
- Rows are sampled independently: the filters of one row do not affect another.
- The logprob is that of the distribution the token was drawn from. Greedy sampling (temperature 0)
  reports logprob and entropy of the model's own distribution (temperature 1).

Order of filters, as in transformers and vLLM: temperature, then top-k, then top-p on the rest (the
smallest set of most likely tokens whose probability reaches top_p; at least one token).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), by hashing; numpy's uint64 wraps silently."""
    counter = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(_mix(seeds + _GOLDEN) ^ _mix(counter))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters per row of a batch; arrays are aligned with the rows of the logits."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row, with its logprob and the entropy of its distribution."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]


def keep_likely(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scaled logits with everything outside top-k and top-p at -inf; top_k 0 keeps all."""
    vocabulary = z.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    ranked, order = torch.sort(z, dim=-1, descending=True, stable=True)
    outside = torch.arange(vocabulary, device=z.device) >= k[:, None]
    ranked = ranked.masked_fill(outside, -torch.inf)
    p = torch.softmax(ranked, dim=-1)
    before = torch.cumsum(p, dim=-1, dtype=torch.float64) - p
    # top_p = 1 keeps all of top-k, regardless of rounding in the sum.
    cut = (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    cut[:, 0] = False
    ranked = ranked.masked_fill(cut, -torch.inf)
    return torch.empty_like(z).scatter_(-1, order, ranked)


def sample(logits: torch.Tensor, policy: RowSampling, u: npt.NDArray[np.float64]) -> Draw:
    """Draw one token per row by inverting the cumulative distribution at `u`."""
    device = logits.device
    z = logits.float()
    greedy = policy.temperature == 0
    if not np.all(policy.temperature == 1):
        scale = np.where(greedy, np.float32(1), policy.temperature)
        z = z / torch.from_numpy(scale).to(device)[:, None]
    filtered = np.flatnonzero(((policy.top_k > 0) | (policy.top_p < 1)) & ~greedy)
    if filtered.size:
        rows = torch.from_numpy(filtered).to(device)
        kept = keep_likely(
            z[rows],
            torch.from_numpy(policy.top_k[filtered]).to(device),
            torch.from_numpy(policy.top_p[filtered]).to(device),
        )
        z = z.index_copy(0, rows, kept)
    p = torch.softmax(z, dim=-1)
    # float64: in float32 the tail of a large vocabulary would be lost to rounding.
    cdf = torch.cumsum(p, dim=-1, dtype=torch.float64)
    total = cdf[:, -1]
    target = torch.from_numpy(u).to(device) * total
    # Strictly below the total, so that the first larger entry exists and has p > 0.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target[:, None], right=True)
    if greedy.any():
        best = z.argmax(dim=-1, keepdim=True)
        tokens = torch.where(torch.from_numpy(greedy).to(device)[:, None], best, tokens)
    tokens = tokens.clamp_(max=z.shape[-1] - 1)
    logprobs = p.gather(-1, tokens).log_().squeeze(-1)
    # entropy = logsumexp(z) - sum p z, with logsumexp(z) = z[token] - logprob[token]
    weighted = p * z
    if filtered.size:
        weighted = weighted.masked_fill_(z == -torch.inf, 0.0)
    entropies = z.gather(-1, tokens).squeeze(-1) - logprobs - weighted.sum(-1)
    return Draw(
        tokens=tokens.squeeze(-1).cpu().numpy(),
        logprobs=logprobs.cpu().numpy(),
        entropies=entropies.clamp_(min=0.0).cpu().numpy(),
    )

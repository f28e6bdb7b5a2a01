"""The state of running sequences, as arrays over slots, so that a step books all of them at once.

`known` counts the tokens of a sequence (prompt and sampled), `computed` those whose KV is cached;
while a sequence decodes, known is computed + 1: its last token is the next to compute.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rstar2.engine.sampling import Draw, Policy, uniforms
from rstar2.types import Sampling

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Slots:
    """One entry per running sequence; a slot's entries are meaningless while it is free."""

    def __init__(self, count: int, max_length: int) -> None:
        self.tokens = np.zeros((count, max_length), dtype=np.int64)
        self.logprobs = np.zeros((count, max_length), dtype=np.float32)
        self.entropies = np.zeros((count, max_length), dtype=np.float32)
        self.known = np.zeros(count, dtype=np.int64)
        self.computed = np.zeros(count, dtype=np.int64)
        self.first = np.zeros(count, dtype=np.int64)  # tokens known when the slot was taken
        self.row = np.zeros(count, dtype=np.int64)  # in the slab of its size
        self.size = np.zeros(count, dtype=np.int64)  # blocks of that row
        self._end = np.zeros(count, dtype=np.int64)  # length at which the request is complete
        self._temperature = np.ones(count, dtype=np.float32)
        self._top_p = np.ones(count, dtype=np.float32)
        self._top_k = np.zeros(count, dtype=np.int64)
        self._seed = np.zeros(count, dtype=np.uint64)
        self._stops = np.full((count, 1), -1, dtype=np.int64)

    def begin(self, slot: int, tokens: Ids, end: int, sampling: Sampling) -> None:
        """Take a slot for a sequence that knows `tokens` and may grow to `end`."""
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = self.first[slot] = len(tokens)
        self.computed[slot] = 0
        self._end[slot] = end
        self._temperature[slot] = sampling.temperature
        self._top_p[slot], self._top_k[slot] = sampling.top_p, sampling.top_k
        self._seed[slot] = np.uint64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
        stops = sampling.stop_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self.known), len(stops)), -1, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def policy(self, slots: Ids) -> Policy:
        return Policy(self._temperature[slots], self._top_p[slots], self._top_k[slots])

    def noise(self, slots: Ids) -> npt.NDArray[np.float64]:
        """One uniform number per slot, for the position it samples next."""
        return uniforms(self._seed[slots], self.known[slots])

    def book(self, slots: Ids, draw: Draw) -> tuple[Flags, Flags]:
        """Append one token to each; returns which are complete, and which of them by a stop."""
        known = self.known[slots]
        self.tokens[slots, known] = draw.tokens
        self.logprobs[slots, known] = draw.logprobs
        self.entropies[slots, known] = draw.entropies
        self.known[slots] = known + 1
        stopped = (self._stops[slots] == draw.tokens[:, None]).any(1)
        return stopped | (known + 1 >= self._end[slots]), stopped

    def sampled(self, slot: int) -> slice:
        """Where the tokens are that were sampled since the slot was taken."""
        return slice(int(self.first[slot]), int(self.known[slot]))

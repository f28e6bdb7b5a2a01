"""What to expect of a rollout: its final length, learnt from the rollouts that ended before it.

`LengthModel.expect` answers "how many tokens will this rollout hold in the end, given how many it
holds now?" with a quantile over those finished rollouts that got at least as far. Until enough of
these are known the answer is the limit (the paper's worst-case rule), and it is never above it.

A rollout that hit its length limit tells only that it wanted more: it counts as endless, so that a
later stage with a higher limit does not mistake the old limit for a length.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from math import ceil, inf


class LengthModel:
    """Quantiles of completion lengths over a sliding window of finished rollouts."""

    def __init__(self, quantile: float = 0.9, *, window: int = 2048, least: int = 32) -> None:
        self.quantile = quantile
        self.window = window
        self.least = least
        """Fewer finished rollouts than this say nothing: the limit is expected."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, completion: int, *, truncated: bool = False) -> None:
        """A rollout ended with this many completion tokens (tool responses included)."""
        value = inf if truncated else float(completion)
        if len(self._recent) == self.window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(value)
        insort(self._sorted, value)

    def expect(self, *, prompt: int, completion: int, limit: int) -> int:
        """Expected final tokens of a rollout that now holds `prompt` + `completion` tokens."""
        first = bisect_right(self._sorted, completion)
        survivors = len(self._sorted) - first
        if survivors < self.least:
            return limit
        rank = min(survivors, max(1, ceil(self.quantile * survivors)))
        length = self._sorted[first + rank - 1]
        return limit if length == inf else min(limit, prompt + int(length))

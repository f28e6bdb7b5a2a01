"""What the scheduler learns about time: how fast an engine is, and how long tools take.

**Speed** (`EngineSpeed`). A step of an engine takes `step_s` (it reads the weights, whatever the
batch) plus `sequence_s` per sampled token plus `token_s` per token of KV in use plus `prefill_s`
per prompt token. The four follow from the counters in an engine's load reports by least squares of
relative errors, in which old reports fade. Before there are reports, and for what they do not tell,
`PRIOR_RATIOS` hold: computing 250 tokens takes as long as the fixed part of one step. No
coefficient falls below a fifth of what these ratios give.

**Tool waits** (`ToolWaits`). Holding x tokens in a cache of K for w seconds costs the engine
w x / K; dropping and recomputing them costs x prefill_s. So a wait should be held up to the time t
that minimises E[min(w, t)] / K + prefill_s P(w > t), which the observed waits give.
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np
from scipy.optimize import nnls

from rstar2.types import EngineLoad

PRIOR_STEP_S = 0.02
PRIOR_RATIOS = np.array([1.0, 1 / 250, 1 / 200_000, 1 / 250])
"""step_s, sequence_s, token_s and prefill_s relative to step_s."""
FADE = 0.98
"""Weight of a report relative to the next one."""
RIDGE = 0.002
"""Weight of the prior relative to the reports."""
LEAST = 0.2
"""A coefficient's smallest value relative to the prior."""

BUCKETS, FIRST_WAIT_S = 64, 0.02
LEAST_WAITS, WAIT_FADE = 16.0, 0.998


class EngineSpeed:
    """The four coefficients of one engine, learnt from its load reports."""

    step_s: float
    sequence_s: float
    token_s: float
    prefill_s: float

    def __init__(self) -> None:
        self._set(PRIOR_STEP_S * PRIOR_RATIOS)
        self.learnt = False
        self._last: tuple[float, EngineLoad] | None = None
        self._moments = np.zeros((4, 4))
        self._sums = np.zeros(4)

    def report(self, load: EngineLoad, now: float) -> None:
        """A load report; the time since the last one counts if the engine was busy throughout."""
        last = self._last
        if last is not None and load.steps == last[1].steps and last[0] < now and load.running:
            return  # a long step is under way
        self._last = (now, load)
        if last is None or not (load.running and last[1].running):
            return
        seconds, before = now - last[0], last[1]
        steps, prefilled = load.steps - before.steps, load.prefilled - before.prefilled
        if seconds <= 0 or steps <= 0 or prefilled < 0:
            return  # the clock or the engine was restarted, or it does not count
        used = (load.kv_used + before.kv_used) / 2
        decoded = load.decoded - before.decoded
        row = PRIOR_RATIOS * (steps, decoded, steps * used, prefilled) / seconds
        self._moments = FADE * self._moments + np.outer(row, row)
        self._sums = FADE * self._sums + row
        self._solve()

    def _solve(self) -> None:
        """Least squares, drawn a little towards the prior's ratios at the measured speed."""
        moments, sums = self._moments, self._sums
        prior = float(sums.sum() / moments.sum())  # every coefficient, in units of PRIOR_RATIOS
        ridge = np.diag(RIDGE * moments.diagonal() + 1e-6 * moments.max())
        # minimise the quadratic form over coefficients of at least LEAST x prior
        root = np.linalg.cholesky(moments + ridge)
        right = sums + ridge.sum(axis=0) * prior - (moments + ridge).sum(axis=0) * LEAST * prior
        above, _ = nnls(root.T, np.linalg.solve(root, right))
        self._set((above + LEAST * prior) * PRIOR_RATIOS)
        self.learnt = True

    def _set(self, coefficients: np.ndarray) -> None:
        self.step_s, self.sequence_s, self.token_s, self.prefill_s = coefficients.tolist()

    def assume(self, other: EngineSpeed) -> None:
        """Take over the coefficients of another engine, until this one is measured."""
        self._set(np.array([other.step_s, other.sequence_s, other.token_s, other.prefill_s]))

    def seconds(self, sequences: float, tokens: float) -> float:
        """Seconds of a step of so many sequences, with this many tokens of KV in use."""
        return self.step_s + self.sequence_s * sequences + self.token_s * tokens


class ToolWaits:
    """How long tools take: observed waits, in buckets of a quarter of a doubling."""

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS)
        self._edges = FIRST_WAIT_S * 2 ** (np.arange(BUCKETS) / 4)
        self.mean = 0.0
        """The mean wait in seconds; 0 before there is any."""

    def observe(self, seconds: float) -> None:
        """A tool call has returned after this time."""
        index = (
            0
            if seconds <= FIRST_WAIT_S
            else min(BUCKETS - 1, ceil(4 * log2(seconds / FIRST_WAIT_S)))
        )
        self._counts *= WAIT_FADE
        self._counts[index] += 1
        self.mean = float(self._counts @ self._edges) / float(self._counts.sum())

    def hold_s(self, fill_s: float, default: float) -> float:
        """How long to hold a prefix if the engine takes `fill_s` to prefill its whole cache."""
        total = float(self._counts.sum())
        if total < LEAST_WAITS:
            return default
        shares = self._counts / total
        longer = 1.0 - np.cumsum(shares)
        spent = np.cumsum(shares * self._edges) + longer * self._edges
        return float(self._edges[int(np.argmin(spent + fill_s * longer))])

"""How far rounding may move the logprobs of the probe between engine and learner.

With float32 on both sides the tolerance is fixed. With a coarser format on either side (bfloat16,
or int8 in the engine) it is measured: an engine whose checksums prove that it holds the learner's
weights scores several texts, and the difference to the learner's logprobs is rounding alone. A
probe may then differ by `GAP_FACTOR` times the largest difference that was measured, then or at any
probe since.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rstar2.errors import InfrastructureError

if TYPE_CHECKING:
    from rstar2.engine.base import Engine
    from rstar2.learner.weights import InThread, Publication, WeightSource

log = logging.getLogger(__name__)

PROBE_TOLERANCE = 1e-3
"""Largest difference of a probe token's logprob, float32 on both sides."""
FIRST_TOLERANCE = 1.0
"""The same for coarser formats before anything was measured; checksums prove the weights."""
GAP_FACTOR = 4.0
"""For coarser formats the difference may be this times the largest one that was measured."""
ROUNDING_TEXTS = 16
"""Texts on which the difference is measured at first."""


def probe_tolerance(*dtypes: str, measured: float | None = None) -> float:
    """Largest allowed logprob difference between number formats; None: nothing was measured."""
    if all(dtype == "float32" for dtype in dtypes):
        return PROBE_TOLERANCE
    if measured is None:
        return FIRST_TOLERANCE
    return max(PROBE_TOLERANCE, GAP_FACTOR * measured)


class MeasuredTolerance:
    """The tolerance of a run's probes, from what was measured since its weights were loaded."""

    def __init__(self, *dtypes: str) -> None:
        self._dtypes = dtypes
        self._gap: float | None = None
        """Largest difference that was measured; None before the first publication."""

    @property
    def value(self) -> float:
        """What the next probe may differ by."""
        return probe_tolerance(*self._dtypes, measured=self._gap)

    def forget(self) -> None:
        """Measure again: the weights are about to change by more than RL changes them."""
        self._gap = None

    async def observe(
        self,
        made: Publication,
        learner: WeightSource,
        texts: Sequence[Sequence[int]],
        in_thread: InThread,
    ) -> dict[str, float]:
        """Measure a publication, the first one on all texts; returns metrics of it."""
        if all(dtype == "float32" for dtype in self._dtypes):
            return {}
        applied, gap = self.value, made.metrics["weights/probe_gap"]
        if self._gap is None:
            gap = max(gap, await _largest_gap(learner, made, texts, in_thread))
        self._gap = max(self._gap or 0.0, gap)
        return {"weights/tolerance": applied}


async def _largest_gap(
    learner: WeightSource, made: Publication, texts: Sequence[Sequence[int]], in_thread: InThread
) -> float:
    """Largest logprob difference over texts between the learner and one proven engine."""
    expected = await in_thread(learner.logprobs, texts)

    async def gap(engine: Engine) -> float:
        largest = 0.0
        for text, own in zip(texts, expected, strict=True):
            pairs = zip(await engine.score(text), own, strict=True)
            largest = max([largest, *(abs(theirs - mine) for theirs, mine in pairs)])
        return largest

    for engine in made.proven:
        try:
            return await gap(engine)
        except InfrastructureError as error:
            log.warning("the rounding of %s was not measured: %s", engine.name, error)
    return 0.0

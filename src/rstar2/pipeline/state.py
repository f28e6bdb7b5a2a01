"""The state of a run: everything besides the learner that a resumed run needs, as one small JSON.

A checkpoint holds it together with the learner's state, so the two cannot disagree. The stages
advance its fields and the controller reads them; nothing else decides what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec

from rstar2.errors import CheckpointError
from rstar2.pipeline.collapse import CollapseWindow
from rstar2.types import WeightVersion

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """State after the last completed step. Steps of a phase count from 1; 0: it has not started."""

    phase: str = ""
    """The phase that made the learner's weights: `sft` or the name of an RL stage."""
    step: int = 0
    done: tuple[str, ...] = ()
    """Phases that are complete, in order."""
    sft_steps: int = 0
    rl_steps: int = 0
    """RL steps over all stages."""
    position: int = 0
    """Next position in the problem order of the current RL stage."""
    version: WeightVersion = 0
    """Version of the learner's weights; every change that engines must receive adds 1."""
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Per RL stage with a difficulty filter: indices of the problems that it kept."""
    recent: tuple[float, ...] = ()
    """Last values of the metric whose plateau ends the current RL stage."""
    spent_s: float = 0.0
    """Seconds that the run has worked when this was saved; 0 without a time budget (`minutes`)."""
    begun_s: float | None = None
    """The same when the current RL stage began; None without a time budget."""
    window: CollapseWindow = field(default_factory=CollapseWindow)
    collapsed: str = ""
    """Why training was stopped early; empty if it was not."""
    format: int = FORMAT

    def begin(self, phase: str) -> Self:
        """The same state at the start of a phase, or within it if the phase has started."""
        if self.phase == phase:
            return self
        return replace(self, phase=phase, step=0, position=0, recent=(), begun_s=None)

    def finish(self, phase: str) -> Self:
        """The same state with the phase complete."""
        return replace(self, done=(*self.done, phase))

    @property
    def ordinal(self) -> int:
        """Number of all completed training steps of the run."""
        return self.sft_steps + self.rl_steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RunState:
        """Read a state back; raises CheckpointError for another format."""
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint has pipeline state format {values.get('format')}, "
                f"this rstar2 reads {FORMAT}"
            )
        try:
            return msgspec.convert(values, RunState)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint's pipeline state: {error}") from error

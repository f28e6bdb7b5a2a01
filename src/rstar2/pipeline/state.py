"""Where a run stands: everything besides the learner that a resumed run needs, as one small JSON.

It is written into the same checkpoint as the learner's state, so the two can't disagree. Every
field is advanced by the stages and read by the controller; nothing else decides what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec

from rstar2.errors import CheckpointError
from rstar2.types import WeightVersion

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Window:
    """What the collapse detector remembers of the steps behind it."""

    rewards: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    formats: tuple[float, ...] = ()
    best_reward: float = 0.0
    best_format: float = 0.0
    best_step: int = 0
    """Overall step that closed the best window."""


@dataclass(frozen=True, slots=True)
class State:
    """After the last completed step. Steps of a phase count from 1; 0 means it has not begun."""

    phase: str = ""
    """What the learner's weights come from: `sft` or the name of an RL stage."""
    step: int = 0
    done: tuple[str, ...] = ()
    """Phases that are complete, in order."""
    sft_steps: int = 0
    rl_steps: int = 0
    """RL steps over all stages."""
    position: int = 0
    """Next position in the problem order of the current RL stage."""
    version: WeightVersion = 0
    """Of the learner's weights: one more with every change that engines must see."""
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Per RL stage with a difficulty filter: indices of the problems that stayed."""
    window: Window = Window()
    collapsed: str = ""
    """Why training was stopped early; empty while it was not."""
    format: int = FORMAT

    def begin(self, phase: str) -> Self:
        """The same state at the start of a phase, or within it if it has begun already."""
        return self if self.phase == phase else replace(self, phase=phase, step=0, position=0)

    def finish(self, phase: str) -> Self:
        """The same state with the phase complete."""
        return replace(self, done=(*self.done, phase))

    @property
    def ordinal(self) -> int:
        """Counts all completed training steps of the run."""
        return self.sft_steps + self.rl_steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> State:
        """Read a state back; one of another format is refused by name."""
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint has pipeline state format {values.get('format')}, "
                f"this rstar2 reads {FORMAT}"
            )
        try:
            return msgspec.convert(values, State)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint's pipeline state: {error}") from error

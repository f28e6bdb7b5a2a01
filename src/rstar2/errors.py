"""What can go wrong, drawn. Failures of a rollout are data (types.Failure), not exceptions that
end a run; the exceptions below carry a name that ends up in that data or in one clear message.

    RstarError
    ├── UserError                 bad input: names the field, the value and the way out (exit 2)
    │   ├── RecipeError           a recipe that cannot work
    │   ├── DataError             a data file that cannot be read (names file and line)
    │   └── CheckpointError       a torn, foreign or missing checkpoint
    ├── InfrastructureError       our fault: retried, then dropped and counted; never reward 0
    │   ├── DeadlineError         a wait ran out
    │   ├── EngineError           an engine died, refused or answered nonsense
    │   ├── CodeEnvError          no server could execute a tool call
    │   │   ├── QueueFullError    back-pressure: try again after retry_after_s
    │   │   └── IsolationError    the asked-for isolation level cannot be had
    │   ├── GraderError           the grader failed (not: the answer was wrong)
    │   └── WeightUpdateError     an engine's probe did not match the learner after an update
    └── InvariantError            a promise of this code was broken: a bug, never retried
"""

from __future__ import annotations


class RstarError(Exception):
    """Root of every error that rstar2 raises on purpose."""

    @property
    def name(self) -> str:
        """Short snake-case name for records and metrics: EngineError -> engine."""
        words = type(self).__name__.removesuffix("Error")
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in words).lstrip("_")


class UserError(RstarError):
    """Bad input. The message names the field, the value and the way out."""


class RecipeError(UserError):
    """A recipe that cannot work."""


class DataError(UserError):
    """A data file that cannot be read as asked."""


class CheckpointError(UserError):
    """A torn, foreign or missing checkpoint."""


class InfrastructureError(RstarError):
    """Not the model's fault and not the user's: retry, then drop and count."""


class DeadlineError(InfrastructureError):
    """A wait ran out of time."""


class EngineError(InfrastructureError):
    """An inference engine died, refused or answered nonsense."""


class CodeEnvError(InfrastructureError):
    """No code environment could execute a call."""


class QueueFullError(CodeEnvError):
    """The bounded queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IsolationError(CodeEnvError):
    """The asked-for isolation level cannot be had here."""


class GraderError(InfrastructureError):
    """The grader itself failed; says nothing about the answer."""


class WeightUpdateError(InfrastructureError):
    """An engine's logprobs do not match the learner's after a weight update."""


class InvariantError(RstarError):
    """A promise of this code was broken. Always a bug."""

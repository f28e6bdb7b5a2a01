"""The exception hierarchy of rstar2.

A failed rollout is data (`types.Failure`) and does not end a run. The `name` of an exception is
what that data and the metrics show. An error that is raised all over the package is defined here;
one that belongs to a single module is defined there, and the drawing names that module in brackets.

    RstarError
    ├── UserError                                  bad input: what is wrong, and the fix (exit 2)
    │   ├── RecipeError                            a recipe that cannot work
    │   ├── DataError                              an unreadable data file (names file and line)
    │   ├── CheckpointError                        torn, missing or of another run
    │   │   └── TornError [learner.checkpoint]     incomplete on disk
    │   ├── NotRecordedError [viewer.run]          the run did not record this
    │   ├── MissingExtraError [extras]             a package that an extra of rstar2 installs
    │   ├── UndescribedModelError [model_config]   a model without a readable config.json
    │   ├── ChatRequestError [endpoint.chat]       a chat request that cannot be served
    │   ├── NotPossibleError [gpu_check.facts]     a check that this machine cannot make
    │   └── Refusal [codeenv.wire]                 a request that the code environment refuses
    ├── InfrastructureError                        retried, then dropped and counted; never reward 0
    │   ├── DeadlineError                          a wait timed out
    │   ├── StallError [rollout.turn_clocks]       no engine made progress while a turn waited
    │   ├── LocalResourceError [http_client]       this machine has no descriptor, port, ... left
    │   ├── DiskFullError                          a file could not be written: no space is left
    │   ├── EngineError                            an engine died, refused or sent an invalid answer
    │   ├── CodeEnvError                           no server could execute a tool call
    │   │   ├── QueueFullError                     back-pressure: try again after retry_after_s
    │   │   ├── IsolationError                     the requested isolation level is not available
    │   │   ├── SessionLostError                   a session ended; its state is gone
    │   │   ├── WorkerLostError [codeenv.server.zygotes]  a worker exited without a reply
    │   │   └── TransportError [codeenv.client.endpoint]  a server could not be reached
    │   ├── WeightUpdateError                      an engine's probe does not match the learner
    │   ├── RolloutFailure [api]                   a rollout that was lost; `failure` says why
    │   ├── RankError                              a learner rank died or failed
    │   ├── ToolServerError [environments.mcp]     an MCP server failed
    │   └── NodeError [cluster.nodes]              a cluster node, or an actor on it, was lost
    ├── ProgramError [endpoint.program]            an agent program failed: the rollout is dropped
    └── InvariantError                             a bug in this code: never retried
"""

from __future__ import annotations


class RstarError(Exception):
    """Base class of every error that rstar2 raises on purpose.

    Example:

        try:
            rstar2.train(env, "tinny")
        except rstar2.RstarError as error:
            print(error.name, error)
    """

    @property
    def name(self) -> str:
        """Short snake-case name for records and metrics: EngineError -> engine."""
        words = type(self).__name__.removesuffix("Error")
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in words).lstrip("_")


class UserError(RstarError):
    """Bad input: a recipe, a file, an argument. The message names the field, the value and the way
    out. Commands exit with code 2.

    Example:

        rstar2.Environment([], reward=len)  # UserError: environment environment has no problems
    """


class RecipeError(UserError):
    """A recipe that cannot work."""


class DataError(UserError):
    """A data file that cannot be read."""


class CheckpointError(UserError):
    """A checkpoint that is torn, missing or of another run."""


class InfrastructureError(RstarError):
    """Neither the model's fault nor the user's: a server is gone, a wait timed out.

    Raise it in a tool, a reply or a reward if the result says nothing about the model: the rollout
    is retried, then dropped and counted. It never becomes a reward of 0.

    Example:

        @rstar2.tool
        def price(item: str) -> float:
            '''The price of an item.'''
            if not shop.online:
                raise rstar2.InfrastructureError("the shop is offline")
            return shop.price(item)
    """


class DeadlineError(InfrastructureError):
    """A wait timed out."""


class DiskFullError(InfrastructureError):
    """A file could not be written because its disk is full."""


class EngineError(InfrastructureError):
    """An inference engine died, refused a request or sent an invalid answer."""


class CodeEnvError(InfrastructureError):
    """No code environment could execute a call: the server is gone, or its queue is full.

    Example:

        try:
            result = box.run("print(1)")
        except rstar2.CodeEnvError as error:
            print("an outage, not a result:", error)
    """


class QueueFullError(CodeEnvError):
    """The bounded queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IsolationError(CodeEnvError):
    """The requested isolation level is not available on this machine."""


class SessionLostError(CodeEnvError):
    """A session of the code environment ended with its process, worker or server."""


class WeightUpdateError(InfrastructureError):
    """An engine's logprobs do not match the learner's after a weight update."""


class RankError(InfrastructureError):
    """A learner rank died, failed or hangs; its group is closed."""


class InvariantError(RstarError):
    """Code broke one of its own invariants. Always a bug."""

"""The data types of rstar2: everything that crosses a boundary between two stages, on one page.

All are frozen, slotted dataclasses, so tasks and threads can share them, and `encode` and `decode`
convert them to JSON and back without loss. Tokens and their numbers may be given as any sequence;
they are held as `token_arrays.TokenArray`. An example explains a trajectory best:

    Trajectory(
        id="7.3", problem_id="7", group_id="step4/7", seed=11,
        prompt_ids=(1, 2, 3),                      # the problem after the template
        turns=(
            Turn(                                  # first turn: a tool call
                sampled_ids=(40, 41), logprobs=(-0.1, -0.7), versions=((4, 2),),
                calls=(ToolCall(...),), results=(ToolResult(...),),
                response_ids=(50, 51, 52),         # tool response + next assistant header
            ),
            Turn(sampled_ids=(60,), logprobs=(-0.2,), versions=((4, 1),)),  # the answer
        ),
        stop=StopReason.ANSWERED, answer_tags=1, reward=Reward(1.0, answer="42", ...),
    )

    .token_ids -> (1, 2, 3, 40, 41, 50, 51, 52, 60)     the model's own ids, never re-encoded
    .mask      -> (0, 0, 0,  1,  1,  0,  0,  0,  1)     1 on sampled tokens only

Invariant 1 (token exactness) holds by construction: a trajectory stores its pieces in order and
derives the whole sequence, so all consumers agree on the prompt of a turn.

This file is longer than others on purpose: every shared type is defined in one place. It has no
behaviour beyond derived properties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from rstar2.token_arrays import (
    TokenArray,
    float_array,
    hold_arrays,
    id_array,
    mark_array,
    plain,
)

T = TypeVar("T")

Split = Literal["train", "heldout"]
"""Problems to train on, and problems to evaluate on."""

WeightVersion = int
"""Counts weight updates: 0 is the initial policy, every published update adds 1."""

VersionSpan = tuple[WeightVersion, int]
"""(version, number of consecutive tokens sampled under it)."""


# --------------------------------------------------------------------------- problems


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a verifiable answer.

    Example:

        problem = rstar2.Problem("7", "What is 6 times 7?", "42", meta={"level": 1})
    """

    id: str  #: Unique among the problems of an environment.
    prompt: str  #: The user's message.
    answer: str  #: The reference answer, as text.
    grader: str = "math"  #: How python-math checks an answer.
    kind: str = ""  #: Evaluations also report each kind on its own.
    source: str = ""  #: The data set it comes from.
    meta: Mapping[str, Any] = field(default_factory=dict)  #: Data of your own.


# --------------------------------------------------------------------------- tool calls


class Outcome(StrEnum):
    """The outcome of one tool call.

    Example:

        with rstar2.Sandbox() as box:
            assert box.run("1/0").outcome is rstar2.Outcome.EXCEPTION
    """

    OK = "ok"  #: The call succeeded and has a result.
    NO_OUTPUT = "no_output"  #: The call succeeded and there is nothing to show.
    EXCEPTION = "exception"  #: The program or the tool raised.
    SYNTAX_ERROR = "syntax_error"  #: The program is not Python.
    TIMEOUT = "timeout"  #: The call used up its wall or CPU time.
    MEMORY = "memory"  #: The program needed more memory than its limit.
    OUTPUT_LIMIT = "output_limit"  #: The program wrote far more than is kept, and was stopped.
    KILLED = "killed"  #: A signal ended the program.
    BAD_JSON = "bad_json"  #: The text between the tags of a tool call is not JSON.
    UNKNOWN_TOOL = "unknown_tool"  #: The episode has no tool of this name.
    BAD_ARGUMENTS = "bad_arguments"  #: The schema of the tool refuses the arguments.
    INFRASTRUCTURE = "infrastructure"  #: The call was not executed; never shown to a model.

    @property
    def succeeded(self) -> bool:
        """True for OK and NO_OUTPUT."""
        return self in (Outcome.OK, Outcome.NO_OUTPUT)

    @property
    def malformed(self) -> bool:
        """True if the text was not a valid call, so nothing was executed."""
        return self in (Outcome.BAD_JSON, Outcome.UNKNOWN_TOOL, Outcome.BAD_ARGUMENTS)

    @property
    def failed(self) -> bool:
        """True if the model is to blame: these calls count in RoC's p_err."""
        return not self.succeeded and self is not Outcome.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one call. A server caps each value; None means the server's default."""

    wall_s: float | None = None  #: Seconds.
    cpu_s: float | None = None  #: Seconds of CPU time.
    memory_mb: int | None = None  #: Memory of all its processes.
    processes: int | None = None  #: Processes and threads.
    file_mb: int | None = None  #: Size of one file.
    scratch_mb: int | None = None  #: All files that it writes.
    output_chars: int | None = None  #: Characters kept of stdout and of stderr.


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the parser reads it from the model's text.

    `error` is set if the text is not a valid call (bad JSON, unknown tool, bad arguments). Such a
    call is never executed; its result has that outcome and `message`, and it has no arguments.
    """

    id: str  #: Of the call, unique in the run.
    name: str  #: Of the tool.
    arguments: Mapping[str, Any] = field(default_factory=dict)  #: As the tool's schema says.
    raw: str = ""  #: The text between the tags.
    error: Outcome | None = None  #: Set if it is not a valid call.
    message: str = ""  #: What is wrong with it.

    def __post_init__(self) -> None:
        """Read the arguments of a record from version 0.2, which kept only `code` and `raw`."""
        if self.arguments or self.error is not None or not self.raw.startswith("{"):
            return
        try:
            arguments = msgspec.json.decode(self.raw, type=dict[str, Any]).get("arguments")
        except msgspec.DecodeError:  # not the text of a call
            return
        if isinstance(arguments, dict):
            object.__setattr__(self, "arguments", arguments)

    @property
    def shown(self) -> str:
        """The call for people: its code if it has any, else its arguments or its text."""
        code = self.arguments.get("code")
        if isinstance(code, str):
            return code
        return encode(self.arguments).decode() if self.arguments else self.raw


@dataclass(frozen=True, slots=True)
class Truncation:
    """Number of characters cut from the middle of each stream, and of files that were not
    returned; 0 means none."""

    stdout: int = 0
    stderr: int = 0
    value: int = 0
    traceback: int = 0
    files: int = 0

    def __bool__(self) -> bool:
        return bool(self.stdout or self.stderr or self.value or self.traceback or self.files)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call, as seen from outside the jail.

    Example:

        with rstar2.Sandbox() as box:
            result = box.run("print(6*7)")
        assert result.outcome.succeeded and result.stdout == "42\\n"
    """

    call_id: str  #: Of its call.
    outcome: Outcome  #: How the call ended; policies read only this field.
    stdout: str = ""  #: The program's output, or what a tool returned.
    stderr: str = ""  #: What it wrote to stderr.
    value: str | None = None  #: repr of the last expression, if nothing was printed.
    traceback: str = ""  #: The program's own lines, with their source, and what was raised.
    message: str = ""  #: One sentence about the outcome, for people and for the model.
    truncated: Truncation = Truncation()  #: What was cut off.
    exit_code: int | None = None  #: Of the program.
    signal: int | None = None  #: That ended the program.
    wall_s: float = 0.0  #: Seconds from start to end of the program.
    cpu_s: float = 0.0  #: CPU time.
    peak_mb: float = 0.0  #: Most memory that the program used.
    queue_s: float = 0.0  #: Waiting for a slot.
    isolation: str = ""  #: Level of the jail.
    server: str = ""  #: Where it ran.
    attempts: int = 1  #: Above 1 if a server was lost.
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What the program created or changed in its working directory, if that was asked for."""


# --------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. `seed` makes a result independent of the rest of its batch."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Finish(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens that an engine sampled in one turn; a sampled stop token is the last id."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    entropies: Sequence[float] | None = None
    cached_tokens: int = 0  #: Prompt tokens whose KV came from the cache.
    queue_s: float = 0.0
    wall_s: float = 0.0
    engine: str = ""
    preempted_s: float = 0.0  #: Time spent preempted; 0 if the engine reports none.

    def __post_init__(self) -> None:
        hold_arrays(self, ids=("token_ids",), floats=("logprobs", "entropies"))


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The capacity of an engine."""

    kv_tokens: int
    max_sequences: int
    max_length: int
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of an engine, as it reports it."""

    kv_used: int
    running: int
    waiting: int
    preemptions: int
    version: WeightVersion
    steps: int = 0
    """Steps since its start; 0 if the engine does not count them. So are the next two."""
    decoded: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""


# --------------------------------------------------------------------------- trajectories


class StopReason(StrEnum):
    """Why a rollout ended; every admitted rollout has exactly one."""

    ANSWERED = "answered"  #: The episode ended after a turn without a tool call, with an answer.
    NO_ANSWER = "no_answer"  #: As above, without an answer.
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"
    INVALID_CALLS = "invalid_calls"  #: Too many calls in a row that could not be executed.
    ENGINE_FAILED = "engine_failed"
    TOOL_FAILED = "tool_failed"
    ENVIRONMENT_FAILED = "environment_failed"  #: It could not open the episode or reply.
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True if the rollout says nothing about the model: retried, then dropped, no reward."""
        return self in (
            StopReason.ENGINE_FAILED,
            StopReason.TOOL_FAILED,
            StopReason.ENVIRONMENT_FAILED,
            StopReason.CANCELLED,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant generation and the tokens appended after it."""

    sampled_ids: Sequence[int]  #: The model's own tokens.
    logprobs: Sequence[float]  #: Of each sampled token.
    versions: tuple[VersionSpan, ...]  #: (weight version, number of tokens), in order.
    calls: tuple[ToolCall, ...] = ()  #: The tool calls in the text.
    results: tuple[ToolResult, ...] = ()  #: One for each call.
    response_ids: Sequence[int] = ()
    """Tool response or the environment's reply, plus the header of the next assistant turn; masked
    out everywhere."""
    text: str = ""  #: Decoded text of the sampled ids, without the token that stopped the turn.
    reply: tuple[Message, ...] = ()  #: The environment's reply to a turn without a call.
    entropies: Sequence[float] | None = None  #: Of each sampled token, if the engine gives them.
    finish: Finish = Finish.STOP  #: Why sampling stopped.
    engine: str = ""  #: Name of the engine.
    started_s: float = 0.0  #: Seconds since the trajectory started; the next three are durations.
    queue_s: float = 0.0  #: Waiting for the engine.
    generate_s: float = 0.0  #: Sampling.
    tools_s: float = 0.0  #: Waiting for tools.
    cached_tokens: int = 0  #: Prompt tokens from the prefix cache.
    preempted_s: float = 0.0  #: Part of `generate_s`.

    def __post_init__(self) -> None:
        hold_arrays(self, ids=("sampled_ids", "response_ids"), floats=("logprobs", "entropies"))


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a finished episode, with the answer that was graded.

    A reward function may return one instead of a number.

    Example:

        def reward(episode):
            return rstar2.Reward(0.5, answer=episode.answer, grader="half")
    """

    value: float  #: Any finite number.
    answer: str | None = None  #: None if the model gave no answer.
    grader: str = ""  #: The name of what decided.
    wall_s: float = 0.0  #: Seconds of grading.


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that is not the model's fault. It never becomes a reward."""

    name: str  #: A short name, by which failures are counted.
    message: str  #: What happened, for people.


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """A prompt and the turns that continue it. A trajectory has one, except if its agent is a
    program that rewrites its history (`endpoint.segments`)."""

    prompt_ids: Sequence[int]
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        hold_arrays(self, ids=("prompt_ids",))

    @property
    def token_ids(self) -> TokenArray[int]:
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += [*turn.sampled_ids, *turn.response_ids]
        return id_array(ids)

    @property
    def mask(self) -> TokenArray[int]:
        """1 on tokens the model sampled, 0 on prompt and tool tokens; aligned with token_ids."""
        marks = [0] * len(self.prompt_ids)
        for turn in self.turns:
            marks += [1] * len(turn.sampled_ids) + [0] * len(turn.response_ids)
        return mark_array(marks)

    @property
    def logprobs(self) -> TokenArray[float]:
        """Rollout logprobs aligned with token_ids, 0.0 where the mask is 0."""
        values = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            values += [*turn.logprobs, *([0.0] * len(turn.response_ids))]
        return float_array(values)

    @property
    def oldest_version(self) -> WeightVersion | None:
        versions = [v for turn in self.turns for v, n in turn.versions if n]
        return min(versions) if versions else None

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout, exact to the token. `reward` and `failure` are mutually exclusive.

    Example:

        for turn in rollout.turns:
            print(turn.text, [call.name for call in turn.calls], [r.outcome for r in turn.results])
        print(rollout.stop, rollout.answer, rollout.reward.value)
    """

    id: str  #: GROUP/NUMBER.
    problem_id: str  #: Of the problem.
    group_id: str  #: Of the group.
    seed: int  #: Of its sampling.
    prompt_ids: Sequence[int]  #: Tokens of the first prompt.
    turns: tuple[Turn, ...]  #: The model's turns, in order.
    stop: StopReason  #: Why the rollout ended, such as `answered` or `max_turns`.
    answer_tags: int = 0  #: How often the model answered, as its environment counts.
    format_penalty: float = 0.0  #: RoC's p_format, as its environment defines it.
    text: str = ""  #: Decoded completion with tool responses, for people; policies never read it.
    answer: str | None = None  #: The answer that is graded, as its environment reads it.
    reward: Reward | None = None  #: `reward.value` is the number.
    failure: Failure | None = None  #: Why there is no reward: not the model's fault.
    started_at: float = 0.0  #: Seconds since 1970.
    wall_s: float = 0.0  #: Seconds from start to reward.
    attempts: int = 1  #: Above 1 if infrastructure failed before.
    more_segments: tuple[TokenSegment, ...] = ()  #: They share the reward and the advantage.

    def __post_init__(self) -> None:
        hold_arrays(self, ids=("prompt_ids",))

    @property
    def segments(self) -> tuple[TokenSegment, ...]:
        """All segments; `token_ids`, `mask` and `logprobs` are those of the first."""
        return (TokenSegment(self.prompt_ids, self.turns), *self.more_segments)

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """The turns of all segments."""
        return tuple(turn for segment in self.segments for turn in segment.turns)

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens and responses of all segments."""
        return sum(len(turn.sampled_ids) + len(turn.response_ids) for turn in self.all_turns)

    @property
    def token_ids(self) -> TokenArray[int]:
        return self.segments[0].token_ids

    @property
    def mask(self) -> TokenArray[int]:
        return self.segments[0].mask

    @property
    def logprobs(self) -> TokenArray[float]:
        return self.segments[0].logprobs

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)

    @property
    def results(self) -> Iterator[ToolResult]:
        for turn in self.all_turns:
            yield from turn.results

    @property
    def calls(self) -> int:
        """Tool calls that count in p_err: all but infrastructure failures."""
        return sum(r.outcome is not Outcome.INFRASTRUCTURE for r in self.results)

    @property
    def failed_calls(self) -> int:
        """Tool calls that failed by the model's fault."""
        return sum(r.outcome.failed for r in self.results)

    @property
    def truncated(self) -> bool:
        return self.stop is StopReason.MAX_LENGTH

    @property
    def unanswered(self) -> bool:
        return self.answer_tags == 0

    @property
    def correct(self) -> bool:
        return self.reward is not None and self.reward.value > 0.5


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one problem in one step; `dropped` counts infrastructure losses by name."""

    id: str  #: STAGE/STEP/NUMBER.
    problem: Problem  #: As it was in the file.
    step: int  #: From 1 in every stage.
    trajectories: tuple[Trajectory, ...]  #: Those with a reward.
    dropped: Mapping[str, int] = field(default_factory=dict)  #: Lost rollouts by failure.

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(t.reward.value for t in self.trajectories if t.reward is not None)

    @property
    def informative(self) -> bool:
        """False if all rewards are equal: such a group gives no gradient."""
        return len(set(self.rewards)) > 1


# --------------------------------------------------------------------------- learning


@dataclass(frozen=True, slots=True)
class Choice:
    """Why resampling kept or dropped one trajectory. One per trajectory, in group order."""

    trajectory_id: str  #: Of the trajectory.
    kept: bool  #: Whether it is learnt from.
    reason: str  #: In words.
    reward: float  #: Its verified reward.
    p_err: float  #: Share of failed calls; 0.5 without a call.
    p_format: float  #: Format penalty of the environment.
    weight: float  #: In the draw: 1 / (epsilon + p_total) for positives, 1 for negatives.


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of resampling a group: 2G choices, G of them kept."""

    group_id: str  #: Of the group.
    variant: str  #: `rl.roc.variant`.
    choices: tuple[Choice, ...]  #: In the order of the trajectories.

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(i for i, choice in enumerate(self.choices) if choice.kept)


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence: ids, mask, rollout logprobs (aligned, 0.0 off-mask), advantage."""

    token_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    group_id: str
    trajectory_id: str
    version: WeightVersion

    def __post_init__(self) -> None:
        hold_arrays(self, ids=("token_ids",), marks=("mask",), floats=("logprobs",))

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one learning step: the kept samples of P groups."""

    step: int
    samples: tuple[Sample, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(sample.trained_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """The learner's logprobs of one sample's trained tokens (mask 1), in order."""

    trajectory_id: str
    old: Sequence[float]  #: Under the weights at the start of the batch.
    current: Sequence[float]  #: When its mini-batch was trained: exp(current - old) is clipped.

    def __post_init__(self) -> None:
        hold_arrays(self, floats=("old", "current"))


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. For SFT data `train` marks assistant messages that enter the loss."""

    role: str
    content: str
    train: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """One SFT example in messages form, with optional tool signatures (JSON schema dicts)."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""


# --------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% confidence interval over `count` independent problems."""

    mean: float  #: Mean over problems.
    low: float  #: Lower end of the interval.
    high: float  #: Upper end of the interval.
    count: int  #: Number of problems.


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of one policy on held-out problems in one mode (`greedy` or `sampled`)."""

    stage: str  #: The stage that it follows: `sft` or the name of an RL stage.
    step: int  #: Of the stage that it follows.
    mode: str  #: `greedy` or `sampled`.
    accuracy: Estimate  #: The mean reward; for rewards of 0 and 1 the share of correct answers.
    kinds: Mapping[str, Estimate]  #: Accuracy per kind of problem; empty if problems have no kinds.
    failing_calls_in_correct: float | None  #: As tool_errors, inside correct trajectories.
    tool_errors: float | None  #: Failed calls / calls; None if there was no call.
    mean_length: float  #: Completion tokens per trajectory, tool responses included.
    mean_turns: float  #: Assistant turns per trajectory.
    truncated: float  #: Share of trajectories that hit the length limit.
    wall_s: float = 0.0  #: Seconds that it took.
    valid_calls: float | None = None  #: Executed calls / calls; None if there was no call.


# --------------------------------------------------------------------------- wire


def encode(value: Any) -> bytes:
    """Serialise a value to one line of JSON, without a newline."""
    return msgspec.json.encode(value, enc_hook=plain)


def decode(data: bytes | str, kind: type[T]) -> T:
    """Read a value back; raises msgspec.ValidationError, which names the invalid field."""
    return msgspec.json.decode(data, type=kind)


def spans(versions: Iterable[WeightVersion]) -> tuple[VersionSpan, ...]:
    """Run-length encode per-token weight versions: [4, 4, 5] -> ((4, 2), (5, 1))."""
    out: list[VersionSpan] = []
    for version in versions:
        if out and out[-1][0] == version:
            out[-1] = (version, out[-1][1] + 1)
        else:
            out.append((version, 1))
    return tuple(out)

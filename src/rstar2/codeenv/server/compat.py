"""The run APIs of code-judge and SandboxFusion, for trainers that were built for them.

Requests are parsed as leniently as the originals parse them (unknown fields are ignored, ids may
repeat), and responses have their field names. Another language is refused by name
instead of being ignored. A refused submission of a batch is answered in its place
with the reason `invalid_input`; the others run. Programs run as scripts: the value of a last
expression is not shown, and a traceback is part of stderr.

    code-judge      POST /run, /run/batch, /run/long-batch, /judge, /judge/batch,
                    /judge/long-batch; GET /ping, /status
    SandboxFusion   POST /run_code (language python)
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from rstar2.codeenv import wire
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.wire import Refusal
from rstar2.types import Limits, Outcome, ToolResult

CODE_JUDGE_WALL_S = 10.0
"""The limit of a submission (code-judge's default), or the server's cap if that is lower."""
BATCH_DEADLINE_S = 60.0
LONG_BATCH_DEADLINE_S = 3600.0
MAX_SUBMISSIONS = 16_384
SUBMISSIONS_AT_ONCE = 256
"""Items of a batch that are read before the server attends to other callers."""
RUN_CODE_QUEUE_S = 60.0
"""Time in the queue that /run_code allows on top of run_timeout."""


# --------------------------------------------------------------------------- code-judge


class Submission(msgspec.Struct, frozen=True):
    """One program for code-judge; success also needs `expected_output`, if given."""

    type: str
    solution: str
    sub_id: str | None = None
    input: str | None = None
    expected_output: str | None = None


class SubmissionId(msgspec.Struct, frozen=True):
    """The id of a submission whose other fields were refused."""

    sub_id: str | None = None


class BatchSubmission(msgspec.Struct, frozen=True):
    """Several programs, answered together in their order."""

    submissions: list[msgspec.Raw]
    sub_id: str | None = None
    type: Literal["batch"] = "batch"


class SubmissionResult(msgspec.Struct, frozen=True):
    """`reason` is worker_timeout, queue_timeout (try again), internal_error, invalid_input, or
    empty."""

    sub_id: str
    success: bool
    run_success: bool
    cost: float
    stdout: str | None = None
    stderr: str | None = None
    reason: str = ""


class JudgeResult(msgspec.Struct, frozen=True):
    """A SubmissionResult without the program's output."""

    sub_id: str
    success: bool
    run_success: bool
    cost: float
    reason: str = ""


class BatchResult(msgspec.Struct, frozen=True):
    """Results in the order of the submissions."""

    sub_id: str
    results: list[SubmissionResult] | list[JudgeResult]


# --------------------------------------------------------------------------- SandboxFusion


class RunCode(msgspec.Struct, frozen=True):
    """A SandboxFusion request; compile_timeout means nothing for Python.

    verl's tool sends only `code`, so `language` has a default here.
    """

    code: str
    language: str = "python"
    run_timeout: float = 10.0
    compile_timeout: float = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, bytes | None] = {}
    """Contents by path below the working directory; base64 in JSON."""
    fetch_files: list[str] = []


class CommandRunResult(msgspec.Struct, frozen=True):
    """How the program ended; return_code is absent when time ran out."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(msgspec.Struct, frozen=True):
    """SandboxError is the server's fault; clients retry it."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str
    run_result: CommandRunResult | None = None
    compile_result: None = None
    executor_pod_name: str | None = None
    files: dict[str, bytes] = {}


class Compat:
    """Translates requests of the two APIs into calls, and results into their answers."""

    def __init__(self, table: CallTable) -> None:
        self.table = table

    def routes(self) -> dict[tuple[str, str], Callable[[bytes], Awaitable[Any]]]:
        batch, long = BATCH_DEADLINE_S, LONG_BATCH_DEADLINE_S
        return {
            ("GET", "/ping"): self._ping,
            ("GET", "/status"): self._status,
            ("POST", "/run"): lambda body: self._single(body, judge=False),
            ("POST", "/judge"): lambda body: self._single(body, judge=True),
            ("POST", "/run/batch"): lambda body: self._batch(body, batch, judge=False),
            ("POST", "/run/long-batch"): lambda body: self._batch(body, long, judge=False),
            ("POST", "/judge/batch"): lambda body: self._batch(body, batch, judge=True),
            ("POST", "/judge/long-batch"): lambda body: self._batch(body, long, judge=True),
            ("POST", "/run_code"): self._run_code,
        }

    async def _ping(self, body: bytes) -> str:
        return "pong"

    async def _status(self, body: bytes) -> dict[str, int]:
        return {"queue": self.table.queued, "num_workers": self.table.slots}

    # ----------------------------------------------------------------- code-judge

    async def _single(self, body: bytes, *, judge: bool) -> SubmissionResult | JudgeResult:
        submission = wire.read(body, Submission)
        _check_python(submission.type, "type")
        result = await self._submit(submission, BATCH_DEADLINE_S)
        return _without_output(result) if judge else result

    async def _batch(self, body: bytes, deadline_s: float, *, judge: bool) -> BatchResult:
        batch = _read_batch(body)
        if not batch.submissions:
            raise Refusal("invalid", "submissions: is empty; send at least one", "submissions")
        if len(batch.submissions) > MAX_SUBMISSIONS:
            raise Refusal(
                "too_large",
                f"submissions: {len(batch.submissions)} programs; send at most {MAX_SUBMISSIONS} "
                "in one request",
                "submissions",
            )
        refusals: dict[int, Refusal] = {}
        tasks: list[asyncio.Task[SubmissionResult]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, raw in enumerate(batch.submissions):
                    if index % SUBMISSIONS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    item = self._item(index, raw, deadline_s, refusals)
                    tasks.append(group.create_task(item))
        except* Refusal as shutting_down:
            raise shutting_down.exceptions[0] from None
        if len(refusals) == len(tasks):
            raise refusals[0]
        self.table.metrics.refused.update(refusal.wire.code for refusal in refusals.values())
        results = [task.result() for task in tasks]
        sub_id = batch.sub_id or str(uuid.uuid4())
        if judge:
            return BatchResult(sub_id, [_without_output(result) for result in results])
        return BatchResult(sub_id, results)

    async def _item(
        self, index: int, raw: msgspec.Raw, deadline_s: float, refusals: dict[int, Refusal]
    ) -> SubmissionResult:
        """The result of one submission of a batch; adds to `refusals` if it was refused."""
        try:
            if _SURROGATE.search(raw):
                text = "half of a surrogate pair (such as \\ud800) is no character; remove it"
                raise Refusal("bad_json", text)
            submission = wire.read(bytes(raw), Submission)
            _check_python(submission.type, "type")
            return await self._submit(submission, deadline_s)
        except Refusal as refusal:
            if refusal.wire.code == "shutting_down":
                raise
            place, field = f"submissions[{index}]", refusal.wire.field
            if field is None or not str(refusal).startswith(field):
                refused = Refusal(refusal.wire.code, f"{place}: {refusal}", place)
            else:
                refused = Refusal(refusal.wire.code, f"{place}.{refusal}", f"{place}.{field}")
            refusals[index] = refused
            return _refused(raw, refused)

    async def _submit(self, submission: Submission, deadline_s: float) -> SubmissionResult:
        sub_id = submission.sub_id or str(uuid.uuid4())
        started_s = asyncio.get_running_loop().time()
        try:
            result = await self._run(
                submission.solution, submission.input or "", self._time_limits(CODE_JUDGE_WALL_S),
                deadline_s,
            )  # fmt: skip
        except Refusal as refusal:
            if refusal.wire.code != "queue_full":
                raise
            return SubmissionResult(sub_id, False, False, 0.0, "", "", "queue_timeout")
        waited_s = asyncio.get_running_loop().time() - started_s
        ran = result.outcome.succeeded and not result.exit_code
        expected = submission.expected_output
        right = expected is None or result.stdout.strip() == expected.strip()
        reason = ""
        if result.outcome is Outcome.TIMEOUT:
            reason = "worker_timeout"
        elif result.outcome is Outcome.INFRASTRUCTURE:
            reason = "queue_timeout" if waited_s >= deadline_s else "internal_error"
        return SubmissionResult(
            sub_id, ran and right, ran, result.wall_s, result.stdout, _stderr(result), reason
        )

    # ----------------------------------------------------------------- SandboxFusion

    async def _run_code(self, body: bytes) -> RunCodeResponse:
        asked = wire.read(body, RunCode)
        _check_python(asked.language, "language")
        given = {_relative(path): text for path, text in asked.files.items() if text is not None}
        memory_mb = asked.memory_limit_MB if asked.memory_limit_MB > 0 else None
        limits = dataclasses.replace(
            self._time_limits(asked.run_timeout), wall_s=asked.run_timeout, memory_mb=memory_mb
        )
        result = await self._run(
            asked.code, asked.stdin or "", limits, asked.run_timeout + RUN_CODE_QUEUE_S,
            given, collect=bool(asked.fetch_files),
        )  # fmt: skip
        if result.outcome is Outcome.INFRASTRUCTURE:
            return RunCodeResponse("SandboxError", result.message, executor_pod_name=result.server)
        timed_out = result.outcome is Outcome.TIMEOUT
        code = _return_code(result)
        ended = CommandRunResult(
            "TimeLimitExceeded" if timed_out else "Finished",
            execution_time=result.wall_s,
            return_code=None if timed_out else code,
            stdout=result.stdout,
            stderr=_stderr(result),
        )
        status: Literal["Success", "Failed"] = "Failed" if timed_out or code else "Success"
        kept = {**given, **result.files}
        fetched = {
            path: kept[_relative(path)] for path in asked.fetch_files if _relative(path) in kept
        }
        return RunCodeResponse(status, "", ended, executor_pod_name=result.server, files=fetched)

    # ----------------------------------------------------------------- both

    def _time_limits(self, wall_s: float) -> Limits:
        """Wall and CPU limits of `wall_s`, each lowered to the server's cap."""
        cap = self.table.config.cap
        return Limits(
            wall_s=min(wall_s, cap.wall_s or wall_s), cpu_s=min(wall_s, cap.cpu_s or wall_s)
        )

    async def _run(
        self,
        code: str,
        stdin: str,
        limits: Limits,
        deadline_s: float,
        files: dict[str, bytes] | None = None,
        *,
        collect: bool = False,
    ) -> ToolResult:
        """Run under a new id, with the largest output that the server allows."""
        cap = self.table.config.cap
        limits = dataclasses.replace(limits, output_chars=cap.output_chars)
        call = wire.RunIn(
            f"compat-{uuid.uuid4().hex}", code, stdin,
            wire.LimitsIn(**dataclasses.asdict(limits)), None, deadline_s, files or {}, collect,
        )  # fmt: skip
        return await self.table.call(wire.to_run(call, cap))


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape sequence of JSON; a surrogate without its pair is the group."""
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
"""The same as bytes, which are not UTF-8."""


def _read_batch(body: bytes) -> BatchSubmission:
    """A batch. The parser refuses a whole body for one lone surrogate, so the body is read again
    with such escapes as bytes: then only the submission that has one is refused."""
    try:
        return wire.read(body, BatchSubmission)
    except Refusal as refusal:
        if refusal.wire.code != "bad_json":
            raise
        unescaped = _ESCAPE.sub(_as_bytes, body)
        if unescaped == body:
            raise
        return wire.read(unescaped, BatchSubmission)


def _as_bytes(escape: re.Match[bytes]) -> bytes:
    lone = escape[1]
    return chr(int(lone[1:], 16)).encode("utf-8", "surrogatepass") if lone else escape[0]


def _check_python(language: str, field: str) -> None:
    if language != "python":
        raise Refusal("invalid", f"{field}: {language!r} is not supported; only 'python' is", field)


def _relative(path: str) -> str:
    return path.removeprefix("./")


def _refused(raw: msgspec.Raw, refusal: Refusal) -> SubmissionResult:
    """The place of a refused submission in the results of its batch."""
    try:
        sub_id = wire.read(bytes(raw), SubmissionId).sub_id
    except Refusal:
        sub_id = None
    sub_id = sub_id or str(uuid.uuid4())
    return SubmissionResult(sub_id, False, False, 0.0, "", str(refusal), "invalid_input")


def _stderr(result: ToolResult) -> str:
    """What a Python process would have written to stderr, and the limit that ended it, if any."""
    limit = "" if result.outcome in (Outcome.OK, Outcome.NO_OUTPUT) else result.message
    parts = (result.stderr, result.traceback, "" if result.traceback else limit)
    return "\n".join(part for part in parts if part)


def _return_code(result: ToolResult) -> int:
    if result.signal:
        return -result.signal
    if result.exit_code:
        return result.exit_code
    return 0 if result.outcome.succeeded else 1


def _without_output(result: SubmissionResult) -> JudgeResult:
    return JudgeResult(
        result.sub_id, result.success, result.run_success, result.cost, result.reason
    )

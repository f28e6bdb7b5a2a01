"""From what a worker saw to a ToolResult: pure functions, no I/O.

The outcome comes from what was seen from outside (limits hit, wait status) first; only a child that
ended by itself gets to say how (its record).
"""

from __future__ import annotations

import os
import signal

from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.frames import Record, WorkerReply
from rstar2.types import Limits, Outcome, ToolResult, Truncation


def clip(text: str, limit: int, already_cut: int = 0) -> tuple[str, int]:
    """Cut the middle of a text to `limit` characters; the marker says how many are missing."""
    if len(text) <= limit and not already_cut:
        return text, 0
    head, tail = (limit + 1) // 2, limit // 2
    if len(text) <= limit:
        head, tail = (len(text) + 1) // 2, len(text) // 2
    cut = len(text) - head - tail + already_cut
    end = text[len(text) - tail :] if tail else ""
    return f"{text[:head]}\n[... {cut} characters cut ...]\n{end}", cut


def decode(data: bytes) -> str:
    """Bytes of a program as text; what is not UTF-8 is shown by replacement characters."""
    return data.decode("utf-8", "replace")


def limits_hit(cause: int, limits: Limits) -> tuple[Outcome, str] | None:
    """Outcome and message of a call that the worker ended."""
    if cause == frames.WALL:
        return Outcome.TIMEOUT, f"Timed out after {limits.wall_s:g} s."
    if cause == frames.CPU:
        return Outcome.TIMEOUT, f"Used more than {limits.cpu_s:g} s of CPU time."
    if cause == frames.OUTPUT:
        cap = frames.output_cap(limits.output_chars or 0)
        return Outcome.OUTPUT_LIMIT, f"Stopped after printing more than {cap} bytes."
    if cause == frames.SCRATCH:
        return Outcome.KILLED, f"Stopped: its files took more than {limits.scratch_mb} MB."
    if cause == frames.PROCESSES:
        return Outcome.KILLED, "Stopped: it started more processes than it may."
    return None


def status_of(
    reply: WorkerReply, record: Record | None, limits: Limits, oom: bool
) -> tuple[Outcome, str]:
    """Outcome and message of a call that ended by itself, before output is looked at."""
    if os.WIFSIGNALED(reply.status):
        number = os.WTERMSIG(reply.status)
        if oom:
            return Outcome.MEMORY, f"Used more than {limits.memory_mb} MB of memory."
        if number in (signal.SIGKILL, signal.SIGXCPU) and reply.cpu_s >= (limits.cpu_s or 0):
            return Outcome.TIMEOUT, f"Used more than {limits.cpu_s:g} s of CPU time."
        name = signal.Signals(number).name if number in _SIGNALS else f"signal {number}"
        return Outcome.KILLED, f"The process was killed by {name}{_SIGNAL_HINTS.get(number, '')}."
    code = os.WEXITSTATUS(reply.status)
    if record is None:
        if code == 0:
            return Outcome.OK, ""
        return Outcome.EXCEPTION, f"The process exited with code {code}."
    if record.kind == frames.MEMORY:
        return Outcome.MEMORY, f"{record.message} (the limit is {limits.memory_mb} MB)"
    if record.kind == frames.SYNTAX:
        return Outcome.SYNTAX_ERROR, record.message
    if record.kind == frames.EXCEPTION:
        return Outcome.EXCEPTION, record.message
    if record.kind == frames.EXIT or code != 0:
        return Outcome.EXCEPTION, record.message or f"The process exited with code {code}."
    return Outcome.OK, ""


_SIGNALS = {int(s) for s in signal.Signals}
_SIGNAL_HINTS = {
    int(signal.SIGSEGV): " (crash: bad memory access or stack overflow)",
    int(signal.SIGABRT): " (abort)",
    int(signal.SIGSYS): " (forbidden system call)",
    int(signal.SIGXFSZ): " (file too large)",
}


def build(
    call_id: str,
    reply: WorkerReply,
    body: bytes,
    limits: Limits,
    isolation: str,
    oom: bool = False,
    attempts: int = 1,
) -> ToolResult:
    """The result of one call. Every limit in `limits` is set."""
    stdout, stderr = body[: reply.stdout], body[reply.stdout : reply.stdout + reply.stderr]
    record = Record.parse(body[reply.stdout + reply.stderr :])
    hit = limits_hit(reply.cause, limits)
    outcome, message = hit or status_of(reply, record, limits, oom)
    chars = limits.output_chars or 0
    out, out_cut = clip(decode(stdout), chars)
    err, err_cut = clip(decode(stderr), chars)
    value, value_cut, trace, trace_cut = None, 0, "", 0
    if record is not None and hit is None:
        if record.kind == frames.VALUE and not stdout and outcome is Outcome.OK:
            value, value_cut = clip(record.text, chars, record.cut)
        elif record.kind in (frames.EXCEPTION, frames.SYNTAX, frames.MEMORY):
            trace, trace_cut = clip(record.text, chars, record.cut)
    if outcome is Outcome.OK and not stdout and not stderr and value is None:
        outcome = Outcome.NO_OUTPUT
    signaled = os.WIFSIGNALED(reply.status)
    return ToolResult(
        call_id=call_id,
        outcome=outcome,
        stdout=out,
        stderr=err,
        value=value,
        traceback=trace,
        message=message,
        truncated=Truncation(out_cut, err_cut, value_cut, trace_cut),
        exit_code=None if signaled else os.WEXITSTATUS(reply.status),
        signal=os.WTERMSIG(reply.status) if signaled else None,
        wall_s=reply.wall_s,
        cpu_s=reply.cpu_s,
        peak_mb=reply.peak_mb,
        isolation=isolation,
        attempts=attempts,
    )

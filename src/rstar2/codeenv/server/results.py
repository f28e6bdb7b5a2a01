"""Turns the reply of a worker into the result of a call.

What was observed from outside (limits exceeded, wait status) decides the outcome first. The child's
own record counts only if it ended by itself.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace

from rstar2.codeenv.jail import files, frames
from rstar2.codeenv.jail.frames import Record, WorkerReply
from rstar2.codeenv.protocol import VerifyResult
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


def limits_hit(reply: WorkerReply, limits: Limits) -> tuple[Outcome, str] | None:
    """Outcome and message of a call that the worker ended."""
    cause = reply.cause
    if cause == frames.WALL:
        return Outcome.TIMEOUT, f"Timed out after {limits.wall_s:g} s."
    if cause == frames.CPU:
        return Outcome.TIMEOUT, f"Used more than {limits.cpu_s:g} s of CPU time."
    if cause == frames.OUTPUT:
        cap = frames.output_cap(limits.output_chars or 0)
        return Outcome.OUTPUT_LIMIT, f"Stopped after printing more than {cap} bytes."
    if cause == frames.SCRATCH:
        return Outcome.KILLED, (
            f"Stopped: its files took more than {limits.scratch_mb} MB or could not be counted."
        )
    if cause == frames.NOT_STOPPED:
        return Outcome.KILLED, "Rolled back: a thread did not stop; it waits for a child in vfork."
    if cause == frames.FILES:
        reason = f"its files could not be written ({os.strerror(reply.status)}); rename them"
        if reply.status in (errno.ENOSPC, errno.EDQUOT):
            reason = f"its files do not fit into the scratch space of {limits.scratch_mb} MB"
        return Outcome.BAD_ARGUMENTS, f"Not run: {reason}."
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
    if record is None or record.kind == frames.HANDOVER:
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


def build_result(
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
    record = Record.parse(reply.record_in(body))
    hit = limits_hit(reply, limits)
    outcome, message = hit or status_of(reply, record, limits, oom)
    if reply.cause == frames.FILES:  # no process was started
        reply = reply._replace(status=0)
    if reply.left_out and not message:
        message = files.left_out_message(reply.left_out)
    chars = limits.output_chars or 0
    out, out_cut = clip(stdout.decode("utf-8", "replace"), chars)
    err, err_cut = clip(stderr.decode("utf-8", "replace"), chars)
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
        truncated=Truncation(out_cut, err_cut, value_cut, trace_cut, reply.left_out),
        exit_code=None if signaled else os.WEXITSTATUS(reply.status),
        signal=os.WTERMSIG(reply.status) if signaled else None,
        wall_s=reply.wall_s,
        cpu_s=reply.cpu_s,
        peak_mb=reply.peak_mb,
        isolation=isolation,
        attempts=attempts,
        files=files.read(body[-reply.files :]) if reply.files else {},
    )


def verify_result(
    identity: str, reply: WorkerReply, body: bytes, limits: Limits, oom: bool, attempts: int
) -> VerifyResult:
    """The result of a verification from the worker's reply."""
    record = Record.parse(reply.record_in(body))
    base = VerifyResult(identity, wall_s=reply.wall_s, attempts=attempts)
    if reply.cause in (frames.WALL, frames.CPU):
        return replace(base, error="timeout", message=f"no answer in {reply.wall_s:.2f} s")
    if record is not None and record.kind == frames.JSON:
        return replace(base, value=json.loads(record.text))
    if record is not None and record.kind == frames.REFUSED:
        return replace(base, error=record.text, message=record.message)
    _, message = status_of(reply, None, limits, oom)
    return replace(base, error="memory" if oom else "crashed", message=message)

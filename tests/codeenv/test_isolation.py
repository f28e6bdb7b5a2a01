"""Which level follows from what a kernel allows; filters, records, clipping and outcomes."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.codeenv.jail import frames, seccomp, syscalls
from rstar2.codeenv.jail.frames import Record, WorkerReply, WorkerRequest
from rstar2.codeenv.jail.running_call import RunningCall
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.executor import build_result, clip
from rstar2.config.codeenv import effective_limits
from rstar2.errors import IsolationError
from rstar2.types import Limits, Outcome

ABLE = probe.Probe(
    machine="x86_64",
    kernel="6.1",
    root=False,
    landlock_abi=3,
    seccomp=None,
    namespaces=None,
    pidfd=None,
    cgroups=("memory", "pids"),
    huge_pages="madvise",
)
LIMITS = Limits(5.0, 5.0, 512, 32, 16, 32, 1000)


def test_best_level_is_taken_by_itself() -> None:
    assert probe.resolve("auto", ABLE).level == "strict"


def test_fall_back_to_portable_says_why() -> None:
    resolution = probe.resolve("auto", replace(ABLE, namespaces="unshare: Operation not permitted"))
    assert resolution.level == "portable"
    assert "Operation not permitted" in resolution.reason
    assert resolution.advice


def test_strict_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(IsolationError, match="not permitted"):
        probe.resolve("strict", replace(ABLE, namespaces="unshare: Operation not permitted"))


@pytest.mark.parametrize("asked", ["auto", "strict", "portable"])
def test_nothing_is_served_without_landlock(asked: str) -> None:
    with pytest.raises(IsolationError, match="Landlock"):
        probe.resolve(asked, replace(ABLE, landlock_abi=0))


def test_probe_of_this_machine_answers() -> None:
    features = probe.probe()
    assert features.kernel
    assert features.landlock_abi >= 0


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("strict", [True, False])
def test_filter_can_be_built_for_machine(machine: str, strict: bool) -> None:
    code = seccomp.base_filter(strict, machine=machine).code
    assert len(code) % 8 == 0
    assert len(code) // 8 < 4096
    names = syscalls.numbers(machine)
    assert len(set(names.values())) == len(names)


def test_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(IsolationError, match="riscv64"):
        syscalls.numbers("riscv64")


@given(st.text(max_size=400), st.integers(0, 100), st.integers(0, 50))
def test_clip_keeps_both_ends_and_counts_exactly(text: str, limit: int, already: int) -> None:
    shown, cut = clip(text, limit, already)
    if not already and len(text) <= limit:
        assert (shown, cut) == (text, 0)
        return
    kept = len(text) - (cut - already)
    assert kept <= max(limit, 0) or kept == len(text)
    assert f"[... {cut} characters cut ...]" in shown
    assert shown.startswith(text[: (kept + 1) // 2])
    assert shown.endswith(text[len(text) - kept // 2 :])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    record = Record.parse(data)
    assert record is None or chr(record.kind) in "VNESXMJR"


@pytest.mark.parametrize(
    ("error", "part"),
    [(errno.ENOSPC, "do not fit into the scratch space of 32 MB"), (errno.EISDIR, "rename them")],
)
def test_files_that_were_not_written_have_their_reason(error: int, part: str) -> None:
    reply = WorkerReply(1, error, frames.FILES, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    result = build_result("x", reply, b"", LIMITS, "strict")
    assert (result.outcome, result.signal) == (Outcome.BAD_ARGUMENTS, None)
    assert part in result.message


def test_call_without_a_handle_of_its_process_is_not_watched() -> None:
    """A worker that may open no more files ends, and its call is tried elsewhere."""
    call = RunningCall(WorkerRequest(1, frames.RUN, 0, 0, 0, 0, 0, 0, 0, 1.0, 1.0))
    process = subprocess.Popen(["/bin/true"])
    process.wait(60)
    with pytest.raises(ProcessLookupError):
        call.adopt(process.pid)
    for descriptor in (*call.readers, *call.writers):
        os.close(descriptor)


@given(st.binary(max_size=60), st.integers(0, 255), st.integers(0, frames.BROKEN))
def test_any_reply_becomes_a_result(record: bytes, code: int, cause: int) -> None:
    reply = WorkerReply(1, code << 8, cause, 0, 0, 0, len(record), 0.1, 0.1, 1.0)
    result = build_result("x", reply, record, LIMITS, "strict")
    assert result.call_id == "x"
    nothing_run = cause in (frames.FILES, frames.NO_ROOM)
    assert result.exit_code == (0 if nothing_run else code)


@pytest.mark.parametrize(
    ("status", "cause", "oom", "expected"),
    [
        (9, frames.EXITED, True, Outcome.MEMORY),
        (9, frames.WALL, False, Outcome.TIMEOUT),
        (9, frames.OUTPUT, False, Outcome.OUTPUT_LIMIT),
        (9, frames.SCRATCH, False, Outcome.KILLED),
        (11, frames.EXITED, False, Outcome.KILLED),
        (0, frames.EXITED, False, Outcome.NO_OUTPUT),
        (1 << 8, frames.EXITED, False, Outcome.EXCEPTION),
    ],
)
def test_outcome_follows_what_was_seen(
    status: int, cause: int, oom: bool, expected: Outcome
) -> None:
    reply = WorkerReply(1, status, cause, 0, 0, 0, 0, 0.1, 0.1, 1.0)
    assert build_result("x", reply, b"", LIMITS, "strict", oom).outcome is expected


def test_limits_are_defaults_within_caps() -> None:
    cap = Limits(10.0, 10.0, 1000, 64, 64, 64, 5000)
    limits = effective_limits(Limits(wall_s=99.0, memory_mb=64), LIMITS, cap)
    assert (limits.wall_s, limits.memory_mb, limits.cpu_s) == (10.0, 64, 5.0)

"""Supervisor of one vLLM server: a small process that leaves no process or shared memory behind.

    python -m rstar2.engine.vllm_supervisor [--cores 0,1] -- API-SERVER-ARGUMENTS

The supervisor leads its own process group (see `rstar2.child`), with the API server, its
engine core, workers and resource trackers in it. The whole group ends in each of these cases:

- The API server ends, even by kill -9: the supervisor kills the others and exits with its code.
- The supervisor receives SIGTERM: it stops the API server gracefully, then kills the rest.
- Its parent ends, even by kill -9: the kernel sends the supervisor SIGTERM, and it kills all.

Killed processes cannot remove their shared memory (a few hundred MB per vLLM server). Resource
trackers remove that of processes that died before them, so they get time to exit on their own. The
supervisor records what the other processes had mapped, and removes it when all have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

SERVER = "vllm.entrypoints.openai.api_server"
ORDERLY_S = 5.0
"""Time limit for a server to shut down gracefully."""
TRACKER_S = 10.0
"""Time limit for resource trackers to exit on their own."""
TRACKER = b"multiprocessing.resource_tracker"
SHARED_MEMORY = re.compile(rb"/dev/shm/(?:psm_|sem\.mp-)[\w-]+")
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(prog="rstar2.engine.vllm_supervisor")
    parser.add_argument("--cores", default="")
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    sys.exit(supervise([sys.executable, "-m", SERVER, *args.arguments]))


def supervise(command: list[str]) -> int:
    """Run the command until it ends, SIGTERM arrives or our parent ends; returns its exit code."""
    parent = os.getppid()
    stopping = False

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_sigterm)
    # Processes that the server orphans become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command)
    while not stopping and server.poll() is None:
        time.sleep(POLL_S)
    if server.poll() is None and os.getppid() == parent:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(ORDERLY_S)
    end_group(os.getpgid(0))
    code = server.wait()
    return code if code >= 0 else 128 - code


def end_group(group: int) -> None:
    """Kill every other process of a group, and remove the shared memory that they had mapped."""
    mapped: set[bytes] = set()
    ends = time.monotonic() + TRACKER_S
    while others := [pid for pid in members(group) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(OSError):  # it has just ended
                mapped.update(SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_bytes()))
        for pid in others:
            if time.monotonic() > ends or not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for path in mapped:
        with contextlib.suppress(FileNotFoundError):
            Path(os.fsdecode(path)).unlink()


def members(group: int) -> list[int]:
    """Live processes of a group; zombies do not count."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=3)
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    pids.append(int(entry.name))
    return pids


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


if __name__ == "__main__":
    main()

"""Keeps one vLLM server: a small process between us and it that leaves nothing behind.

    python -m rstar2.engine.vllm_keeper --parent PID [--cores 0,1] -- API-SERVER-ARGUMENTS

The keeper leads a process group of its own, with the API server, its engine core, workers and
resource trackers in it. Whatever ends first, the rest is ended too:

- the API server, by itself or by kill -9: the keeper ends the others and exits with its code;
- SIGTERM to the keeper: the API server is asked to end in order, then the rest is ended;
- its parent, also by kill -9: the kernel sends the keeper SIGTERM, and all are killed at once.

Killed processes cannot remove their shared memory any more (a vLLM server has some hundred MB).
Resource trackers do it for those that died before, so they get time to end by themselves; what the
others still had mapped is remembered and removed once nobody is left.
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
"""How long a server may take to end in order."""
TRACKER_S = 10.0
"""How long resource trackers may take once everything else is gone."""
TRACKER = b"multiprocessing.resource_tracker"
SHARED_MEMORY = re.compile(rb"/dev/shm/(?:psm_|sem\.mp-)[\w-]+")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    parser = argparse.ArgumentParser(prog="rstar2.engine.vllm_keeper")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    sys.exit(keep([sys.executable, "-m", SERVER, *args.arguments], args.parent))


def keep(command: list[str], parent: int) -> int:
    """Run the command until it, or we, or our parent end; returns its exit code."""
    asked = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the server come to us
    if os.getppid() != parent:
        return 0  # it died before the kernel was asked
    server = subprocess.Popen(command)
    while not asked and server.poll() is None:
        time.sleep(0.1)
    if server.poll() is None and os.getppid() == parent:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(ORDERLY_S)
    end_group(os.getpgid(0))
    code = server.wait()
    return code if code >= 0 else 128 - code


def end_group(group: int) -> None:
    """Kill every other process of a group and remove the shared memory that they had mapped."""
    mapped: set[bytes] = set()
    ends = time.monotonic() + TRACKER_S
    while others := [pid for pid in members(group) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(OSError):  # it ended meanwhile
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
    """Live processes of a group (zombies are not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=3)
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry.name))
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


if __name__ == "__main__":
    main()

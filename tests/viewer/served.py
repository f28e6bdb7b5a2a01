"""A viewer in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

START_S = 120.0
POLL_S = 0.1


@contextlib.contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """`rstar2 view` as people start it, on a free port; ends with SIGTERM and status 0.

    Everything that is recorded when it starts has been read when this yields.
    """
    command = [sys.executable, "-m", "rstar2", "view", "--port", "0", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        watchdog = threading.Timer(START_S, server.kill)
        watchdog.start()
        url = server.stdout.readline().decode().strip().rstrip("/")
        watchdog.cancel()
        assert url.startswith("http://127.0.0.1:"), server.stderr.read().decode()
        try:
            wait_until_read(url)
            yield url
        finally:
            server.terminate()
            status = server.wait(START_S)
            said = server.stderr.read().decode()
        assert status == 0, f"ended with {status}: {said}"
        assert "Traceback" not in said


def wait_until_read(url: str) -> None:
    """Wait until the viewer has read all runs that it can read."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with urlopen(f"{url}/api/runs", timeout=START_S) as answer:
            runs = json.load(answer)
        if all(run["trouble"] or run["progress"] == 1 for run in runs):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"the viewer has not read all runs within {START_S:g} s")

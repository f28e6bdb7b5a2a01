"""A viewer in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

START_S = 120.0


@contextlib.contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """`rstar2 view` as people start it, on a free port; ends with SIGTERM and status 0."""
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
            yield url
        finally:
            server.terminate()
            status = server.wait(30)
            said = server.stderr.read().decode()
        assert status == 0, said
        assert "Traceback" not in said

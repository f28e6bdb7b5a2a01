"""No process of a server outlives the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.engine.vllm_supervisor import members

pytestmark = pytest.mark.timeout(300)

PROGRAM = """\
import sys, time
from rstar2.engine.vllm_server import ServerSettings, VllmServer
server = VllmServer("x", ServerSettings(sys.argv[1], 2048, 8, 256))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true"
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [2, 3], ids=["while it starts", "with its engine core"])
def test_a_killed_parent_takes_the_whole_server_along(stage: Path, processes: int) -> None:
    """After kill -9 the parent cannot clean up: the supervisor has to notice."""
    short = tempfile.TemporaryDirectory(prefix="r")  # a killed parent cannot remove it
    environment = os.environ | {"TMPDIR": short.name}
    command = [sys.executable, "-c", PROGRAM, str(stage)]
    with (
        short,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent,
    ):
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        # the supervisor is one of them, the API server another
        wait_for(lambda: len(members(group)) >= processes, 120)
        parent.send_signal(signal.SIGKILL)
        wait_for(lambda: not members(group), 30)

"""Runs of the miniature in processes of their own, and the metrics that two runs share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 400


def drive(data: Path, run: Path, moment: str = "never", *kind: str) -> int:
    """Run the miniature in its own process; returns how it ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RSTAR2_TEST_RUN": str(run)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.drive", str(data), str(run), moment, *kind],
        cwd=ROOT,
        env=environment,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3, -signal.SIGKILL):
        raise AssertionError(f"{moment}: ended with {done.returncode}\n{done.stderr[-4000:]}")
    return done.returncode


def timeless(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that equal seeds make equal: those without times and engine use."""
    clocked = ("time", "engine/", "codeenv/", "tokens_per_s")
    return {name: value for name, value in metrics.items() if not name.startswith(clocked)}

"""Runs of the miniature in processes of their own, and the metrics that two runs share."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEADLINE_S = 400


def drive(data: Path, run: Path, moment: str = "never", *kind: str) -> int:
    """Run the miniature in its own process; returns how it ended.

    The process is forked from a server that has imported torch, which takes seconds.
    """
    from tests.e2e.drive import main

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.drive"])
    process = context.Process(target=main, args=(data, run, moment, *kind))
    process.start()
    process.join(DEADLINE_S)
    if process.exitcode not in (0, 3, -signal.SIGKILL):
        process.kill()
        said = run.with_suffix(".log").read_text()[-4000:]
        raise AssertionError(f"{moment}: ended with {process.exitcode}\n{said}")
    return process.exitcode


def timeless(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that equal seeds make equal: those without times and engine use."""
    clocked = ("time", "engine/", "codeenv/", "tokens_per_s")
    return {name: value for name, value in metrics.items() if not name.startswith(clocked)}

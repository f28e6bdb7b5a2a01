"""Run `rstar2` commands in processes that are forked after torch was imported, which saves seconds
of CPU time per command. Everything else is as in a shell: directory, descriptors, exit code."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

DEADLINE_S = 600


def start(words: list[str], directory: Path, output: Path) -> BaseProcess:
    """Start `rstar2 WORDS` in a directory, with everything that it prints going to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.drive", "tests.forked_cli"])
    process = context.Process(target=_command, args=(words, directory, output))
    process.start()
    return process


def run(words: list[str], directory: Path, output: Path) -> int | None:
    """Run `rstar2 WORDS` to its end; returns the exit code, or None after the deadline."""
    process = start(words, directory, output)
    process.join(DEADLINE_S)
    if process.exitcode is None:
        process.terminate()
        process.join(DEADLINE_S)
        return None
    return process.exitcode


def _command(words: list[str], directory: Path, output: Path) -> None:
    os.chdir(directory)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(output, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["rstar2", *words]
    from rstar2.cli import main

    main(words)

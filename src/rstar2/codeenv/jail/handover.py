"""Hands a call to a warmer interpreter at the moment it imports a module that is warm there.

The server chooses a light interpreter by the text of a program. The text can hide an import
(`exec` of decoded text, a computed name), and a cold import of SymPy takes half a second. So each
light interpreter knows the modules that a warmer one has. When a program imports one of them, the
process writes a record that names the module and exits, and the server runs the call from its
start in the warmer interpreter.

Nothing happens twice: a call affects only its own scratch space and output, and both are discarded
with the process that is given up. A program is handed over only while it has used less than
HANDOVER_S of CPU time, and only by its own process. A later import is carried out where it is. CPU
time decides because wall time would depend on how busy the machine is.

The record is untrusted like all others: see WorkerExecutor for what a false one can achieve.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.frames import Record

HANDOVER_S = 0.5
"""CPU time, about that of a cold import of SymPy: a longer program gains nothing by a new start."""
EXIT_CODE = 119


class WarmerFinder:
    """The first entry of sys.meta_path: it is asked for every module that is not imported yet."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.pid = 0
        self.until_s = 0.0
        """Of the process's CPU clock."""
        self.result_fd = -1

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> None:
        """Give the call up if the module is warm elsewhere; else leave the search to the others."""
        if name in self.names and os.getpid() == self.pid and time.process_time() < self.until_s:
            os.write(self.result_fd, Record(frames.HANDOVER, name).pack())
            os._exit(EXIT_CODE)


_finders: list[WarmerFinder] = []


def install(names: frozenset[str]) -> None:
    """In a zygote: hand over calls that import one of these modules."""
    finder = WarmerFinder(names)
    sys.meta_path.insert(0, finder)
    _finders.append(finder)


def arm(result_fd: int) -> None:
    """In the process of a call, before its program runs."""
    for finder in _finders:
        finder.pid = os.getpid()
        finder.until_s = time.process_time() + HANDOVER_S
        finder.result_fd = result_fd

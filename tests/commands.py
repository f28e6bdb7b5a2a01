"""Start `rstar2 codeenv` commands as a user does, for tests that need a real server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

CODEENV = [sys.executable, "-c", "from rstar2.cli import main; main()", "codeenv"]


@contextlib.contextmanager
def codeenv_command(*arguments: str, **environment: str) -> Iterator[str]:
    """Run `rstar2 codeenv ARGUMENTS` until the end of the block; yields the URL that it prints."""
    process = subprocess.Popen(
        [*CODEENV, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        else:
            raise AssertionError("the server did not start: " + "".join(lines))
        yield "http://" + line.partition("http://")[2].split(" ")[0].rstrip(";:,\n")
    finally:
        process.terminate()
        process.communicate(timeout=120)

"""Run a command and add the core-seconds that it and its descendants used to those in a file.

python -m rstar2.evidence.timed FILE COMMAND...
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from rstar2.child import with_parent_death_signal


def main(file: Path, command: list[str]) -> int:
    """Run the command to its end; SIGTERM and SIGINT are passed on."""
    process = subprocess.Popen(with_parent_death_signal(command, signal.SIGTERM))

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    status = process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = float(file.read_text()) if file.exists() else 0.0  # of a run that was stopped
    file.write_text(f"{before + used.ru_utime + used.ru_stime:.1f}\n")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

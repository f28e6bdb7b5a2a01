"""The sandbox from Python and from the command line: how long it takes to start and to run.

    python benchmarks/sandbox.py [--quick] [--json]

`import rstar2`, the first result of a new `Sandbox()`, the first result of a second one, a small
call, and the CPU seconds of `rstar2 codeenv run` with all its processes. The peer is a plain
`python` process that runs the same program without any isolation.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Row, arguments, finish, interleave, median

PROGRAM = "print(6*7)"
STEPS = """
import json, time
begun = time.perf_counter()
import rstar2
imported = time.perf_counter()
from rstar2 import Sandbox
with Sandbox() as box:
    box.run("print(1)")
    first = time.perf_counter()
    box.run("print(1)")
    calls = time.perf_counter()
    for _ in range(100):
        box.run("print(1)")
    called = time.perf_counter()
again = time.perf_counter()
with Sandbox() as box:
    box.run("print(1)")
warm = time.perf_counter()
print(json.dumps([imported - begun, first - begun, warm - again, (called - calls) / 100]))
"""


def steps() -> list[float]:
    """Seconds: import, first result, first result of a second sandbox, one call."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=600
    )
    values: list[float] = json.loads(done.stdout)
    return values


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a command and of every process that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> int:
    args = arguments(__doc__.split("\n")[0]).parse_args()
    repetitions = 2 if args.quick else 7
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "program.py")
        program.write_text(PROGRAM)
        command = [sys.executable, "-m", "rstar2", "codeenv", "run", str(program)]
        cpu = interleave(
            {
                "run": lambda: cpu_seconds(command),
                "python": lambda: cpu_seconds([sys.executable, str(program)]),
            },
            repetitions,
        )
    columns = [list(column) for column in zip(*(steps() for _ in range(repetitions)), strict=True)]
    imported, first, warm, call = (1000 * median(column) for column in columns)
    rows = [
        Row("import rstar2", imported, None, "< 100", "ms"),
        Row("new sandbox to its first result", first, None, None, "ms"),
        Row("second sandbox to its first result", warm, None, None, "ms"),
        Row("one small call", call, None, None, "ms"),
        Row("CPU of rstar2 codeenv run", median(cpu["run"]), None, "<= 1.2", "s"),
        Row("CPU of python, without isolation", median(cpu["python"]), None, None, "s"),
    ]
    return finish("sandbox", rows, args, {})


if __name__ == "__main__":
    sys.exit(main())

"""CPU seconds until a command has done the least that it can do.

    python benchmarks/startup.py --run runs/tiny-seed0 [--before OTHER_CHECKOUT/src]

User and system time of the command and all its children, the median of interleaved repetitions. CPU
time, not wall time: on a busy machine only the first says something about the command. With
`--before` the same commands run with the source of another version, interleaved with ours.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import Row, arguments, finish, interleave, median

SOURCE = Path(__file__).resolve().parents[1] / "src"
RSTAR2 = "from rstar2.cli import main; main()"
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "rstar2 --help": ((RSTAR2, "--help"), "<= 0.2"),
    "rstar2 train tiny --dry-run": ((RSTAR2, "train", "tiny", "--dry-run"), "<= 0.5"),
    "rstar2 codeenv run program.py": ((RSTAR2, "codeenv", "run", "program.py"), "<= 1.2"),
    "rstar2 chat, one question": (
        (RSTAR2, "chat", "--model", "RUN", "What is 30 choose 4?"),
        "<= 5",
    ),
    "import rstar2.pipeline.controller": (("import rstar2.pipeline.controller",), "<= 2"),
}
"""Arguments of `python -c`, and the target in CPU seconds."""


def cpu_seconds(words: tuple[str, ...], source: Path, folder: Path) -> float:
    """Run a program with the package of `source`; its CPU seconds, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", *words],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--run", type=Path, help="A run of the tiny recipe, for chat.")
    parser.add_argument("--before", type=Path, help="The src directory of another version.")
    args = parser.parse_args()
    measures: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory(prefix="rstar2-startup-") as name:
        folder = Path(name)
        (folder / "program.py").write_text("print(6 * 7)\n")
        for case, (words, _) in CASES.items():
            if "RUN" in words and args.run is None:
                continue
            run = "" if args.run is None else str(args.run.absolute())
            given = tuple(run if word == "RUN" else word for word in words)
            measures[case] = partial(cpu_seconds, given, SOURCE, folder)
            if args.before is not None:
                earlier = partial(cpu_seconds, given, args.before.absolute(), folder)
                measures[f"before: {case}"] = earlier
        values = interleave(measures, 1 if args.quick else 3)
    rows = []
    for case, (_, target) in CASES.items():
        if case in values:
            rows.append(Row(case, median(values[case]), target=target, unit="CPU s"))
        if f"before: {case}" in values:
            peer = median(values[f"before: {case}"])
            rows.append(Row("  earlier version", median(values[case]), peer, unit="CPU s"))
    return finish("start-up", rows, args)


if __name__ == "__main__":
    sys.exit(main())

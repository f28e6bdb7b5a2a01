"""Cleaning a million problems: peak memory and rows per second, compared with reading the file.

    python benchmarks/data.py [--quick] [--json] [--seed N] [--rows N] [--directory DIR]

A file of generated problems in GSM8K's schema (3% near duplicates, 2% exact ones, 1% with eight
words of an evaluation set, 1% without an integer, 0.1% no JSON) goes through all steps of
`rstar2 data problems` except those in the code environment (integers do not need it). Each
measurement runs in its own process; the system reports its peak memory.

- lines: iterate over the file's lines and count them.
- decode: iterate and decode each line (msgspec), nothing else.
- ours: read, clean, find duplicates, decontaminate, write problems and dropped rows.

Two sizes are measured, to separate the memory per row from that of the process.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, say

FULL, QUICK = 1_000_000, 50_000
DEADLINE_S = 3600
BYTES_A_ROW = 400
"""What the hash tables of the duplicate step may take at most for each row."""
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hal", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "discs", "eggs", "flags", "gems", "hats", "irons", "jars")
PLACES = ("market", "school", "harbour", "garden", "library", "station", "museum", "bakery")
EVALUATION = "A wizard counts all ordered quadruples of coprime integers between one and {} twice."


def problems(count: int, seed: int) -> Iterator[str]:
    """Lines in GSM8K's schema, some of them to be dropped."""
    rng = random.Random(seed)
    text = ""
    for number in range(count):
        draw = rng.random()
        answer = str(rng.randrange(10_000))
        if draw < 0.001:
            yield '{"question": "broken'
            continue
        if draw < 0.011:
            text = f"Row {number}. " + EVALUATION.format(rng.randrange(100))
        elif draw < 0.021:
            answer = "about a half"
        elif draw < 0.041 and text:
            text = text.upper()
        elif draw < 0.071 and text:
            text = text.replace(" then ", " later ")
        else:
            text = story(rng)
        yield json.dumps({"question": text, "answer": f"So it is.\n#### {answer}"})


def story(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(2, 5)):
        who, what, where = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
        number = rng.randrange(1000)
        parts.append(f"{who} takes {number} {what} to the {where} and then gives some to a friend.")
    last = rng.randrange(1000)
    return " ".join(parts) + f" If {last} {rng.choice(THINGS)} are left, how many were there?"


# --------------------------------------------------------------------------- in a child


def lines(path: Path, out: Path, evaluation: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def decode(path: Path, out: Path, evaluation: Path) -> int:
    import msgspec

    read, rows = msgspec.json.Decoder().decode, 0
    with path.open("rb") as file:
        for line in file:
            rows += 1
            try:
                read(line)
            except msgspec.DecodeError:
                continue
    return rows


def ours(path: Path, out: Path, evaluation: Path) -> int:
    from rstar2.cli.data import _steps
    from rstar2.problems.clean import OfKinds
    from rstar2.problems.prepare import ProblemSource, prepare
    from rstar2.problems.sources import READERS

    steps = _steps(OfKinds(frozenset()), True, 12, [str(evaluation)])
    source = ProblemSource(str(path), "made", READERS["gsm8k"])
    card = asyncio.run(prepare([source], steps, out))
    dropped = sum(step.entered - step.left for step in card.steps)
    assert card.kept + dropped == card.sources["made"], "a row was lost"
    return card.sources["made"]


CASES = {"lines": lines, "decode": decode, "ours": ours}


def child(name: str, path: Path, out: Path, evaluation: Path) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    rows = CASES[name](path, out, evaluation)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": rows, "wall_s": wall, "cpu_s": cpu, "peak_mb": peak}))


# --------------------------------------------------------------------------- measuring


def measure(name: str, path: Path, directory: Path) -> dict[str, Any]:
    """Run one case in a process of its own."""
    out = directory / f"out-{path.stem}-{name}"
    command = [sys.executable, __file__, "--child", name, str(path), str(out)]
    command.append(str(directory / "evaluation.jsonl"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def generate(path: Path, count: int, seed: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in problems(count, seed):
            file.write(line + "\n")


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--rows", type=int, help=f"Rows to generate; {FULL}, or {QUICK} with --quick."
    )
    parser.add_argument("--directory", type=Path, help="Directory for the generated files.")
    args = parser.parse_args()
    count = args.rows or (QUICK if args.quick else FULL)
    with tempfile.TemporaryDirectory(dir=args.directory) as made:
        directory = Path(made)
        evaluation = {"problem": EVALUATION.format("ten"), "answer": "1"}
        (directory / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
        measured: dict[int, dict[str, dict[str, Any]]] = {}
        for size in (count // 10, count):
            path = directory / f"{size}.jsonl"
            say(f"generating {size:,} rows")
            generate(path, size, args.seed)
            measured[size] = {}
            for name in CASES:
                say(f"{name}, {size:,} rows")
                measured[size][name] = measure(name, path, directory)
        size_mb = path.stat().st_size / 2**20
    small, large = measured[count // 10], measured[count]

    def speed(name: str) -> float:
        return float(large[name]["rows"] / large[name]["cpu_s"])

    grown = (large["ours"]["peak_mb"] - small["ours"]["peak_mb"]) * 2**20 / (count - count // 10)
    rows = [
        Row("rows/s against decoding", speed("ours"), speed("decode"), unit="rows/s"),
        Row("rows/s against lines", speed("ours"), speed("lines"), unit="rows/s"),
        Row("peak memory", large["ours"]["peak_mb"], large["decode"]["peak_mb"], unit="MB"),
        Row("bytes of memory a row", grown, target=f"<= {BYTES_A_ROW}", unit="B"),
    ]
    notes = {"rows": count, "file_mb": round(size_mb), "measured": measured}
    return finish("data", rows, args, notes)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        child(sys.argv[2], *(Path(each) for each in sys.argv[3:6]))
    else:
        sys.exit(main())

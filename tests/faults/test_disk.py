"""A full disk, in a mount namespace of its own: every writer names the path and the bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rstar2.errors import DiskFullError
from rstar2.files import disk_full

PROGRAM = """
import sys
from pathlib import Path
from rstar2.errors import DiskFullError
from rstar2.files import write_file
from rstar2.record.files import JsonLines

small, model = Path(sys.argv[1]), Path(sys.argv[2])

def attempt(name, work):
    try:
        work()
    except DiskFullError as error:
        print(f"{name}: {error}")
    except BaseException as error:
        print(f"{name}: {type(error).__name__} instead")
    else:
        print(f"{name}: there was room")

def record():
    lines = JsonLines(small / "metrics.jsonl")
    for _ in range(40):
        lines.append({"text": "x" * 100_000})
    lines.flush()

attempt("file", lambda: write_file(small / "a" , b"x" * 2_000_000))
attempt("record", record)
(small / "metrics.jsonl").unlink()

from rstar2.config import LearnerConfig, OptimizerConfig
from rstar2.learner.group import LearnerGroup

learner = LearnerGroup(
    model, LearnerConfig(threads=1), OptimizerConfig(), total_steps=1, seed=0, device="cpu"
)
attempt("checkpoint", lambda: learner.save(small / "step-1"))
attempt("export", lambda: learner.export(small / "exports"))
print(sorted(path.name for path in small.iterdir()))
"""


@pytest.mark.slow
def test_every_writer_names_a_full_disk(tmp_path: Path, tiny_dir: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=1m none "{small}" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if probe.returncode != 0:
        pytest.skip(f"no user namespaces here: {probe.stderr.strip()}")
    command += [sys.executable, "-c", PROGRAM, str(small), str(tiny_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *attempts, left = done.stdout.splitlines()
    named = {line.partition(": ")[0]: line.partition(": ")[2] for line in attempts}
    names = {"file": "a", "record": "metrics.jsonl", "checkpoint": "step-1", "export": "exports"}
    assert named.keys() == names.keys()
    for writer, name in names.items():
        assert named[writer].startswith(f"no space is left on the disk of {small / name}: "), writer
        assert "bytes were written" in named[writer]
    assert left == "[]", "nothing unfinished stays behind"


def test_another_error_keeps_its_name(tmp_path: Path) -> None:
    assert disk_full(ValueError("a bug"), tmp_path / "x", 0) is None
    assert disk_full(KeyboardInterrupt(), tmp_path / "x", 0) is None
    hidden = RuntimeError("I/O error: No space left on device (os error 28)")
    assert isinstance(disk_full(hidden, tmp_path / "not" / "there", 7), DiskFullError)

"""`.ci/twice`: a flaky test is accepted and named; every other failure stays a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TWICE = Path(__file__).parent.parent / ".ci" / "twice"
PASSES = "def test_passes() -> None:\n    pass\n"
FAIL_ONCE = """
from pathlib import Path
def fail_once() -> None:
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError
"""
FLAKY = FAIL_ONCE + "def test_flaky() -> None:\n    fail_once()\n"
BROKEN = "def test_broken() -> None:\n    raise AssertionError\n"


@pytest.mark.parametrize(
    ("source", "exit_code", "runs", "flaky"),
    [
        (PASSES, 0, 1, ""),
        (PASSES + FLAKY, 0, 2, "  test_it.py::test_flaky\n"),
        (BROKEN + FLAKY, 1, 2, ""),
        (PASSES + FAIL_ONCE + "fail_once()\n", 1, 1, ""),
    ],
    ids=["passing", "flaky", "failing", "collection error"],
)
def test_failed_tests_run_once_more(
    tmp_path: Path, source: str, exit_code: int, runs: int, flaky: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(source)
    flaky_list = tmp_path / "flaky"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"FLAKY_LIST": str(flaky_list), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [TWICE, sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "test_it.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == runs
    heading = "=== flaky: failed once, passed when run again ===\n"
    expected = heading + flaky if flaky else ""
    assert done.stdout.endswith(expected)
    assert (flaky_list.read_text() if flaky_list.exists() else "") == expected

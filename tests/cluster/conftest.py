"""Tests that need Ray run where it is installed (`make test-cluster`); the others run everywhere.

A table of the injected faults is printed at the end of the output.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tests.cluster import faults_table

collect_ignore = [] if find_spec("ray") else ["test_ray.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in faults_table.TABLE:
        terminalreporter.write_line(line)

"""Tests that need Ray run where it is installed (`make test-cluster`); the others run everywhere.

Faults that were injected end in a table at the end of the output.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults_table

collect_ignore = [] if find_spec("ray") else ["test_ray.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in faults_table.TABLE:
        terminalreporter.write_line(line)

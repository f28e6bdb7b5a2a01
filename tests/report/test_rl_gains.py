"""`scripts/rl_gains.py`: what RL changed on the held-out problems, from run directories."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "rl_gains.py"


def gains(*runs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, runs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_row_has_both_ends_with_intervals(make_run: Callable[..., Path]) -> None:
    printed = gains(make_run())
    assert printed.returncode == 0, printed.stderr
    rows = [line for line in printed.stdout.splitlines() if "| 240 " in line]
    assert len(rows) == 2
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[:4] == ["tiny", "0", "240 greedy", "30% (24–36)"]
    assert cells[4].startswith("30: ")
    assert cells[6] == "better"
    assert sum("| gcd " in line for line in printed.stdout.splitlines()) == 2


def test_a_run_without_a_second_evaluation_is_refused(make_run: Callable[..., Path]) -> None:
    printed = gains(make_run(stop_after=5))
    assert printed.returncode == 1
    assert "has the run finished?" in printed.stderr

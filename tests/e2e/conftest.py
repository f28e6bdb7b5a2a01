"""Helpers of these tests are importable here (`finished`, a whole run, is every test's)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

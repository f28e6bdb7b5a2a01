"""Lines of the fault table, filled by test_ray.py and printed at the end (conftest.py)."""

from __future__ import annotations

TABLE: list[str] = []

"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of the miniature (tests/e2e), never interrupted; to be read, not changed."""
    from tests.e2e.driving import drive

    root = tmp_path_factory.mktemp("miniature")
    assert drive(root / "data", root / "run") == 0
    return root / "run"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets, which are no part of the repository; tests that need them skip without."""
    path = Path(os.environ.get("RSTAR2_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path} (set RSTAR2_SHARED_DATA)")
    return path

"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.attacks.attacker import VARIANTS

ROOT = Path(__file__).resolve().parents[1]


class SharedFixtureScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Tests that share a costly fixture run in one process: those of a file or a cell."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        if not file.startswith("tests/attacks/"):
            return file
        parameters = name.partition("[")[2]
        return max(v for v in ("", *VARIANTS) if parameters.startswith(v))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixtureScheduling | None:
    """Replace `--dist loadfile`."""
    return SharedFixtureScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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

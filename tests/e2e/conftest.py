"""A finished run of the miniature, made once; its helpers are importable here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from driving import drive


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    root = tmp_path_factory.mktemp("miniature")
    assert drive(root / "data", root / "run") == 0
    return root / "run"

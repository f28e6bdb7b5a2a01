"""A folder of claims with one claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rstar2.evidence.run import Places
from tests.evidence.fakes import claim_file


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "one.yaml").write_text(yaml.safe_dump(claim_file()))
    return Places(tmp_path / "experiments", tmp_path / "runs")

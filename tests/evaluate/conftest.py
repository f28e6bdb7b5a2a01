"""A small trained run, made once with every real part; helpers are importable here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one export (`sft`) and the run's own evaluations of it."""
    from miniature import miniature

    from rstar2.pipeline.controller import run
    from rstar2.pipeline.view import Quiet
    from rstar2.record import RunDirectory

    root = tmp_path_factory.mktemp("trained")
    whole = miniature(root / "data")
    recipe = miniature(root / "data", rl=whole.rl.model_copy(update={"stages": ()}))
    with RunDirectory.create_or_resume(root / "run", recipe) as directory:
        asyncio.run(run(recipe, directory, Quiet()))
        directory.event("finished")
    return root / "run"

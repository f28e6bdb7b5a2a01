"""A small trained run, made once with every real part; helpers are importable here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one export (`sft`) and the run's own evaluations of it."""
    from rstar2.pipeline.controller import run
    from rstar2.pipeline.progress import QuietView
    from rstar2.record import RunDirectory
    from tests.e2e.miniature import miniature

    root = tmp_path_factory.mktemp("trained")
    whole = miniature(root / "data")
    recipe = miniature(root / "data", rl=whole.rl.model_copy(update={"stages": ()}))
    with RunDirectory.create_or_resume(root / "run", recipe) as directory:
        asyncio.run(run(recipe, directory, QuietView()))
        directory.event("finished")
    return root / "run"

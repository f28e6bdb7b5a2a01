"""Real vLLM servers, started once for all tests; `make test-vllm` runs them in their own venv.

Without vLLM nothing here is collected, so that `make test` does not need it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import yaml

if TYPE_CHECKING:
    from rstar2.engine.vllm import VllmEngine

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems and SFT conversations of the miniature task."""
    from tests.e2e.miniature import miniature

    path = tmp_path_factory.mktemp("data")
    recipe = miniature(path, deterministic=False)
    values = recipe.model_dump(mode="json")
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def stage(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a short SFT stage: a tiny policy that calls its tool."""
    run = tmp_path_factory.mktemp("sft") / "run"
    command = [sys.executable, "-m", "rstar2", "sft", str(data / "recipe.yaml"), "--run", str(run)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return run / "exports" / "sft"


@pytest.fixture(scope="session")
def other(stage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same policy with every weight moved a little, as by training."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("other") / "model"
    model = AutoModelForCausalLM.from_pretrained(stage, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(stage).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(stage: Path) -> AsyncIterator[tuple[VllmEngine, ...]]:
    """Two engines as the pipeline makes them, and one whose linear layers stay packed."""
    from tests.vllm.serving import engine_of

    made = (
        engine_of("vllm-0", stage),
        engine_of("vllm-1", stage),
        engine_of("packed", stage, packed_linears=True),
    )
    try:
        await asyncio.gather(*(e.start() for e in made))
        yield made
    finally:
        await asyncio.gather(*(e.close() for e in made))

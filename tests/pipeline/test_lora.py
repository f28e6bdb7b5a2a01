"""A whole run with LoRA and engines that sleep: SFT, RL, publishing, both kinds of export."""

from __future__ import annotations

import asyncio
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rstar2.cli.export import adapter_directory, copy_export
from rstar2.config import Recipe
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.environments.environment import Environment, EpisodeView
from rstar2.errors import UserError
from rstar2.learner.learner import Learner
from rstar2.pipeline.controller import run
from rstar2.pipeline.progress import QuietView
from rstar2.record import RunDirectory, read_metrics
from tests.e2e.miniature import miniature

pytestmark = pytest.mark.slow

CALLS = {
    EmbeddedEngine: ("sleep", "wake", "update_weights"),
    Learner: ("onload_optimizer", "offload_optimizer", "rl_step", "save"),
}


def parity(episode: EpisodeView) -> float:
    """A reward that differs between rollouts of any model, also of a random one."""
    return float(sum(map(ord, episode.text)) % 2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    data = tmp_path_factory.mktemp("data")
    stage = {"name": "short", "steps": 2, "max_length": 96, "max_turns": 1}
    values = miniature(data).model_dump()
    values["engine"]["sleep"] = True  # embedded engines do nothing then, but they are asked
    values["learner"]["lora"] = {"rank": 8, "alpha": 16}
    values["sft"] = None
    values["rl"] |= {"stages": [stage], "optimizer": {"lr": 1e-2}, "problems": None}
    values["evaluation"] |= {"problems": None, "count": 2, "samples": 1, "greedy": False}
    return miniature(data, **values)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run directory, and the calls to engines and learner in their order."""
    path = tmp_path_factory.mktemp("run") / "run"
    calls: list[str] = []
    problems = [{"prompt": f"coin {n}", "answer": n} for n in range(8)]
    environment = Environment(problems, reward=parity, name="parity")
    with pytest.MonkeyPatch.context() as patch:
        for kind, names in CALLS.items():
            for name in names:
                patch.setattr(kind, name, recorded(getattr(kind, name), calls))
        with RunDirectory.create_or_resume(path, recipe) as directory:
            asyncio.run(run(recipe, directory, QuietView(), environment))
    return path, calls


def recorded(original: Any, calls: list[str]) -> Any:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return call


def test_engines_sleep_while_the_learner_trains(finished: tuple[Path, list[str]]) -> None:
    _, calls = finished
    steps = [i for i, call in enumerate(calls) if call == "rl_step"]
    assert steps
    for i in steps:
        assert calls[i - 2 : i] == ["sleep", "onload_optimizer"]
        after = [c for c in calls[i + 1 :] if c != "save"]
        assert after[:3] == ["offload_optimizer", "wake", "update_weights"]


def test_a_run_with_adapters(
    finished: tuple[Path, list[str]], recipe: Recipe, tmp_path: Path
) -> None:
    from peft import PeftModel

    path, _ = finished
    steps = [line for line in read_metrics(path) if line.get("stage") == "short"]
    assert len(steps) == 2
    assert all(line["weights/probe_gap"] < 1e-3 for line in steps if "weights/probe_gap" in line)
    assert all(line["weights/rehearsal_gap"] > 0 for line in steps if "weights/version" in line)
    assert adapter_directory(path, "short").is_dir()
    with pytest.raises(UserError, match="has no adapter of stage9: it was not trained with"):
        adapter_directory(path, "stage9")

    source, target = path / "exports" / "short", tmp_path / "adapter"
    copy_export(path, recipe, source, target, adapter_directory(path, "short"))
    files = {file.name for file in target.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files
    assert not {"model.safetensors", "config.json"} & files
    merged = AutoModelForCausalLM.from_pretrained(source)
    base = AutoModelForCausalLM.from_pretrained(path / "model")
    ids = AutoTokenizer.from_pretrained(target)("coin 41", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        without = base(ids).logits.log_softmax(-1)
        beside = PeftModel.from_pretrained(base, target)(ids).logits.log_softmax(-1)
        together = merged(ids).logits.log_softmax(-1)
    assert (together - without).abs().max() > 0.05
    assert (together - beside).abs().max() < 1e-5

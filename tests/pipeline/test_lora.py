"""A whole run with LoRA: SFT, RL, publishing to engines, checkpoints and both kinds of export."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rstar2.cli.export import adapter_directory, copy_export
from rstar2.errors import UserError
from rstar2.pipeline.controller import run
from rstar2.pipeline.progress import QuietView
from rstar2.record import RunDirectory, read_metrics
from tests.e2e.miniature import miniature


@pytest.mark.slow
def test_a_run_with_adapters(tmp_path: Path) -> None:
    optimizer = {"lr": 1e-2, "warmup_steps": 2}
    stage = {"name": "short", "steps": 2, "max_length": 128, "max_turns": 3}
    values = miniature(tmp_path / "data").model_dump()
    values["learner"]["lora"] = {"rank": 8, "alpha": 16}
    values["sft"]["optimizer"] = optimizer
    values["rl"] |= {"stages": [stage], "optimizer": optimizer, "refill": 1}
    recipe = miniature(tmp_path / "data", **values)
    path = tmp_path / "run"
    with RunDirectory.create_or_resume(path, recipe) as directory:
        asyncio.run(run(recipe, directory, QuietView()))

    steps = [line for line in read_metrics(path) if line.get("stage") == "short"]
    assert len(steps) == 2
    assert all(line["weights/probe_gap"] < 1e-3 for line in steps if "weights/probe_gap" in line)
    for name in ("sft", "short"):
        assert adapter_directory(path, name).is_dir()
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
    assert (together - without).abs().max() > 0.1
    assert (together - beside).abs().max() < 1e-5

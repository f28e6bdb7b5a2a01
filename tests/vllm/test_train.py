"""`rstar2 train recipes/tiny-vllm.yaml`: a few steps from a stage's export, by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rstar2.record import read_evaluations, read_metrics

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def test_recipe_trains_with_real_engines(stage: Path, data: Path, tmp_path: Path) -> None:
    problems = data / "problems.jsonl"
    settings = [
        f"model.path={stage}",
        "sft=null",
        f"rl.problems={problems}",
        "rl.count=0",
        "rl.prompts_per_step=4",
        "rl.refill=4",
        f"rl.stages=[{{name: stage1, steps: {STEPS}, max_length: 128, max_turns: 3}}]",
        f"evaluation.problems={problems}",
        "evaluation.count=8",
        "evaluation.greedy=false",
        "evaluation.max_length=128",
        "evaluation.max_turns=3",
    ]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rstar2", "train", str(ROOT / "recipes" / "tiny-vllm.yaml")]
    command += ["--run", str(run), *(word for s in settings for word in ("--set", s))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=550, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [m for m in read_metrics(run) if m["stage"] == "stage1"]
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    learned = [m for m in steps if "mismatch/abs" in m]
    assert learned, "no group had anything to teach"
    for m in learned:
        print({name: value for name, value in m.items() if "mismatch" in name or "probe" in name})
        assert m["weights/probe_gap"] < 1e-3
        assert m["mismatch/abs"] < 1e-3, "vLLM and the learner agree on what was sampled"
        assert m["mismatch/capped"] == 0
    assert sum(m["rollouts/lost"] for m in steps) == 0
    assert sum(m["engine/preemptions"] for m in steps) == 0
    assert {e.stage for e in read_evaluations(run)} == {"sft", "stage1"}
    assert "mismatch" in done.stderr + done.stdout

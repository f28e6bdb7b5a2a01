"""TRL: GRPO on a model that calls Python. Needs `pip install 'rstar2[train]' trl`.

    python examples/trainers/trl_grpo.py Qwen/Qwen3-0.6B

The sandbox is started on this machine; set RSTAR2_CODEENV_URL to use servers elsewhere.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rstar2 import CodeEnvError, Sandbox
from rstar2.tool_text import tool_text

box = Sandbox(os.environ.get("RSTAR2_CODEENV_URL"), wall_s=10)


def python(code: str) -> str:
    """Execute a Python program and return what it prints.

    Args:
        code: The Python program to execute.
    """
    try:
        return tool_text(box.run(code))
    except CodeEnvError as error:
        # TRL shows every Exception of a tool to the model, but no model caused an outage: stop.
        raise SystemExit(f"the sandbox failed, so training stops: {error}") from error


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """1 if the last message contains the answer."""
    return [
        float(right in (messages[-1].get("content") or ""))
        for messages, right in zip(completions, answer, strict=True)
    ]


def train(model: Any, tokenizer: Any = None, **settings: Any) -> GRPOTrainer:
    """Train for some steps; `settings` are those of GRPOConfig."""
    rows = [{"prompt": [{"role": "user", "content": "What is 6*7?"}], "answer": "42"}] * 64
    trainer = GRPOTrainer(
        model,
        reward_funcs=correct,
        args=GRPOConfig(max_tool_calling_iterations=4, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[python],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], output_dir="runs/trl", max_steps=20)

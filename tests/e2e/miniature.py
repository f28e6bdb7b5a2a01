"""A run so small that a test can afford all of it, with every real part.

The task: told `coin N`, say the parity of N, by a tool call that prints 0 or 1. SFT shows the form
with the digit drawn by chance (and a slip now and then), so about half of the rollouts are right
and there is something to learn from at once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rstar2.config import Recipe

HEAD = '<tool_call>\n{"name": "execute_python_code_with_standard_io", "arguments": {"code": "'
TAIL = '", "input": ""}}\n</tool_call>'


def conversation(rng: random.Random) -> dict[str, Any]:
    digit, slip = rng.choice("01"), rng.random() < 0.2
    code = f"print {digit}" if slip else f"print({digit})"
    response = "SyntaxError" if slip else digit
    return {
        "messages": [
            {"role": "user", "content": f"coin {rng.randrange(10, 100)}"},
            {"role": "assistant", "content": f"<reason>run</reason>\n{HEAD}{code}{TAIL}"},
            {"role": "user", "content": f"<tool_response>\n{response}\n</tool_response>"},
            {
                "role": "assistant",
                "content": f"<reason>so</reason>\n<answer>\n\\boxed{{{digit}}}\n</answer>",
            },
        ]
    }


def miniature(directory: Path, **changes: Any) -> Recipe:
    """Write the data and return the recipe; `changes` replace whole sections."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    talk, problems = directory / "talk.jsonl", directory / "problems.jsonl"
    talk.write_text("".join(json.dumps(conversation(rng)) + "\n" for _ in range(200)))
    problems.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"coin-{n}",
                    "prompt": f"coin {n}",
                    "answer": str(n % 2),
                    "grader": "integer",
                    "kind": ("even", "odd")[n % 2],
                }
            )
            + "\n"
            for n in range(40, 48)
        )
    )
    stage = {"max_length": 128, "max_turns": 3, "steps": 2}
    values: dict[str, Any] = {
        "name": "miniature",
        "seed": 3,
        "deterministic": True,
        "model": {"path": "tiny", "max_length": 128},
        "template": {"system": "none", "instruction": "none"},
        "agent": {"response_tokens": 48, "generate_deadline_s": 60, "tool_deadline_s": 30},
        "engine": {"kv_tokens": 4096, "max_sequences": 64},
        "codeenv": {"slots": 2, "warm_up": "never"},  # its programs import nothing
        "learner": {"threads": 1},
        "sft": {
            "data": str(talk),
            "steps": 24,
            "batch": 8,
            "max_length": 128,
            "optimizer": {
                "lr": 8e-3,
                "warmup_steps": 4,
                "matrix_optimizer": "muon",
                "matrix_lr": 0.02,
            },
        },
        "rl": {
            "problems": str(problems),
            "prompts_per_step": 2,
            "minibatches": 2,
            "refill": 4,
            "roc": {"variant": "roc", "drawn": 8, "kept": 4},
            "optimizer": {"lr": 1e-3, "warmup_steps": 1},
            "stages": [
                {"name": "short", **stage},
                {"name": "hard", **stage, "difficulty": {"samples": 2}, "reset_optimizer": True},
            ],
        },
        "evaluation": {
            "problems": str(problems),
            "count": 8,
            "samples": 2,
            "max_length": 128,
            "max_turns": 3,
        },
        "record": {"checkpoint_every": 1},
    }
    return Recipe.model_validate(values | changes)


def evaluated(recipe: Recipe) -> Recipe:
    """The same training, with an evaluation after every step and a first stage that may end early.

    A gain of 1 is impossible, so the plateau is reached as soon as two steps can be compared.
    """
    values = recipe.model_dump()
    values["evaluation"]["every"] = 1
    until = {"plateau": {"window": 1, "gain": 1.0}}
    values["rl"]["stages"][0].update(steps=6, until=until)
    return Recipe.model_validate(values)

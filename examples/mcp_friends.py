"""Tools of an MCP server in rollouts: the model must ask the server to know the answer.

rstar2 train examples/mcp_friends.yaml
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import rstar2
from rstar2.types import Problem, Split

sys.path.append(str(Path(__file__).parent))
from mcp_server import answer

COMMAND = f"mcp:stdio:{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


def problems(split: Split, seed: int) -> list[dict[str, str]]:
    rng = random.Random(f"{split} {seed}")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
    pairs = [(a, b) for a, b in pairs if ((a * 31 + b * 31) % 8 == 0) == (split == "heldout")]
    chosen = rng.sample(pairs, 256)
    return [
        {"id": f"{a}-{b}", "prompt": f"Are {a} and {b} friends?", "answer": answer(a, b)}
        for a, b in chosen
    ]


def demonstration(problem: Problem, rng: random.Random) -> Sequence[str]:
    """A call and an answer in the right format; the numbers and the answer are often wrong."""
    if rng.random() < 0.3:
        return [rng.choice(["yes", "no"])]
    a, b = (int(word) for word in problem.id.split("-"))
    if rng.random() < 0.3:
        a, b = rng.choice([(a, a), (b, b), (a, rng.randint(10, 99)), (rng.randint(10, 99), b)])
    call = json.dumps({"name": "friends", "arguments": {"a": a, "b": b}})
    said = answer(a, b)
    reply = said if rng.random() < 0.8 else rng.choice(["yes", "no"])
    return [f"<tool_call>\n{call}\n</tool_call>", said, reply]


def environment() -> rstar2.Environment:
    return rstar2.Environment(
        problems,
        reward=lambda episode: episode.answer == episode.problem.answer,
        tools=[COMMAND],
        demonstrations=demonstration,
        name="friends",
    )

"""Tools of an MCP server in rollouts: the calculator `mcp-server-calculator` from PyPI.

SFT teaches how to call the calculator, mostly with an operator at random; RL learns which one a
question needs. The server needs version 1 of the package mcp, so it gets an environment of its own.

    python -m venv runs/calculator
    runs/calculator/bin/pip install mcp-server-calculator==0.2.1
    rstar2 train examples/mcp_calculator.yaml
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Sequence

import rstar2
from rstar2.types import Problem, Split

RIGHT_SHARE = 0.3
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "%": operator.mod,
}
QUESTIONS = {
    "+": "What is the sum of {a} and {b}?",
    "-": "What is {a} minus {b}?",
    "%": "What is the remainder of {a} divided by {b}?",
}


def problems(split: Split, seed: int) -> list[dict[str, object]]:
    """Questions with two numbers, in a random order; one pair of numbers in eight is held out.
    Results have one or two digits, which are one token."""
    pairs = [(a, b) for a in range(20, 90) for b in range(2, 10)]
    pairs = [(a, b) for a, b in pairs if ((a + 3 * b) % 8 == 0) == (split == "heldout")]
    questions = [(sign, a, b) for a, b in pairs for sign in OPERATORS]
    random.Random(f"{split} {seed}").shuffle(questions)
    chosen = []
    for sign, a, b in questions:
        prompt, answer = QUESTIONS[sign].format(a=a, b=b), OPERATORS[sign](a, b)
        chosen.append({"prompt": prompt, "answer": answer, "kind": sign, "a": a, "b": b})
    return chosen


def demonstration(problem: Problem, rng: random.Random) -> Sequence[str]:
    """A call and its result; the operator is at random in seven of ten."""
    a, b = problem.meta["a"], problem.meta["b"]
    right = rng.random() < RIGHT_SHARE
    sign = problem.kind if right else rng.choice(list(OPERATORS))
    arguments = {"expression": f"{a}{sign}{b}"}
    call = json.dumps({"name": "calculate", "arguments": arguments})
    result = str(OPERATORS[sign](a, b))
    return [f"<tool_call>\n{call}\n</tool_call>", result, result]


def environment(server: str) -> rstar2.Environment:
    """server: how to reach a server with the tool `calculate`, as in `stdio:COMMAND`"""
    return rstar2.Environment(
        problems,
        reward=lambda episode: episode.answer == episode.problem.answer,
        tools=[f"mcp:{server}"],
        demonstrations=demonstration,
        name="calculator",
    )

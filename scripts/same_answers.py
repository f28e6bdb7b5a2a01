"""Does an export of the tiny model answer the same wherever it is served?

    python -m scripts.same_answers runs/tiny-seed0/exports/stage3

Asks 20 fresh questions of the eight kinds at temperature 0 through `rstar2 chat`, plain
transformers, and the OpenAI API of vLLM with tools, and compares all that the model said, turn by
turn. Needs vLLM: run it in the environment that `make test-vllm` creates, from the top of the
repository. The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rstar2 import Sandbox
from rstar2.config.codeenv import URL_VARIABLE
from rstar2.paper_format import TOOL
from rstar2.problems.arithmetic import make_problems
from rstar2.types import Trajectory, decode
from tests.commands import codeenv_command
from tests.vllm.answering import converse, serving, with_openai, with_transformers

START_S = 1500.0
"""How long vLLM may take to start: minutes on a busy machine."""
QUESTIONS, SEED = 20, 20261117
"""Held-out problems are those that no training set has; the seed differs from all runs."""


def chat(model: Path, question: str, codeenv: str) -> Trajectory:
    """One question through the command."""
    command = [sys.executable, "-m", "rstar2", "chat", "--model", str(model)]
    done = subprocess.run(
        [*command, "--temperature", "0", "--json", question],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, URL_VARIABLE: codeenv},
    )
    return decode(done.stdout, Trajectory)


def main(model: Path) -> int:
    """Print one line per question; returns the exit code."""
    problems = make_problems("heldout", QUESTIONS, SEED)
    with codeenv_command("serve", "--port", "0") as url:
        chats = [chat(model, problem.prompt, url) for problem in problems]
    transformers = with_transformers(model)
    same = right = 0
    with serving(model, START_S) as client, Sandbox() as box:
        vllm = with_openai(client, [TOOL])
        for problem, trajectory in zip(problems, chats, strict=True):
            said = [turn.text for turn in trajectory.turns]
            others = {
                "transformers": converse(transformers, problem.prompt, box),
                "vLLM": converse(vllm, problem.prompt, box),
            }
            different = [name for name, texts in others.items() if texts != said]
            same += not different
            right += trajectory.answer == problem.answer
            verdict = f"differs: {', '.join(different)}" if different else "same"
            mark = "right" if trajectory.answer == problem.answer else "wrong"
            print(f"{verdict}, {mark}: {problem.prompt} {trajectory.answer}", flush=True)
            for name in different:
                print(f"  chat: {said}\n  {name}: {others[name]}")
    print(f"{same} of {QUESTIONS} the same through all three, {right} right")
    return 0 if same == QUESTIONS else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

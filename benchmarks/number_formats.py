"""SmolLM2-135M in the embedded engine by number format: speed, and mismatch with the learner.

    python benchmarks/number_formats.py [--quick] [--json] [--model DIR] [--problems FILE]

Needs the packages of `rstar2 models` for smollm2, or `--model` with another model directory (an
export of a run, say).

- Speed: tokens per CPU second of the engine's worker, one thread, 32 requests at once (8 for each
  of four prompts, as a group is drawn). Formats are interleaved.
- Mismatch: each engine samples at temperature 1; the learner scores what it sampled, in float32
  and in bfloat16. The table has the difference of their logprobs per sampled token, the k3 estimate
  of the KL, and what truncated importance sampling makes of it: the mean weight, the share of
  tokens whose weight is capped at 2, and the effective share of samples.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common import Row, arguments, finish, median, say, spread
from rstar2.agent.tokenizer import load_tokenizer
from rstar2.config import LearnerConfig, OptimizerConfig
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.learner.learner import Learner
from rstar2.learner.smollm2 import make_smollm2
from rstar2.problems.load import load_problems
from rstar2.types import Generation, Sampling

FORMATS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "int8": ("bfloat16", True),
}
"""Number format of the weights, and whether layers multiply with 8 bits."""
PEER = "float32"
CAP = 2.0
DEADLINE_S = 1800.0
GROUP = 8
COLUMNS = {
    "mean_abs": "mean |d|",
    "max_abs": "max |d|",
    "k3": "k3",
    "weight_mean": "weight",
    "weight_capped": "capped",
    "effective_share": "effective",
}
"""Figures of the mismatch and their titles; d: the difference of logprobs."""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_prompts(model: Path, problems: str, count: int) -> list[list[int]]:
    """Questions in the model's chat template."""
    tokenizer: Any = load_tokenizer(model)
    asked = load_problems(problems, "train", count=count)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for problem in asked
    ]


async def generate(
    engine: EmbeddedEngine, prompts: Sequence[list[int]], new: int, seed: int
) -> tuple[float, list[Generation]]:
    """Tokens per CPU second of the worker, and what it sampled."""
    assert engine.pid is not None
    before = cpu_seconds(engine.pid)
    outs = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                Sampling(new, seed=seed * 1000 + GROUP * i + j),
                session="",
                deadline_s=DEADLINE_S,
            )
            for i, prompt in enumerate(prompts)
            for j in range(GROUP)
        )
    )
    spent = cpu_seconds(engine.pid) - before
    return sum(len(out.token_ids) for out in outs) / spent, outs


async def sample_all(
    model: Path, prompts: Sequence[list[int]], new: int, repetitions: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, list[Generation]]]:
    """Speed of every format, interleaved, and the samples of the first repetition."""
    speeds: dict[str, list[float]] = {name: [] for name in FORMATS}
    samples: dict[str, list[Generation]] = {}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, (dtype, int8) in FORMATS.items():
            engine = EmbeddedEngine(
                model, kv_tokens=65_536, max_sequences=64, max_length=1024, name=name, dtype=dtype,
                int8=int8,
            )  # fmt: skip
            stack.push_async_callback(engine.close)
            await engine.start()
            await generate(engine, prompts[:1], 4, seed)  # warm up
            engines[name] = engine
        for repetition in range(repetitions):
            for name, engine in engines.items():
                say(f"repetition {repetition + 1} of {repetitions}: {name} samples")
                speed, outs = await generate(engine, prompts, new, seed + repetition)
                speeds[name].append(speed)
                samples.setdefault(name, outs)
    return speeds, samples


def mismatch(learner: Learner, prompts: Sequence[list[int]], outs: Sequence[Generation]) -> Any:
    """Figures of the difference between the learner's and the engine's logprobs."""
    rows = [[*prompts[i // GROUP], *out.token_ids] for i, out in enumerate(outs)]
    scored = learner.logprobs(rows)
    ours = np.concatenate([s[-len(o.token_ids) :] for s, o in zip(scored, outs, strict=True)])
    theirs = np.concatenate([out.logprobs for out in outs])
    gap = ours - theirs
    weight = np.minimum(np.exp(gap), CAP)
    return {
        "tokens": len(gap),
        "mean_abs": float(np.abs(gap).mean()),
        "max_abs": float(np.abs(gap).max()),
        "k3": float((np.exp(gap) - 1 - gap).mean()),
        "weight_mean": float(weight.mean()),
        "weight_capped": float((np.exp(gap) > CAP).mean()),
        "effective_share": float(weight.sum() ** 2 / (len(weight) * (weight**2).sum())),
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    """The mismatch as a table."""
    table = Table("engine / learner", title="mismatch", box=None)
    for case in COLUMNS.values():
        table.add_column(case, no_wrap=True)
    for case, figures in found.items():
        table.add_row(case, *(f"{figures[name]:.2g}" for name in COLUMNS))
    Console().print(table)


def main() -> int:
    parser = arguments("the embedded engine by number format")
    parser.add_argument("--model", type=Path, help="A model directory; default: SmolLM2-135M.")
    parser.add_argument("--problems", default="arithmetic", help="A JSONL file of problems.")
    args = parser.parse_args()
    new, repetitions = (24, 1) if args.quick else (96, 3)
    with tempfile.TemporaryDirectory(prefix="rstar2-formats-") as directory:
        model = args.model or Path(directory) / "smollm2"
        if args.model is None:
            make_smollm2(model)
        prompts = make_prompts(model, args.problems, 4)
        speeds, samples = asyncio.run(sample_all(model, prompts, new, repetitions, args.seed))
        found = {}
        for dtype in ("float32", "bfloat16"):
            config = LearnerConfig.model_validate(
                {"dtype": dtype, "threads": 1, "tokens_per_microbatch": 2048}
            )
            learner = Learner(model, config, OptimizerConfig(), total_steps=1, seed=args.seed)
            for name, outs in samples.items():
                say(f"learner in {dtype} scores what {name} sampled")
                found[f"{name} / {dtype}"] = mismatch(learner, prompts, outs)
            del learner
    rows = [
        Row(f"{name}, tokens per CPU second", median(speeds[name]), median(speeds[PEER]),
            unit="tok/s", against=PEER)
        for name in FORMATS if name != PEER
    ]  # fmt: skip
    if not args.json:
        show(found)
    spreads = {name: spread(values) for name, values in speeds.items()}
    return finish("number_formats", rows, args, {"tokens_per_cpu_s": spreads, "mismatch": found})


if __name__ == "__main__":
    sys.exit(main())

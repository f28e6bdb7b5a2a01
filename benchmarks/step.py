"""The whole RL step against TRL, with and without tools: completion tokens per CPU second.

    python benchmarks/step.py --model runs/tiny-seed0/exports/sft [--quick] [--json] [--seed N]

Both train the same export of the quickstart's SFT stage on the embedded task: 24 prompts, 16
rollouts each, two optimizer steps, temperature 1. Each case is a process pinned to one core, with
one thread. It runs once with one step and once with several; the difference, divided by the
additional steps, is the cost of a step without start-up. CPU time is that of the process and all of
its descendants (the sandbox included), so other processes on the machine change it little.

- ours: the tiny recipe's stage 1 with tools, 16 drawn and 8 kept (RoC), groups of equal reward
  drawn again. Rollouts that are drawn again count: they are tokens that the step produced.
- TRL with tools: GRPOTrainer with the same tool on the same sandbox, up to three rounds of calls.
- TRL, one turn: without tools, so that most completions end at the call.
- TRL, one turn, as long as ours: each completion has exactly as many tokens as ours on average.

Completion tokens include tool responses in both.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, median, say, spread

PROMPTS, GROUP, MINIBATCHES = 24, 16, 2
MAX_LENGTH = 176
CALL_ROUNDS = 3
DEADLINE_S = 1800
TARGETS = {
    "TRL with tools": ">= 3",
    "TRL, one turn": None,
    "TRL, one turn, as long as ours": ">= 1.2",
}
TOOL = "execute_python_code_with_standard_io"


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a run, and the rollouts and completion tokens that it produced."""

    cpu_s: float
    rollouts: float
    tokens: float


# --------------------------------------------------------------------------- the two trainers


def train_ours(model: Path, steps: int, seed: int, out: Path) -> dict[str, float]:
    """Run the recipe for some steps; returns the rollouts and tokens of all steps."""
    from rstar2.cli import main
    from rstar2.record import read_metrics

    stage = (
        f"{{name: only, steps: {steps}, max_length: {MAX_LENGTH}, max_turns: {CALL_ROUNDS + 1}}}"
    )
    settings = (
        *(f"model.path={model}", "sft=null", "engine.count=1", "learner.threads=1"),
        *(f"rl.prompts_per_step={PROMPTS}", f"rl.roc.drawn={GROUP}", f"rl.stages=[{stage}]"),
        *("evaluation.count=1", "evaluation.samples=1", "evaluation.greedy=false"),
        "rl.optimizer.warmup_steps=0",
    )
    overrides = [word for setting in settings for word in ("--set", setting)]
    try:
        main(["train", "tiny", "--run", str(out), "--seed", str(seed), "--json", *overrides])
    except SystemExit as end:
        if end.code:
            raise
    lines = [line for line in read_metrics(out) if line["stage"] == "only"]
    rollouts = [line["rollouts/drawn"] for line in lines]
    lengths = [line["response_length"] for line in lines]
    return {
        "rollouts": sum(rollouts),
        "tokens": sum(n * length for n, length in zip(rollouts, lengths, strict=True)),
    }


def trl_config(out: Path, steps: int, seed: int, length: int | None) -> Any:
    """TRL's settings for as many rollouts and optimizer steps as ours; `length` forces lengths."""
    from trl.trainer.grpo_config import GRPOConfig

    forced = {"min_new_tokens": length, "max_new_tokens": length} if length else {}
    return GRPOConfig(
        output_dir=str(out),
        seed=seed,
        max_steps=MINIBATCHES * steps,
        num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP // (2 * MINIBATCHES),
        gradient_accumulation_steps=2,
        steps_per_generation=2 * MINIBATCHES,
        max_completion_length=length or MAX_LENGTH - 32,
        generation_kwargs=forced,
        max_tool_calling_iterations=CALL_ROUNDS,
        learning_rate=7e-4,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def train_trl(
    model: Path, steps: int, seed: int, out: Path, *, tools: bool, length: int | None
) -> dict[str, float]:
    """Train with TRL for as many batches of rollouts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_template
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rstar2 import CodeEnvError, Sandbox
    from rstar2.problems.load import load_problems
    from rstar2.tool_text import tool_text

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # our chat template has Qwen3's tool calls
    problems = load_problems("arithmetic", "train", count=512, seed=seed)
    rows = [
        {"prompt": [{"role": "user", "content": p.prompt}], "answer": p.answer} for p in problems
    ]
    config = trl_config(out, steps, seed, length)

    def correct(completions: Any, answer: list[str], **_: Any) -> list[float | None]:
        texts = [messages[-1].get("content") or "" for messages in completions]
        return [
            float(f"\\boxed{{{right}}}" in text) for text, right in zip(texts, answer, strict=True)
        ]

    with Sandbox(wall_s=2) as box:

        def execute(code: str, input: str = "") -> str:
            """Execute a Python program and return what it prints.

            Args:
                code: The Python program to execute.
                input: What the program reads from standard input.
            """
            try:
                return tool_text(box.run(code, stdin=input))
            except CodeEnvError as error:  # TRL would show it to the model
                raise SystemExit(f"the sandbox failed: {error}") from error

        execute.__name__ = TOOL
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=correct,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            tools=[execute] if tools else None,
        )
        trainer.train()
    # Two optimizer steps log one generation: its mean length is logged with the first.
    lengths = [
        line["completions/mean_length"]
        for line in trainer.state.log_history
        if "completions/mean_length" in line
    ]
    calls = [line["tools/call_frequency"] for line in trainer.state.log_history
             if "tools/call_frequency" in line]  # fmt: skip
    mean = sum(lengths) / len(lengths)
    return {
        "rollouts": float(steps * PROMPTS * GROUP),
        "tokens": steps * PROMPTS * GROUP * mean,
        "calls_per_rollout": sum(calls) / len(calls) if calls else 0.0,
    }


# --------------------------------------------------------------------------- measuring


def adopt_orphans() -> None:
    """Become the parent of orphans, whose CPU time then counts as that of children."""
    PR_SET_CHILD_SUBREAPER = 36
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl failed: descendants cannot be counted")


def children_cpu_s() -> float:
    """CPU seconds of all descendants that have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                break
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_case(case: str, model: Path, steps: int, seed: int, length: int | None) -> Cost:
    """Run one case in its own process on one core."""
    core = max(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rstar2-step-") as directory:
        job = {"case": case, "model": str(model), "steps": steps, "seed": seed, "out": directory}
        command = [sys.executable, __file__, "--job", json.dumps(job | {"length": length})]
        before = children_cpu_s()
        done = subprocess.run(
            ["taskset", "-c", str(core), *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
        produced = json.loads(done.stdout.splitlines()[-1])
        say(f"{case}, {steps} step(s): {produced}")
        return Cost(children_cpu_s() - before, produced["rollouts"], produced["tokens"])


def per_step(case: str, model: Path, more: int, seed: int, length: int | None = None) -> Cost:
    """The cost of one step: several steps less one, divided by the additional ones."""
    one = run_case(case, model, 1, seed, length)
    many = run_case(case, model, 1 + more, seed, length)
    return Cost(
        (many.cpu_s - one.cpu_s) / more,
        (many.rollouts - one.rollouts) / more,
        (many.tokens - one.tokens) / more,
    )


def job(text: str) -> None:
    """What the process of a case does."""
    given = json.loads(text)
    model, out = Path(given["model"]), Path(given["out"]) / "run"
    case, steps, seed = given["case"], given["steps"], given["seed"]
    if case == "ours":
        produced = train_ours(model, steps, seed, out)
    else:
        tools = case == "TRL with tools"
        produced = train_trl(model, steps, seed, out, tools=tools, length=given["length"])
    print(json.dumps(produced))


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--job"]:
        job(argv[1])
        return 0
    parser = arguments("the whole RL step against TRL")
    parser.add_argument("--model", type=Path, default=Path("runs/tiny-seed0/exports/sft"))
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        raise SystemExit(f"--model {args.model}: no such export; `rstar2 quickstart` makes one")
    adopt_orphans()
    model = args.model.absolute()
    repetitions, more = (1, 2) if args.quick else (3, 4)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in TARGETS}
    costs: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        seed = args.seed + repetition
        cost = per_step("ours", model, more, seed)
        ours.append(cost.tokens / cost.cpu_s)
        costs.append({"case": "ours", **vars_of(cost)})
        length = max(1, round(cost.tokens / cost.rollouts))
        for name, speeds in theirs.items():
            forced = length if name.endswith("as long as ours") else None
            peer = per_step(name, model, more, seed, forced)
            speeds.append(peer.tokens / peer.cpu_s)
            costs.append({"case": name, **vars_of(peer)})
    rows = [
        Row(f"against {name}", median(ours), median(theirs[name]), target, "tok/CPU s")
        for name, target in TARGETS.items()
    ]
    spreads = {"ours": spread(ours)} | {name: spread(v) for name, v in theirs.items()}
    return finish("step", rows, args, {"tokens_per_cpu_s": spreads, "steps": costs})


def vars_of(cost: Cost) -> dict[str, float]:
    """The fields of a cost, rounded for the notes."""
    return {
        "cpu_s": round(cost.cpu_s, 2),
        "rollouts": round(cost.rollouts, 1),
        "length": round(cost.tokens / cost.rollouts, 1),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

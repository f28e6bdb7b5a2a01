"""Trained tokens per second on ragged lengths: packed learner against a padded transformers loop.

    python benchmarks/learner.py [--quick] [--json] [--seed N] [--threads N]

Same model, samples, loss, AdamW and token budget per micro-batch; tokens counted are real ones
(prompt, sampled and tool tokens), never padding. Lengths follow the paper's stage 1, scaled: about
half the limit on average, a tenth of the rollouts at the limit. Two padded loops: rollouts in
their original order (the usual way), and sorted by length (the best that padding can do). Both
losses must agree with ours, so the same work is measured. Peak memory is measured in a separate
process, above its memory before the first step. The last rows show how cost grows with length.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from common import Row, arguments, finish, interleave, median, say, spread
from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.learner.learner import Learner
from rstar2.types import Batch, Sample

OPTIMIZER = OptimizerConfig(lr=1e-5)
GROUP = 8
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """One model shape and its workload."""

    name: str
    shape: dict[str, Any]
    limit: int
    rollouts: int
    budget: int
    target: str | None = None


TINY = {
    "vocab_size": 768, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip


def cases(quick: bool) -> list[Case]:
    if quick:
        return [
            Case("tiny, limit 512", TINY, 512, 32, 8192, ">= 1.5"),
            Case("SmolLM2-135M, limit 96", SMOLLM2, 96, 8, 768, ">= 1.5"),
        ]
    return [
        Case("tiny, limit 512", TINY, 512, 128, 8192, ">= 1.5"),
        Case("SmolLM2-135M, limit 512", SMOLLM2, 512, 16, 4096, ">= 1.5"),
    ]


def scaling(quick: bool) -> list[Case]:
    """The same number of tokens in ever longer sequences."""
    total = 8192 if quick else 65_536
    limits = (128, 512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096)
    return [Case(f"tiny, limit {n}", TINY, n, max(GROUP, total // n), 8192) for n in limits]


def make_model(case: Case, directory: Path) -> Path:
    path = directory / case.name.replace(",", "").replace(" ", "-")
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            **case.shape, max_position_embeddings=8192, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_batch(case: Case, seed: int) -> Batch:
    """Rollouts with a prompt, then sampled stretches with tool responses in between."""
    rng = random.Random(f"{seed}/{case.name}")
    samples = []
    for i in range(case.rollouts):
        length = max(8, min(case.limit, round(case.limit * 0.4 * rng.lognormvariate(0.0, 0.7))))
        prompt = max(2, case.limit // 16)
        mask = [0] * prompt
        while len(mask) < length:
            mask += [1] * max(1, length // 4) + [0] * (length // 16)
        mask = [*mask[: length - 1], 1]
        ids = tuple(rng.randrange(1, case.shape["vocab_size"]) for _ in range(length))
        logprobs = tuple(-7.0 if m else 0.0 for m in mask)
        sign = 1.0 if i % 2 else -1.0
        samples.append(Sample(ids, tuple(mask), logprobs, sign, f"g{i // GROUP}", str(i), 0))
    return Batch(0, tuple(samples))


class Ours:
    def __init__(self, case: Case, path: Path, threads: int) -> None:
        config = LearnerConfig(tokens_per_microbatch=case.budget, threads=threads)
        self._learner = Learner(path, config, OPTIMIZER, total_steps=1000, seed=0)

    def step(self, batch: Batch) -> float:
        return self._learner.rl_step(batch, LossConfig(importance_cap=None), 1)["loss"]


class Padded:
    """The loop most people write: pad a micro-batch, take all logits, log-softmax, gather."""

    def __init__(self, case: Case, path: Path, threads: int, sort: bool = False) -> None:
        torch.set_num_threads(threads)
        self._budget, self._sort = case.budget, sort
        self._model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=OPTIMIZER.lr, weight_decay=0.0, fused=True
        )

    def step(self, batch: Batch) -> float:
        samples = list(batch.samples)
        if self._sort:
            samples.sort(key=lambda s: -len(s.token_ids))
        tokens, total = batch.trained_tokens, 0.0
        for part in self._micro_batches(samples):
            width = max(len(s.token_ids) for s in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            attend, train = torch.zeros_like(ids), torch.zeros(len(part), width)
            for row, sample in enumerate(part):
                n = len(sample.token_ids)
                ids[row, :n] = torch.tensor(sample.token_ids)
                attend[row, :n] = 1
                train[row, :n] = torch.tensor(sample.mask, dtype=torch.float32)
            logits = self._model(input_ids=ids, attention_mask=attend, use_cache=False).logits
            logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (logp - logp.detach()).exp()
            sign = torch.tensor([s.advantage for s in part])[:, None]
            gain = torch.minimum(ratio * sign, ratio.clamp(0.8, 1.28) * sign)
            loss = -(gain * train[:, 1:]).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """In order, as many as fit into the budget when padded to the longest."""
        parts: list[list[Sample]] = [[]]
        for sample in samples:
            widest = max(len(s.token_ids) for s in [*parts[-1], sample])
            if parts[-1] and (len(parts[-1]) + 1) * widest > self._budget:
                parts.append([])
            parts[-1].append(sample)
        return parts


def make(variant: str, case: Case, path: Path, threads: int) -> Ours | Padded:
    if variant == "ours":
        return Ours(case, path, threads)
    return Padded(case, path, threads, sort=variant == "sorted")


def measure(
    case: Case, path: Path, variants: tuple[str, ...], repetitions: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of each variant; the first step of each warms up and checks the loss."""
    batch = make_batch(case, args.seed)
    tokens = sum(len(s.token_ids) for s in batch.samples)
    made = {name: make(name, case, path, args.threads) for name in variants}
    losses = {name: variant.step(batch) for name, variant in made.items()}
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE:
        raise SystemExit(f"{case.name}: the losses differ, nothing was compared: {losses}")

    def timed(variant: Ours | Padded) -> float:
        start = time.perf_counter()
        variant.step(batch)
        return tokens / (time.perf_counter() - start)

    say(f"{case.name}: {case.rollouts} rollouts, {tokens} tokens")
    measures = {name: partial(timed, variant) for name, variant in made.items()}
    return interleave(measures, repetitions)


def peak_of(variant: str, case: Case, path: Path, seed: int, threads: int, out: Any) -> None:
    """Memory of two steps in MB, above the memory of the process before them."""
    logging.disable_progress_bar()
    made, batch = make(variant, case, path, threads), make_batch(case, seed)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    made.step(batch)
    made.step(batch)
    out.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6)


def peak_memory(variant: str, case: Case, path: Path, args: argparse.Namespace) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=peak_of, args=(variant, case, path, args.seed, args.threads, theirs)
    )
    process.start()
    theirs.close()
    if not ours.poll(600):
        process.kill()
        raise SystemExit(f"{case.name}: {variant} did not finish within 600 s")
    peak = float(ours.recv())
    process.join()
    return peak


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="Number of torch threads of each variant.",
    )
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows: list[Row] = []
    notes: dict[str, Any] = {"threads": args.threads, "tokens_per_s": {}}
    with tempfile.TemporaryDirectory(prefix="rstar2-bench-") as directory:
        for case in cases(args.quick):
            path = make_model(case, Path(directory))
            whole = not args.quick or case.shape is TINY
            variants = ("ours", "padded", "sorted") if whole else ("ours", "padded")
            repetitions = 5 if not args.quick else 3 if whole else 1
            speeds = measure(case, path, variants, repetitions, args)
            notes["tokens_per_s"][case.name] = {n: spread(v) for n, v in speeds.items()}
            ours = median(speeds["ours"])
            rows.append(
                Row(case.name, ours, median(speeds["padded"]), case.target, "tok/s", "padded")
            )
            if whole:
                ordered = median(speeds["sorted"])
                rows.append(
                    Row(f"{case.name}, sorted", ours, ordered, None, "tok/s", "padded, sorted")
                )
                ours_mb, padded_mb = (peak_memory(v, case, path, args) for v in ("ours", "padded"))
                rows.append(
                    Row(f"{case.name}, peak memory", ours_mb, padded_mb, None, "MB", "padded")
                )
        for case in scaling(args.quick):
            path = make_model(case, Path(directory))
            speeds = measure(case, path, ("ours", "padded"), 9 if args.quick else 3, args)
            ours, padded = (median(speeds[n]) for n in ("ours", "padded"))
            rows.append(Row(f"scaling: {case.name}", ours, padded, None, "tok/s", "padded"))
    return finish("learner", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

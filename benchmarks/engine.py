"""The embedded engine against transformers: tokens/s on the tiny shape, ragged lengths.

    python benchmarks/engine.py [--quick] [--json] [--seed N] [--sequences 1,64,256]

One random model (hidden 96, 3 layers, 4 heads, 2 KV heads of 32, FFN 256, vocabulary 768), one
thread each, sampling at temperature 1; every sequence has its own prompt length and its own number
of tokens to generate, and only those count. Repetitions are interleaved; each repeats its work
until 3 s are measured, because a core that has just slept is slow for the first second.

- ours: EmbeddedEngine, all requests at once, through its worker process, logprobs and entropies
  included. The prefix cache does not help here (every prompt is new).
- generate: one left-padded batch, `model.generate`; it runs until the longest sequence ends,
  without logprobs.
- continuous batching: transformers' own (what `generate_batch` runs), each request with its own
  length, num_blocks=256, max_batch_tokens=256, no warm-up (faster here than the defaults).
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from common import Row, arguments, finish, interleave, median, say, spread
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.types import Sampling

TARGETS = {"generate": ">= 3", "continuous batching": ">= 5"}
MUST_MEET = (64, 256)
DEADLINE_S = 600.0
MEASURED_S = 3.0
VOCABULARY = 768


@dataclass(frozen=True)
class Work:
    """Prompts, and how many tokens to generate for each."""

    prompts: list[list[int]]
    new: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.new)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def make_work(count: int, seed: int, *, quick: bool) -> Work:
    rng = random.Random(f"{seed}/{count}")
    low, high = (16, 96) if quick else (32, 192)
    lengths = [rng.randint(16, 128) for _ in range(count)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    return Work(prompts, [rng.randint(low, high) for _ in range(count)])


class Ours:
    """The embedded engine, driven from its own event loop."""

    def __init__(self, model: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.engine = EmbeddedEngine(model, kv_tokens=131_072, max_sequences=256, max_length=1024)
        loop.run_until_complete(self.engine.start())

    def run(self, work: Work) -> None:
        self._loop.run_until_complete(self._all(work))

    async def _all(self, work: Work) -> None:
        outs = await asyncio.gather(
            *(
                self.engine.generate(
                    prompt, Sampling(new, seed=i), session="", deadline_s=DEADLINE_S
                )
                for i, (prompt, new) in enumerate(zip(work.prompts, work.new, strict=True))
            )
        )
        check([len(out.token_ids) for out in outs], work.new)

    def close(self) -> None:
        self._loop.run_until_complete(self.engine.close())


@torch.inference_mode()
def generate(model: Any, work: Work) -> None:
    """One padded batch."""
    longest = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(work.prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=max(work.new),
        eos_token_id=None,
        pad_token_id=0,
    )
    check([out.shape[1] - longest], [max(work.new)])


def continuous(model: Any, work: Work) -> float:
    """Transformers' continuous batching; returns the seconds from first request to last result."""
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=256),
        block=True,
        timeout=30,
        warmup=False,
    ) as manager:
        started = time.perf_counter()
        wanted = {}
        for prompt, new in zip(work.prompts, work.new, strict=True):
            wanted[manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)] = new
        got: dict[str, int] = {}
        while len(got) < len(wanted):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                got[result.request_id] = len(result.generated_tokens)
            if time.perf_counter() - started > DEADLINE_S or not manager.is_running():
                raise SystemExit("continuous batching did not finish")
        elapsed = time.perf_counter() - started
    check([got[key] for key in wanted], list(wanted.values()))
    return elapsed


def check(got: list[int], wanted: list[int]) -> None:
    if got != wanted:
        raise SystemExit(f"generated {got} tokens instead of {wanted}")


def rate(work: Work, run: Callable[[], float | None], at_least_s: float) -> float:
    """Tokens per second over as many whole runs as fill `at_least_s`; a run may time itself."""
    tokens, elapsed = 0, 0.0
    while elapsed < at_least_s:
        started = time.perf_counter()
        own = run()
        elapsed += time.perf_counter() - started if own is None else own
        tokens += work.tokens
    return tokens / elapsed


def measure(
    ours: Ours, model: Any, work: Work, repetitions: int, at_least_s: float
) -> dict[str, list[float]]:
    """Tokens per second of each, repetitions interleaved."""
    return interleave(
        {
            "ours": lambda: rate(work, lambda: ours.run(work), at_least_s),
            "generate": lambda: rate(work, lambda: generate(model, work), at_least_s),
            "continuous batching": lambda: rate(work, lambda: continuous(model, work), at_least_s),
        },
        repetitions,
        progress=lambda name: say(f"{len(work.prompts)} sequences: {name}"),
    )


def main() -> int:
    parser = arguments("the embedded engine against transformers")
    parser.add_argument("--sequences", default="1,64,256", help="Batch sizes to measure.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    model = make_model()
    rows: list[Row] = []
    spreads: dict[str, str] = {}
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        ours = Ours(Path(directory), loop)
        try:
            measure(ours, model, make_work(2, args.seed, quick=True), 1, 0.1)  # warm up all engines
            for count in map(int, args.sequences.split(",")):
                work = make_work(count, args.seed, quick=args.quick)
                repetitions, at_least_s = (1, 1.0) if args.quick else (3, MEASURED_S)
                values = measure(ours, model, work, repetitions, at_least_s)
                spreads |= {f"{count} {name}": spread(v) for name, v in values.items()}
                for peer, target in TARGETS.items():
                    rows.append(
                        Row(
                            case=f"{count} sequences, against {peer}",
                            ours=median(values["ours"]),
                            peer=median(values[peer]),
                            target=target if count in MUST_MEET else None,
                            unit="tok/s",
                        )
                    )
        finally:
            ours.close()
            loop.close()
    return finish("engine", rows, args, {"tokens_per_s": spreads})


if __name__ == "__main__":
    sys.exit(main())

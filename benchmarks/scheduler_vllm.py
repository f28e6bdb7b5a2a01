"""Scheduling policies on two real vLLM engines, with scarce and with ample KV: ours and the others.

    python benchmarks/scheduler_vllm.py --results FILE [--minutes N] [--kv scarce|ample|both]
                                        [--repetitions N] [--policies A,B] [--quick] [--json]

Run it with a Python that has vLLM (docs/engines.md). It starts two servers on one core each (both
on the same core if there is only one). With scarce KV an engine holds two dozen rollouts of the
mean length, with ample KV all that it may run. Agent loop and code environment are real; the
rollouts have the paper's shape at 1/16 of its lengths (`forced.py`).

Each rival runs between two runs of ours and is compared with their mean, so that changes in the
machine's speed do not decide the result. All get the same rollouts, which differ between the
repetitions, and start with empty prefix caches. Policies that learn (ours, AIMD, prime-rl, mean
cap) start every run with what they learnt in a run with other rollouts.

Every run is appended to the file of `--results`; the same command resumes an interrupted
comparison, and `--minutes` ends it after about so long. `--repetitions 0` only prints the results.

The cost of a preemption decides how much admission control is worth: if the model is too small,
recomputing a prefix takes less than one engine step, and overfilling the cache costs almost
nothing. `--size` selects an untrained model of one of three sizes.

Each measurement is shown with the prediction of `rstar2 simulate` (`policy_runs.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common import Row, arguments, finish, median, say
from forced import ForcedEngine, Script, draw_plans, problems
from policy_runs import (
    ENGINES,
    LOAD_POLL_S,
    OURS,
    WARM_UP,
    PolicyRun,
    Prediction,
    Setting,
    append_run,
    comparisons,
    learns,
    make_scheduler,
    mean_steps,
    measured_rollouts,
    predictions,
    read_runs,
)
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import AgentConfig, CodeEnvConfig, SamplingConfig, TemplateConfig
from rstar2.engine.vllm_server import ServerSettings
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError
from rstar2.learner.tiny import make_tokenizer
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.scheduler import Scheduler
from rstar2.types import StopReason, Trajectory

RIVALS = (
    *("static_split", "round_robin", "least_requests", "least_kv", "sticky_hash"),
    *("aimd", "prime_rl", "mean_cap", "thunder_agent"),
)
QUICK = ("least_requests",)
KV = {"scarce": 6144, "ample": 24576}
SIZES = {"tiny": (128, 3), "small": (256, 4), "medium": (512, 6)}
"""Hidden size and layers."""
GROUP = 8
REPETITIONS = 6
"""Fewer are shown but not judged."""
DEADLINE_S = 900.0
AGENT = AgentConfig(generate_deadline_s=DEADLINE_S, tool_deadline_s=120.0)


@dataclass
class Bench:
    """Two running engines of one KV size, and what the policies have learnt on them."""

    setting: Setting
    engines: Sequence[ForcedEngine]
    tools: CodeEnvClient
    template: Template
    file: Path
    process: int
    learnt: dict[str, Scheduler] = field(default_factory=dict)
    """Schedulers as they were after the warm-up; every run starts with a copy."""
    runs: int = 0

    async def warm_up(self, policy: str) -> None:
        """Let a policy learn in a run with rollouts that no repetition has."""
        if learns(policy) and policy not in self.learnt:
            scheduler = make_scheduler(policy)
            await self._run(policy, WARM_UP, scheduler)
            self.learnt[policy] = scheduler

    async def measure(self, policy: str, repetition: int) -> None:
        """Run all rollouts of the repetition under one policy, and keep the result."""
        scheduler = deepcopy(self.learnt[policy]) if learns(policy) else make_scheduler(policy)
        await self._run(policy, repetition, scheduler)

    async def _run(self, policy: str, repetition: int, scheduler: Scheduler) -> None:
        setting, engines = self.setting, self.engines
        fleet = Fleet(engines, scheduler, load_poll_s=LOAD_POLL_S)
        before = []
        for engine in engines:
            await engine.client.forget(60.0)
            before.append((await engine.load()).preemptions)
            engine.reports.clear()
            fleet.join(engine.name, 0)
            # what other policies preempted meanwhile is no news for this one
            scheduler.state.engines[engine.name].preemptions = before[-1]
        fleet.take_usage()
        started = time.perf_counter()
        made = await asyncio.gather(*self._rollouts(fleet, repetition))
        wall = time.perf_counter() - started
        use = fleet.take_usage()
        await fleet.stop()
        steps = [step for engine in engines for step in mean_steps(engine.reports)]
        after = []
        for engine in engines:
            load = await engine.load()
            after.append(load.preemptions)
            scheduler.load_reported(engine.name, load, time.monotonic())  # it is idle now
        for trajectory in made:
            if trajectory.stop not in (StopReason.ANSWERED, StopReason.MAX_LENGTH):
                raise SystemExit(f"{trajectory.id}: {trajectory.stop}, {trajectory.failure}")
        run = PolicyRun(
            setting=setting,
            process=self.process,
            kv_tokens=engines[0].capacity().kv_tokens,
            repetition=repetition,
            policy=policy,
            wall_s=wall,
            preemptions=sum(after) - sum(before),
            idle_share=statistics.mean(u.idle_share for u in use),
            moved=sum(u.moved for u in use),
            rollouts=measured_rollouts(made, setting.max_length),
            steps=tuple(steps),
        )
        append_run(self.file, run)
        say(
            f"{time.strftime('%H:%M:%S')} {setting.kv} KV, "
            f"{'warm-up' if repetition == WARM_UP else f'repetition {repetition}'}, {policy}: "
            f"{wall:.1f} s, {run.tokens / wall:.0f} tokens/s, {run.preemptions} preemptions, "
            f"idle {run.idle_share:.0%}"
        )

    def _rollouts(self, fleet: Fleet, repetition: int) -> Iterator[asyncio.Task[Trajectory]]:
        """Start all rollouts of a repetition.

        Their ids are new in every run: the code environment would not execute a call again, but
        return at once what the call with the same id has returned before.
        """
        setting = self.setting
        self.runs += 1
        plans = draw_plans(
            setting.rollouts,
            seed=1000 * setting.seed + repetition,
            mean_turn=setting.mean_turn,
            mean_wait_s=setting.mean_wait_s,
        )
        asked = problems(-(-len(plans) // GROUP))
        loop = AgentLoop(PythonMath(self.template.config), fleet, self.tools, self.template, AGENT)
        spec = RolloutSpec(SamplingConfig(), setting.max_length, setting.max_turns)
        for index, plan in enumerate(plans):
            group = f"{self.runs}/{repetition}/{index // GROUP}"
            self.engines[0].script.add(f"{group}/{index}", plan)
            yield asyncio.ensure_future(
                loop.run(
                    asked[index // GROUP],
                    id=f"{group}/{index}",
                    group_id=group,
                    seed=index,
                    spec=spec,
                    graded=False,
                )
            )


@asynccontextmanager
async def running_bench(
    model: Path, setting: Setting, file: Path, process: int
) -> AsyncIterator[Bench]:
    """Start two engines and a code environment; stop them at the end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    template = Template(tokenizer, TemplateConfig(system="none", instruction="none"))
    script = Script(template, len(tokenizer))
    cores = sorted(os.sched_getaffinity(0))
    engines = []
    for index in range(ENGINES):
        server = ServerSettings(
            model=str(model),
            kv_tokens=setting.kv_tokens,
            max_sequences=setting.max_sequences,
            max_length=setting.max_length,
            block_tokens=setting.block_tokens,
            cores=(cores[index % len(cores)],),
        )
        engines.append(ForcedEngine(f"engine-{index}", server=server, script=script))
    say(f"starting {ENGINES} vLLM servers with {setting.kv} KV on cores {cores}")
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        async with await CodeEnvClient.start(CodeEnvConfig(slots=24)) as tools:
            yield Bench(setting, engines, tools, template, file, process)
    except EngineError:
        for engine in engines:
            say(f"{engine.name}: {engine.last_words()}")
        raise
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def measure_missing(
    model: Path, settings: Sequence[Setting], rivals: Sequence[str], args: Namespace
) -> None:
    """Make the runs that the file does not have yet, until the time is over."""
    process = int(time.time())
    for setting in settings:
        known = comparisons(read_runs(args.results, setting))
        missing = [
            (repetition, [r for r in shuffled(rivals, repetition) if (repetition, r) not in known])
            for repetition in range(args.repetitions)
        ]
        if not any(left for _, left in missing):
            continue
        async with running_bench(model, setting, args.results, process) as bench:
            for policy in (OURS, *rivals):
                await bench.warm_up(policy)
            for repetition, left in missing:
                if left:
                    await bench.measure(OURS, repetition)
                for rival in left:
                    if args.minutes is not None and time.time() > process + 60 * args.minutes:
                        return
                    await bench.measure(rival, repetition)
                    await bench.measure(OURS, repetition)


def shuffled(rivals: Sequence[str], repetition: int) -> list[str]:
    """The order of the rivals in one repetition."""
    return random.Random(repetition).sample(rivals, len(rivals))


def make_model(directory: Path, size: str) -> Path:
    """An untrained model with the tiny recipe's tokenizer; its output does not matter here."""
    hidden, layers = SIZES[size]
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory / size)
    tokenizer.save_pretrained(directory / size)
    return directory / size


# --------------------------------------------------------------------------- results


def rows_of(setting: Setting, runs: Sequence[PolicyRun], made: Sequence[Prediction]) -> list[Row]:
    """Our speed relative to every rival, and the errors of the predictions."""
    rows = []
    known = comparisons(runs)
    for rival in dict.fromkeys(policy for _, policy in known):
        ratios = [c.ratio for (_, policy), c in known.items() if policy == rival]
        target = ">= 0.98" if len(ratios) >= REPETITIONS else None
        case = f"{setting.kv}, ours / {rival} {among(ratios)}"
        rows.append(Row(case, median(ratios), target=target))
    for policy in dict.fromkeys(p.run.policy for p in made):
        ratios = [p.ratio for p in made if p.run.policy == policy]
        target = "<= 0.1" if len(ratios) >= REPETITIONS else None
        case = f"{setting.kv}, error of predicted {policy} {among(ratios)}"
        rows.append(Row(case, abs(median(ratios) - 1), target=target))
    return rows


def among(ratios: Sequence[float]) -> str:
    """The number of repetitions and their range: (6: 0.97-1.04)."""
    return f"({len(ratios)}: {min(ratios):.2f}-{max(ratios):.2f})"


def print_table(setting: Setting, made: Sequence[Prediction]) -> None:
    """Medians of all measurements, with the predictions."""
    table = Table(title=f"{setting.kv} KV: medians, measured and predicted", box=None)
    table.add_column("policy", no_wrap=True)
    for name in ("runs", "seconds", "predicted", "preempted", "predicted", "idle", "predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in dict.fromkeys(p.run.policy for p in made):
        mine = [p for p in made if p.run.policy == policy]
        table.add_row(
            policy,
            str(len(mine)),
            f"{median([p.run.wall_s for p in mine]):.3g}",
            f"{median([p.wall_s for p in mine]):.3g}",
            f"{median([p.run.preemptions for p in mine]):.0f}",
            f"{median([p.preemptions for p in mine]):.0f}",
            f"{median([p.run.idle_share for p in mine]):.1%}",
            f"{median([p.idle_share for p in mine]):.1%}",
        )
    Console(stderr=True).print(table)


def main() -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, help="Keep all runs in this file and resume it.")
    parser.add_argument("--minutes", type=float, help="Start no comparison after so many minutes.")
    parser.add_argument("--kv", choices=(*KV, "both"), help="KV sizes (both; scarce with --quick).")
    parser.add_argument("--size", choices=SIZES, default="small", help="Of the untrained model.")
    parser.add_argument("--model", type=Path, help="Use this model directory instead.")
    parser.add_argument("--rollouts", type=int, help="Number of rollouts (160; 32 with --quick).")
    parser.add_argument(
        "--repetitions", type=int, help=f"Of each comparison ({REPETITIONS}; 1 with --quick)."
    )
    parser.add_argument("--policies", help="Rivals, separated by commas; mean_cap:FACTOR.")
    args = parser.parse_args()
    if args.repetitions is None:
        args.repetitions = 1 if args.quick else REPETITIONS
    kv = args.kv or ("scarce" if args.quick else "both")
    settings = [
        Setting(
            model=str(args.model or args.size),
            kv=name,
            kv_tokens=KV[name],
            rollouts=args.rollouts or (32 if args.quick else 160),
            seed=args.seed,
        )
        for name in (KV if kv == "both" else [kv])
    ]
    rivals = args.policies.split(",") if args.policies else QUICK if args.quick else RIVALS
    with tempfile.TemporaryDirectory() as directory:
        args.results = args.results or Path(directory) / "runs.jsonl"
        if args.repetitions:
            model = args.model or make_model(Path(directory), args.size)
            asyncio.run(measure_missing(model, settings, rivals, args))
        rows: list[Row] = []
        notes: dict[str, object] = {}
        for setting in settings:
            runs = read_runs(args.results, setting)
            made = predictions(runs)
            print_table(setting, made)
            rows += rows_of(setting, runs, made)
            fits = [p.fit for p in made]
            notes[setting.kv] = {
                "setting": msgspec.to_builtins(setting),
                "engine_model": asdict(fits[-1].model) if fits else None,
                "engine_model_error": median([f.median_error for f in fits]) if fits else None,
            }
    return finish("scheduler_vllm", rows, args, notes)


if __name__ == "__main__":
    sys.exit(main())

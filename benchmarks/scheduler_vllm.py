"""Scheduling policies on two real vLLM engines with small KV caches: ours and the others.

    python benchmarks/scheduler_vllm.py [--quick] [--json] [--seed N] [--model DIR]

Run it with a Python that has vLLM (docs/engines.md). It starts two servers on one core each (both
on the same core if there is only one). Each has a KV cache for a dozen rollouts of the mean length.
Agent loop and code environment are real; the rollouts have the paper's shape (`forced.py`). Each of
the other policies runs between two runs of ours and is compared with their mean, so that changes in
the machine's speed do not decide the result. All get the same rollouts and start with empty prefix
caches. `reserve` knows the lengths of an earlier step (drawn with another seed), as in all steps of
a run except the first; `reserve-cold` is the same policy in a first step.

The cost of a preemption decides how much admission control is worth: if the model is too small,
recomputing a prefix takes less than one engine step, and overfilling the cache costs almost
nothing. `--size` selects an untrained model of one of three sizes; docs/benchmarks.md has the
results of each.

Each measurement is shown with the prediction of `rstar2 simulate`, from an engine model fitted to
steps that are measured on these engines before the first policy runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import Row, arguments, finish, say
from forced import ForcedEngine, Plan, Script, draw_plans, problems
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import (
    AgentConfig,
    CodeEnvConfig,
    SamplingConfig,
    SchedulerConfig,
    TemplateConfig,
)
from rstar2.engine.vllm_server import ServerSettings
from rstar2.environments.python_math import PythonMath
from rstar2.errors import EngineError
from rstar2.rollout.fleet import Fleet
from rstar2.rollout.forecast import LengthModel
from rstar2.rollout.scheduler import Scheduler
from rstar2.rollout.simulate.model import EngineFit, EngineModel, MeasuredStep, fit_engine
from rstar2.rollout.simulate.simulation import Simulation
from rstar2.rollout.simulate.workload import RolloutPlan, TurnPlan, Workload
from rstar2.types import Sampling, StopReason, Trajectory

OURS = "reserve"
COLD = "reserve-cold"
OTHERS = ("static_split", "round_robin", "least_requests", "sticky_hash", "aimd", COLD)
SIZES = {"tiny": (128, 3), "small": (256, 4), "medium": (512, 6)}
"""Hidden size and layers."""
GROUP = 8
BLOCK = 32
PROMPT_TOKENS, RESPONSE_TOKENS = 60, 16
"""Approximate values that `lengths_of` assumes for the earlier step."""
DEADLINE_S = 900.0
LOAD_POLL_S = 0.25
AGENT = AgentConfig(generate_deadline_s=DEADLINE_S, tool_deadline_s=120.0)


@dataclass(frozen=True)
class Setting:
    """Sizes of one benchmark run."""

    rollouts: int
    repetitions: int
    kv_tokens: int = 6144
    max_length: int = 512
    max_turns: int = 10
    max_sequences: int = 64
    mean_turn: int = 48
    mean_wait_s: float = 0.2


@dataclass(frozen=True)
class Predicted:
    """The simulator's prediction for the same rollouts under the same policy."""

    speed: float
    preemptions: int
    idle_share: float


@dataclass(frozen=True)
class Measured:
    """One run of all rollouts under one policy."""

    policy: str
    wall_s: float
    tokens: int
    """Tokens sampled by the engines."""
    preemptions: int
    idle_share: float
    """Mean share of the time in which an engine was idle."""
    moved: int
    truncated: int
    predicted: Predicted

    @property
    def speed(self) -> float:
        return self.tokens / self.wall_s


# --------------------------------------------------------------------------- one policy


async def measure(
    policy: str,
    run: str,
    engines: Sequence[ForcedEngine],
    plans: Sequence[Plan],
    tools: CodeEnvClient,
    template: Template,
    setting: Setting,
    model: EngineModel,
) -> Measured:
    """Run all rollouts at once under one policy."""
    script = engines[0].script
    for engine in engines:
        await engine.client.forget(60.0)
    scheduler = Scheduler(config_of(policy), lengths_of(policy, setting))
    fleet = Fleet(engines, scheduler, load_poll_s=LOAD_POLL_S)
    for engine in engines:
        fleet.join(engine.name, 0)
    before = [(await engine.load()).preemptions for engine in engines]
    fleet.take_usage()
    asked = problems(-(-len(plans) // GROUP))
    started = time.perf_counter()
    loop = AgentLoop(PythonMath(template.config), fleet, tools, template, AGENT)
    work = []
    for index, plan in enumerate(plans):
        group = f"{run}/{index // GROUP}"
        script.add(f"{group}/{index}", plan)
        work.append(
            loop.run(
                asked[index // GROUP],
                id=f"{group}/{index}",
                group_id=group,
                seed=index,
                spec=RolloutSpec(SamplingConfig(), setting.max_length, setting.max_turns),
                graded=False,
            )
        )
    made = await asyncio.gather(*work)
    wall = time.perf_counter() - started
    use = fleet.take_usage()
    after = [(await engine.load()).preemptions for engine in engines]
    await fleet.stop()
    for trajectory in made:
        if trajectory.stop not in (StopReason.ANSWERED, StopReason.MAX_LENGTH):
            raise SystemExit(f"{trajectory.id}: {trajectory.stop}, {trajectory.failure}")
    return Measured(
        policy=policy,
        wall_s=wall,
        tokens=sum(t.sampled_tokens for t in made),
        preemptions=sum(after) - sum(before),
        idle_share=statistics.mean(u.idle_share for u in use),
        moved=sum(u.moved for u in use),
        truncated=sum(t.truncated for t in made),
        predicted=predict(policy, made, setting, model),
    )


def config_of(policy: str) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"policy": policy.removesuffix("-cold")})


def lengths_of(policy: str, setting: Setting) -> LengthModel:
    """The lengths learnt from an earlier step; empty in a cold start."""
    lengths = LengthModel()
    if policy != COLD:
        before = draw_plans(
            512, seed=-1, mean_turn=setting.mean_turn, mean_wait_s=setting.mean_wait_s
        )
        for plan in before:
            completion = sum(plan.turns) + RESPONSE_TOKENS * len(plan.waits)
            most = setting.max_length - PROMPT_TOKENS
            lengths.observe(min(completion, most), truncated=completion >= most)
    return lengths


def predict(
    policy: str, made: Sequence[Trajectory], setting: Setting, model: EngineModel
) -> Predicted:
    """Simulate the measured rollouts and tool latencies under the same policy."""
    plans = tuple(
        RolloutPlan(
            t.id,
            t.group_id,
            len(t.prompt_ids),
            tuple(
                TurnPlan(
                    len(u.sampled_ids), u.tools_s * (u is not t.turns[-1]), len(u.response_ids)
                )
                for u in t.turns
            ),
            setting.max_length,
            t.truncated,
        )
        for t in made
    )
    workload = Workload("measured", plans, (model, model))
    scheduler = Scheduler(config_of(policy), lengths_of(policy, setting))
    simulation = Simulation(workload, config_of(policy), scheduler=scheduler)
    simulation.run()
    wall = max(simulation.ends.values())
    tallies = [engine.tally for engine in simulation.engines]
    return Predicted(
        speed=sum(t.sampled_tokens for t in made) / wall,
        preemptions=sum(tally.preemptions for tally in tallies),
        idle_share=1.0 - statistics.mean(tally.busy_s for tally in tallies) / wall,
    )


# --------------------------------------------------------------------------- calibration


async def steps_of(engine: ForcedEngine, setting: Setting, quick: bool) -> list[MeasuredStep]:
    """Measure decoding at several batch sizes and contexts, and prompts of several lengths."""
    salt = 0

    async def batch(count: int, prompt: int, new: int) -> float:
        """Seconds for `count` concurrent requests without cached prompts."""
        nonlocal salt
        salt += 1
        sampling = Sampling(max_new_tokens=new)
        extra = {"allowed_token_ids": engine.script.allowed}
        started = time.perf_counter()
        await asyncio.gather(
            *(
                engine.client.generate(
                    [10 + i % 50, *[20 + (i * k) % 300 for k in range(prompt - 1)]],
                    sampling,
                    salt=f"steps-{salt}",
                    deadline_s=300.0,
                    extra=extra,
                )
                for i in range(count)
            )
        )
        return time.perf_counter() - started

    await batch(4, 64, 16)  # warm
    rows: list[MeasuredStep] = []
    room = setting.kv_tokens
    for count in (1, 4, 8, 16, 32):
        for prompt in (32, 160):
            short, long = 8, 56 if quick else 88
            if count * (prompt + long + BLOCK) > room:
                continue
            first = await batch(count, prompt, short)
            second = await batch(count, prompt, long)
            context = round(count * (prompt + (short + long) / 2))
            rows.append(MeasuredStep(count, context, max(1e-5, (second - first) / (long - short))))
    for count, prompt in ((1, 64), (1, 384), (4, 128), (4, 384)):
        seconds = await batch(count, prompt, 1)
        pairs = count * prompt * (prompt - 1) // 2
        rows.append(MeasuredStep(0, 0, seconds, prefill=count * prompt, pairs=pairs))
    return rows


async def calibrate(engines: Sequence[ForcedEngine], setting: Setting, quick: bool) -> EngineFit:
    """Fit one model to steps of both engines, measured while both work."""
    measured = await asyncio.gather(*(steps_of(engine, setting, quick) for engine in engines))
    model = EngineModel(
        name="vllm-tiny",
        kv_tokens=engines[0].capacity().kv_tokens,
        block_tokens=BLOCK,
        max_sequences=setting.max_sequences,
        batch_tokens=2048,
    )
    return fit_engine(model, [step for steps in measured for step in steps])


# --------------------------------------------------------------------------- all policies


async def compare(
    model: Path, setting: Setting, policies: Sequence[str], args: Namespace
) -> tuple[list[Measured], EngineFit]:
    """Start two engines, fit the engine model and measure the policies in turn."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    template = Template(tokenizer, TemplateConfig(system="none", instruction="none"))
    script = Script(template, len(tokenizer))
    cores = sorted(os.sched_getaffinity(0))
    engines = []
    for index in range(2):
        settings = ServerSettings(
            model=str(model),
            kv_tokens=setting.kv_tokens,
            max_sequences=setting.max_sequences,
            max_length=setting.max_length,
            block_tokens=BLOCK,
            cores=(cores[index % len(cores)],),
        )
        engine = ForcedEngine(f"vllm-{index}", server=settings)
        engine.script = script
        engines.append(engine)
    plans = draw_plans(
        setting.rollouts,
        seed=args.seed,
        mean_turn=setting.mean_turn,
        mean_wait_s=setting.mean_wait_s,
    )
    say(f"starting two vLLM servers on cores {cores}")
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        async with await CodeEnvClient.start(CodeEnvConfig(slots=24)) as tools:
            fitted = await calibrate(engines, setting, args.quick)
            say(f"{fitted.model} (median error {fitted.median_error:.1%})")
            made: list[Measured] = []
            for repetition in range(setting.repetitions):
                for place, policy in enumerate(in_turns(policies)):
                    run = f"{policy}-{repetition}-{place}"
                    measured = await measure(
                        policy, run, engines, plans, tools, template, setting, fitted.model
                    )
                    say(
                        f"{run}: {measured.speed:.0f} tokens/s, {measured.wall_s:.1f} s, "
                        f"{measured.preemptions} preemptions, idle {measured.idle_share:.0%}"
                    )
                    made.append(measured)
            return made, fitted
    except EngineError:
        for engine in engines:
            say(f"{engine.name}: {engine.last_words()}")
        raise
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


def make_model(directory: Path, size: str) -> Path:
    """An untrained model with the tiny recipe's tokenizer; its output does not matter here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rstar2.learner.tiny import make_tokenizer

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


def in_turns(policies: Sequence[str]) -> list[str]:
    """Our policy before, between and after the others."""
    turns = [OURS]
    for policy in policies:
        if policy != OURS:
            turns += [policy, OURS]
    return turns


def beside(made: Sequence[Measured], policy: str) -> tuple[float, float]:
    """Tokens per second of ours and of a policy that ran in between, by their median ratio."""
    pairs = [
        (one.speed, (before.speed + after.speed) / 2 / one.speed)
        for before, one, after in zip(made, made[1:], made[2:], strict=False)
        if one.policy == policy
    ]
    theirs = statistics.median(speed for speed, _ in pairs)
    return theirs * statistics.median(ratio for _, ratio in pairs), theirs


def rows_of(made: Sequence[Measured], policies: Sequence[str]) -> list[Row]:
    """Our policy compared with each of the others."""
    rows = []
    for policy in policies:
        if policy == OURS:
            continue
        target = {"static_split": ">= 1.3", COLD: None}.get(policy, ">= 0.98")
        ours, theirs = beside(made, policy)
        rows.append(Row(f"tokens/s, {policy}", ours, theirs, target, "", policy))
    worst = max(m.preemptions for m in made if m.policy == OURS)
    rows.append(Row("our preemptions, worst run", float(worst)))
    return rows


def print_table(made: Sequence[Measured], policies: Sequence[str]) -> None:
    """Medians of all measurements over the repetitions, with the predictions."""
    table = Table(box=None)
    table.add_column("policy", no_wrap=True)
    for name in ("tokens/s", "predicted", "error", "preemptions", "predicted", "idle", "predicted"):
        table.add_column(name, justify="right")
    for policy in policies:
        mine = [m for m in made if m.policy == policy]
        speed = statistics.median(m.speed for m in mine)
        predicted = statistics.median(m.predicted.speed for m in mine)
        table.add_row(
            policy,
            f"{speed:.0f} ({min(m.speed for m in mine):.0f}-{max(m.speed for m in mine):.0f})",
            f"{predicted:.0f}",
            f"{predicted / speed - 1:+.0%}",
            f"{statistics.median(m.preemptions for m in mine):.0f}",
            f"{statistics.median(m.predicted.preemptions for m in mine):.0f}",
            f"{statistics.median(m.idle_share for m in mine):.1%}",
            f"{statistics.median(m.predicted.idle_share for m in mine):.1%}",
        )
    Console(stderr=True).print(table)


def main() -> int:
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="Size of the untrained model."
    )
    parser.add_argument("--model", type=Path, help="Use this model directory instead.")
    parser.add_argument("--kv", type=int, default=Setting.kv_tokens, help="KV tokens per engine.")
    parser.add_argument("--rollouts", type=int, help="Number of rollouts (200; 48 with --quick).")
    parser.add_argument(
        "--repetitions", type=int, help="Number of repetitions (3; 1 with --quick)."
    )
    parser.add_argument("--policies", default=",".join((OURS, *OTHERS)))
    args = parser.parse_args()
    setting = Setting(
        rollouts=args.rollouts or (48 if args.quick else 200),
        repetitions=args.repetitions or (1 if args.quick else 3),
        kv_tokens=args.kv,
    )
    policies = args.policies.split(",")
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or make_model(Path(directory), args.size)
        made, fitted = asyncio.run(compare(model, setting, policies, args))
    print_table(made, policies)
    notes = {
        "setting": asdict(setting),
        "size": str(args.model or args.size),
        "engine_model": json.loads(fitted.model.to_json()),
        "engine_model_error": {"median": fitted.median_error, "worst": fitted.worst_error},
        "runs": [{**asdict(m), "speed": m.speed} for m in made],
    }
    return finish("scheduler_vllm", rows_of(made, policies), args, notes)


if __name__ == "__main__":
    sys.exit(main())

"""Memory fit and run time: memory by component, and a roofline model of every phase of a step.

    decoding   step_overhead + max(bytes / bandwidth, compute)      bytes: weights + KV read
    prefill    2 P FLOPs per token                                  P: parameters
    learning   6 P FLOPs per token (8 P with recomputation), or FSDP communication if that is slower
    weights    by the path that the recipe sets (`transfer.py`), and a fixed time

Generation time is computed for one engine with lengths drawn from the assumed distribution. The
engine runs as many rollouts as its KV cache holds and starts the next when one ends, so the tail at
the end of a step is included. With `simulated`, the rollout simulator computes it instead, with
the real scheduler (`simulated.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from rstar2.config import Recipe
from rstar2.model_config import ModelShape, find_shape
from rstar2.plan.hardware import Cluster
from rstar2.plan.lora import ASLEEP_GB, checkpoint_bytes, resident_bytes
from rstar2.plan.memory import GB, learner_memory
from rstar2.plan.transfer import nccl_seconds, record_gb, weight_seconds
from rstar2.plan.workload import (
    Assumptions,
    StageLoad,
    draw_lengths,
    evaluation_load,
    stage_loads,
)

COMPUTE_SHARE = 0.6
"""Share of peak FLOPS that decoding reaches with a large batch."""
BESIDE = "engine on the same GPU"
WRITE_HINT = "--write-recipe FILE writes a layout"


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory of one GPU in GB, by component."""

    parts: dict[str, float]
    limit: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def excess(self) -> float:
        """GB that are missing; negative if some are left."""
        return self.total - self.limit

    @property
    def fits(self) -> bool:
        return self.excess <= 1e-9


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of engines (`tensor_parallel` GPUs each) and of learner ranks (one GPU each)."""

    engines: int
    tensor_parallel: int
    ranks: int
    colocated: bool
    """Engines and learner share GPUs. An engine keeps its memory while the learner works."""

    @property
    def gpus(self) -> int:
        """GPUs that the layout uses."""
        generating = self.engines * self.tensor_parallel
        return max(generating, self.ranks) if self.colocated else generating + self.ranks


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: seconds per step by phase, and the load on the code environment."""

    load: StageLoad
    generate_s: float
    tools_s: float
    """Waiting for tool calls that does not overlap with generation."""
    learn_s: float
    sync_s: float
    rollouts_held: int
    """Concurrent rollouts per engine."""
    tokens_per_s: float
    """Generated tokens per second of one engine."""
    calls_per_s: float
    cores_needed: float
    record_gb: float
    """What a step writes to the run directory, without checkpoints."""

    @property
    def step_s(self) -> float:
        return self.generate_s + self.tools_s + self.learn_s + self.sync_s


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimate for a recipe on a cluster."""

    recipe: str
    model: str
    cluster: Cluster
    shape: ModelShape
    layout: Layout
    assume: Assumptions
    engine: MemoryFit
    learner: MemoryFit
    kv_tokens: int
    """Size of one engine's KV cache."""
    checkpoint_gb: float
    checkpoints: int
    """Checkpoints on disk at most: those that are kept, and the one that is written."""
    stages: tuple[StagePlan, ...]
    weights_s: dict[str, float]
    """Seconds of a weight update by part."""
    nccl_s: float
    """Seconds of its copy if it went from GPU to GPU."""
    sft_s: float
    filter_s: float
    evaluation_s: float
    problems: tuple[str, ...]
    """Why the recipe would not run as it is; empty if it would."""

    @property
    def engine_share(self) -> float:
        """Share of a GPU's memory for an engine: its weights and KV cache."""
        own = 2 * self.shape.parameters / self.layout.tensor_parallel / GB
        own += 2 * self.shape.kv_numbers * self.kv_tokens / self.layout.tensor_parallel / GB
        return own / self.cluster.gpu.memory_gb

    @property
    def rollouts_gb(self) -> float:
        """What all RL steps write to the run directory, without checkpoints."""
        return sum(stage.record_gb * stage.load.steps for stage in self.stages)

    @property
    def rl_s(self) -> float:
        return sum(stage.step_s * stage.load.steps for stage in self.stages)

    @property
    def total_s(self) -> float:
        return self.rl_s + self.sft_s + self.filter_s + self.evaluation_s

    @property
    def dollars(self) -> float:
        return self.total_s / 3600 * self.cluster.dollars_per_hour


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    assume: Assumptions | None = None,
    *,
    simulated: bool = False,
) -> Plan:
    """Plan a recipe on a cluster, with the numbers of engines and ranks that the recipe sets.

    Times are estimated even if `problems` says that it does not fit.
    """
    assume = assume or Assumptions()
    shape = find_shape(recipe.model.path)
    layout = layout_of(recipe)
    engine, learner, kv_tokens = memory_fit(recipe, cluster, shape, layout, assume)
    roofline = Roofline(recipe, cluster, shape, layout, assume, max(kv_tokens, 1), simulated)
    stages = tuple(roofline.stage(load) for load in stage_loads(recipe, assume))
    evaluation = evaluation_load(recipe, assume)
    filters = sum(
        roofline.generation(stage.load, stage.load.filtered)[0]
        for stage in stages
        if stage.load.filtered
    )
    return Plan(
        recipe=recipe.name,
        model=recipe.model.path,
        cluster=cluster,
        shape=shape,
        layout=layout,
        assume=assume,
        engine=engine,
        learner=learner,
        kv_tokens=kv_tokens,
        checkpoint_gb=checkpoint_bytes(shape, recipe.learner) / GB,
        checkpoints=recipe.record.keep_checkpoints + 1,
        stages=stages,
        weights_s=roofline.weights_s(),
        nccl_s=nccl_seconds(recipe, shape, cluster),
        sft_s=roofline.sft(),
        filter_s=filters,
        evaluation_s=evaluation.steps * roofline.generation(evaluation, evaluation.drawn)[0],
        problems=(
            *_layout_problems(recipe, cluster, layout),
            *_memory_problems(recipe, engine, learner, kv_tokens),
            *_share_problems(recipe, cluster, learner),
            *_core_problems(cluster, stages),
        ),
    )


# --------------------------------------------------------------------------- layout and memory


def layout_of(recipe: Recipe) -> Layout:
    """The layout that a recipe sets."""
    section = recipe.cluster
    return Layout(
        engines=recipe.engine.count,
        tensor_parallel=1 if section is None else section.gpus_per_engine,
        ranks=recipe.learner.ranks,
        colocated=True if section is None else section.colocate,
    )


def memory_fit(
    recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout, assume: Assumptions
) -> tuple[MemoryFit, MemoryFit, int]:
    """Memory of one GPU of an engine and of a rank, and the size of the KV cache in tokens.

    On a shared GPU both are there at all times: the KV cache gets what the learner leaves.
    """
    learner = learner_memory(recipe.learner, shape, layout.ranks)
    weights = 2 * shape.parameters / layout.tensor_parallel / GB
    parts = {"weights, bfloat16": weights}
    limit = assume.kv_share * cluster.gpu.memory_gb
    asleep = layout.colocated and recipe.engine.sleep
    if asleep:
        parts["weights of the learner"] = resident_bytes(shape, recipe.learner) / layout.ranks / GB
    elif layout.colocated:
        state = next(iter(learner.values()))
        away = state if assume.host_state else 0.0
        parts["learner on the same GPU"] = sum(learner.values()) - away
    room = max(0.0, limit - sum(parts.values()))
    parts["KV cache"] = room
    counted = room or max(0.0, limit - weights)  # what does not fit is timed without the learner
    tokens = int(counted * GB / (2 * shape.kv_numbers / layout.tensor_parallel))
    if layout.colocated:
        learner[BESIDE] = ASLEEP_GB if asleep else weights + room
    return MemoryFit(parts, limit), MemoryFit(learner, 0.95 * cluster.gpu.memory_gb), tokens


def _layout_problems(recipe: Recipe, cluster: Cluster, layout: Layout) -> Iterator[str]:
    if layout.gpus > cluster.gpus:
        yield (
            f"the recipe needs {layout.gpus} GPUs (engine.count = {layout.engines} of "
            f"{layout.tensor_parallel}, learner.ranks = {layout.ranks}), the cluster has "
            f"{cluster.gpus}: {WRITE_HINT} for it"
        )
    if layout.tensor_parallel > cluster.gpus_per_node:
        yield (
            f"cluster.gpus_per_engine = {layout.tensor_parallel}, a node has "
            f"{cluster.gpus_per_node} GPUs"
        )


def _memory_problems(
    recipe: Recipe, engine: MemoryFit, learner: MemoryFit, kv_tokens: int
) -> Iterator[str]:
    if not engine.fits:
        yield (
            f"a GPU needs {engine.total:.1f} GB without any KV cache, {engine.limit:.1f} GB are "
            f"available: use more GPUs ({WRITE_HINT}; it shards the state), or a smaller model. "
            "The times below assume that the engine has the GPU to itself while it generates"
        )
        return
    if not learner.fits:
        yield (
            f"a learner rank needs {learner.total:.1f} GB, {learner.limit:.1f} GB are available: "
            f"use more GPUs ({WRITE_HINT}; it shards the state), or a smaller model"
        )
    longest = max((stage.max_length for stage in recipe.rl.stages), default=0)
    if kv_tokens < longest:
        yield (
            f"an engine's KV cache holds {kv_tokens:,} tokens, less than one rollout of "
            f"{longest:,}: use more GPUs ({WRITE_HINT}), or shorter stages"
        )


def _share_problems(recipe: Recipe, cluster: Cluster, learner: MemoryFit) -> Iterator[str]:
    """A share of the GPU that the recipe gives an engine beside the learner, and is too large."""
    share = recipe.engine.gpu_memory_share
    if share is None or recipe.engine.sleep or BESIDE not in learner.parts:
        return
    rank, taken = learner.total - learner.parts[BESIDE], share * cluster.gpu.memory_gb
    if rank + taken > learner.limit:
        yield (
            f"engine.gpu_memory_share = {share:g} is {taken:.1f} GB, and a learner rank on the "
            f"same GPU needs {rank:.1f} GB; {learner.limit:.1f} GB are available: leave it out, "
            "and it is computed"
        )


def _core_problems(cluster: Cluster, stages: tuple[StagePlan, ...]) -> Iterator[str]:
    worst = max(stages, key=lambda s: s.cores_needed, default=None)
    if worst is not None and worst.cores_needed > cluster.cores:
        yield (
            f"{worst.load.name} needs {worst.cores_needed:.0f} cores for its tool calls, the "
            f"cluster has {cluster.cores}; add code environments, or steps will wait for tool calls"
        )


# --------------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class Roofline:
    """Time estimates of one recipe on one cluster."""

    recipe: Recipe
    cluster: Cluster
    shape: ModelShape
    layout: Layout
    assume: Assumptions
    kv_tokens: int
    simulated: bool = False

    def stage(self, load: StageLoad) -> StagePlan:
        """Estimate one step of a stage."""
        generate_s, held, rate = self.generation(load, load.drawn)
        calls = load.calls(self.assume)
        capacity = self.cluster.cores * self.assume.calls_per_core_s
        chain = self.assume.calls_per_rollout * self.assume.call_s
        return StagePlan(
            load=load,
            generate_s=generate_s,
            tools_s=chain + max(0.0, calls / capacity - generate_s),
            learn_s=self.learning(load),
            sync_s=sum(self.weights_s().values()),
            record_gb=record_gb(self.recipe, load, self.assume),
            rollouts_held=held,
            tokens_per_s=rate,
            calls_per_s=calls / generate_s,
            cores_needed=calls / generate_s / self.assume.calls_per_core_s,
        )

    def weights_s(self) -> dict[str, float]:
        """Seconds of a weight update by part."""
        return weight_seconds(self.recipe, self.shape, self.cluster, self.assume)

    def held(self, load: StageLoad) -> int:
        """Concurrent rollouts per engine, limited by its KV cache and `max_sequences`."""
        tokens = self.assume.prompt_tokens + self.assume.reserve * load.mean_completion
        return max(1, min(self.recipe.engine.max_sequences, int(self.kv_tokens / tokens)))

    def generation(self, load: StageLoad, rollouts: int) -> tuple[float, int, float]:
        """Seconds to generate `rollouts` on all engines; rollouts and tokens/s per engine."""
        share = -(-rollouts // self.layout.engines)
        sample_size = min(share, 640)  # a larger sample would not change the estimate
        lengths = draw_lengths(sample_size, load, self.assume)
        sampled = [round(n * (1 - self.assume.tool_share)) for n in lengths]
        held = self.held(load)
        if self.simulated:
            seconds = self._simulated_s(lengths, load.max_length) * share / sample_size
            return seconds, held, sum(sampled) * share / sample_size / seconds
        seconds = self.decoding(sampled, held) * share / sample_size
        prefilled = self.assume.prompt_tokens / 8 + self.assume.tool_share * load.mean_completion
        flops = 2.0 * self.shape.parameters * prefilled * share
        gpu = self.cluster.gpu
        speed = gpu.tflops * 1e12 * self.assume.prefill_mfu * self.layout.tensor_parallel
        seconds += flops / speed
        return seconds, held, sum(sampled) * share / sample_size / seconds

    def _simulated_s(self, lengths: list[int], limit: int) -> float:
        from rstar2.plan.simulated import engine_model, makespan

        model = engine_model(
            self.recipe,
            self.cluster,
            self.shape,
            self.layout.tensor_parallel,
            self.assume,
            self.kv_tokens,
        )
        return makespan(model, lengths, limit, self.recipe, self.assume)

    def decoding(self, lengths: list[int], held: int) -> float:
        """Seconds to decode `lengths` on one engine that runs `held` rollouts at a time."""
        waiting = list(reversed(lengths))
        ends: list[tuple[int, int]] = []
        clock, begun, seconds = 0, 0, 0.0
        while waiting or ends:
            while waiting and len(ends) < held:
                heappush(ends, (clock + waiting.pop(), clock))
                begun += clock
            upto = ends[0][0]
            middle = (clock + upto) / 2 + self.assume.prompt_tokens
            context = len(ends) * middle - begun
            seconds += (upto - clock) * self.step(len(ends), context)
            clock = upto
            while ends and ends[0][0] == clock:
                begun -= heappop(ends)[1]
        return seconds

    def step(self, batch: int, context: float) -> float:
        """Seconds per decoding step of `batch` rollouts with `context` tokens in total."""
        gpu, parallel = self.cluster.gpu, self.layout.tensor_parallel
        moved = 2.0 * self.shape.parameters + 2.0 * self.shape.kv_numbers * context
        memory = moved / (gpu.bandwidth_tb * 1e12 * self.assume.decode_bandwidth * parallel)
        flops = 2.0 * self.shape.parameters * batch
        return self.assume.step_overhead_s + max(
            memory, flops / (gpu.tflops * 1e12 * COMPUTE_SHARE * parallel)
        )

    def learning(self, load: StageLoad) -> float:
        """Seconds per learner step."""
        length = self.assume.prompt_tokens + load.mean_completion
        passes = 1 if self.recipe.rl.minibatches == 1 else 2  # old logprobs of later mini-batches
        seconds = self._training_s(load.kept * length, length, passes - 1)
        return seconds + self.assume.learn_fixed_s

    def sft(self) -> float:
        """Seconds of the SFT stage."""
        sft = self.recipe.sft
        if sft is None:
            return 0.0
        count = sft.steps * sft.batch or sft.epochs * self.assume.conversations
        length = min(self.assume.conversation_tokens, sft.max_length)
        return self._training_s(count * length, length, 0)

    def _training_s(self, tokens: float, length: float, extra_forwards: int) -> float:
        """Seconds to train on `tokens`: compute, or FSDP communication if that is slower."""
        gpu, ranks, shape = self.cluster.gpu, self.layout.ranks, self.shape
        forward = 2.0 * shape.parameters + shape.attention_flops(length / 2)
        recomputed = 1 if self.recipe.learner.activation_checkpointing else 0
        flops = tokens * forward * (3 + recomputed + extra_forwards)
        compute = flops / (ranks * gpu.tflops * 1e12 * gpu.train_mfu)
        if ranks == 1:
            return compute
        microbatches = tokens / ranks / self.recipe.learner.tokens_per_microbatch
        moved = microbatches * 3 * 2 * shape.parameters / GB / self.cluster.slowest_link_gb
        return max(compute, moved)

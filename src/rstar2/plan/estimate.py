"""Does it fit, and how long does it take: memory by part, and a roofline of every part of a step.

    decoding   step_overhead + max(bytes / bandwidth, arithmetic)   bytes: weights + KV looked at
    prompts    2 P flops a token                                    P: parameters
    learning   6 P flops a token (8 P with recomputation), or moving the shards if that is slower
    weights    one copy through the slowest link, and a fixed part

Generation is played through on one engine with lengths drawn from the assumed distribution: as
many rollouts as its KV cache holds, the next as one ends, so the tail at a step's end is in it. On
request the rollout simulator does it instead, with the real scheduler (`simulated.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

from rstar2.config import Recipe
from rstar2.model_config import ModelShape, find_shape
from rstar2.plan.hardware import Cluster
from rstar2.plan.workload import (
    Assumptions,
    StageLoad,
    draw_lengths,
    evaluation_load,
    stage_loads,
)

GB = 1e9
STATE_BYTES = 16
"""Of one parameter in training: weight, gradient and two moments in float32."""
COMPUTE_SHARE = 0.6
"""Of the arithmetic that decoding with a large batch reaches."""
LOGITS_GB = 0.3
"""The learner computes logits in chunks of this size at most, gradients included."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory of one GPU, in GB, by what takes it."""

    parts: dict[str, float]
    limit: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(frozen=True, slots=True)
class Layout:
    """Who is where: engines of `tensor_parallel` GPUs, learner ranks of one each."""

    engines: int
    tensor_parallel: int
    ranks: int
    colocated: bool
    """Engines and learner take turns on the same GPUs."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its step by part in seconds, and what its tools need."""

    load: StageLoad
    generate_s: float
    tools_s: float
    """Beyond generation: waits that nothing hides."""
    learn_s: float
    sync_s: float
    rollouts_held: int
    """Rollouts that one engine holds at a time."""
    tokens_per_s: float
    """Of one engine, over the step's generation."""
    calls_per_s: float
    cores_needed: float

    @property
    def step_s(self) -> float:
        return self.generate_s + self.tools_s + self.learn_s + self.sync_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said about a recipe on a cluster."""

    recipe: str
    model: str
    cluster: Cluster
    shape: ModelShape
    layout: Layout
    assume: Assumptions
    engine: MemoryFit
    learner: MemoryFit
    kv_tokens: int
    """Of one engine."""
    stages: tuple[StagePlan, ...]
    sft_s: float
    filter_s: float
    evaluation_s: float
    problems: tuple[str, ...]
    """Why it would not work as it is; empty if it would."""

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
    """Plan a recipe on a cluster; what does not fit is said, and times are given all the same."""
    assume = assume or Assumptions()
    shape = find_shape(recipe.model.path)
    layout = lay_out(recipe, cluster, shape)
    learner = learner_fit(recipe, cluster, shape, layout)
    engine, kv_tokens = engine_fit(cluster, shape, layout, assume)
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
        stages=stages,
        sft_s=roofline.sft(),
        filter_s=filters,
        evaluation_s=evaluation.steps * roofline.generation(evaluation, evaluation.drawn)[0],
        problems=tuple(_problems(recipe, cluster, shape, engine, learner, stages)),
    )


# --------------------------------------------------------------------------- layout and memory


def lay_out(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> Layout:
    """Engines and ranks on the GPUs that there are, colocated unless the recipe says otherwise."""
    weights = 2 * shape.parameters / GB
    parallel = 1
    while weights / parallel > 0.5 * cluster.gpu.memory_gb and parallel < cluster.gpus_per_node:
        parallel *= 2
    colocated = recipe.cluster.colocate if recipe.cluster is not None else True
    if colocated or cluster.gpus == 1:
        return Layout(max(1, cluster.gpus // parallel), parallel, cluster.gpus, True)
    generating = max(parallel, cluster.gpus // 2)
    return Layout(generating // parallel, parallel, cluster.gpus - generating, False)


def learner_fit(recipe: Recipe, cluster: Cluster, shape: ModelShape, layout: Layout) -> MemoryFit:
    """What one rank holds while it learns; a colocated engine sleeps and holds nothing then."""
    tokens = recipe.learner.tokens_per_microbatch
    kept = 1 if recipe.learner.activation_checkpointing else 16
    layer = shape.parameters / shape.layers
    return MemoryFit(
        {
            f"state, {STATE_BYTES} B per parameter / {layout.ranks} ranks": (
                STATE_BYTES * shape.parameters / layout.ranks / GB
            ),
            "gathered layers": (0.0 if layout.ranks == 1 else 2 * 2 * layer * 2 / GB),
            f"activations of {tokens} tokens": (
                tokens * shape.hidden * 2 * shape.layers * kept
                + tokens * (8 * shape.hidden + 3 * shape.intermediate) * 2
            )
            / GB,
            "logits": LOGITS_GB,
        },
        0.95 * cluster.gpu.memory_gb,
    )


def engine_fit(
    cluster: Cluster, shape: ModelShape, layout: Layout, assume: Assumptions
) -> tuple[MemoryFit, int]:
    """What one GPU of an engine holds while it generates, and the tokens its KV cache takes.

    Where the learner's state leaves no room, the cache is what there would be without it.
    """
    parts = {"weights, bfloat16": 2 * shape.parameters / layout.tensor_parallel / GB}
    limit = assume.kv_share * cluster.gpu.memory_gb
    room = limit - sum(parts.values())
    if layout.colocated and not assume.host_state:
        state = STATE_BYTES * shape.parameters / layout.ranks / GB
        parts["learner's state on the same GPU"] = state
        room = room - state if state < 0.9 * room else room
    per_token = 2 * shape.kv_numbers / layout.tensor_parallel
    tokens = max(0, int(room * GB / per_token))
    parts["KV cache"] = max(0.0, room)
    return MemoryFit(parts, limit), tokens


def _problems(
    recipe: Recipe,
    cluster: Cluster,
    shape: ModelShape,
    engine: MemoryFit,
    learner: MemoryFit,
    stages: tuple[StagePlan, ...],
) -> list[str]:
    problems = []
    if not learner.fits:
        enough = _enough(recipe, cluster, shape)
        problems.append(
            f"the learner needs {learner.total:.1f} GB on each GPU, {learner.limit:.1f} GB are "
            f"available; it fits on {enough} of them (state is sharded), or use a smaller model"
        )
    if not engine.fits:
        problems.append(
            f"an engine and the learner's state need {engine.total:.1f} GB on the same GPU, "
            f"{engine.limit:.1f} GB are available; the times below assume that the engine has the "
            "GPU to itself while it generates"
        )
    worst = max(stages, key=lambda s: s.cores_needed, default=None)
    if worst is not None and worst.cores_needed > cluster.cores:
        problems.append(
            f"{worst.load.name} needs {worst.cores_needed:.0f} cores for its tool calls, the "
            f"cluster has {cluster.cores}; add code environments, or steps will wait for tool calls"
        )
    return problems


def _enough(recipe: Recipe, cluster: Cluster, shape: ModelShape) -> str:
    """The smallest number of these GPUs on which the learner fits."""
    count = cluster.gpus
    while count < 4096:
        count *= 2
        larger = replace(cluster, gpus=count)
        if learner_fit(recipe, larger, shape, lay_out(recipe, larger, shape)).fits:
            return str(count)
    return "no number"


# --------------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times of one recipe on one cluster."""

    recipe: Recipe
    cluster: Cluster
    shape: ModelShape
    layout: Layout
    assume: Assumptions
    kv_tokens: int
    simulated: bool = False

    def stage(self, load: StageLoad) -> StagePlan:
        """One step of a stage."""
        generate_s, held, rate = self.generation(load, load.drawn)
        calls = load.calls(self.assume)
        capacity = self.cluster.cores * self.assume.calls_per_core_s
        chain = self.assume.calls_per_rollout * self.assume.call_s
        return StagePlan(
            load=load,
            generate_s=generate_s,
            tools_s=chain + max(0.0, calls / capacity - generate_s),
            learn_s=self.learning(load),
            sync_s=self.assume.sync_fixed_s
            + 2 * self.shape.parameters / GB / self.cluster.slowest_link_gb,
            rollouts_held=held,
            tokens_per_s=rate,
            calls_per_s=calls / generate_s,
            cores_needed=calls / generate_s / self.assume.calls_per_core_s,
        )

    def held(self, load: StageLoad) -> int:
        """Rollouts that one engine works on at a time."""
        tokens = self.assume.prompt_tokens + self.assume.reserve * load.mean_completion
        return max(1, min(self.recipe.engine.max_sequences, int(self.kv_tokens / tokens)))

    def generation(self, load: StageLoad, rollouts: int) -> tuple[float, int, float]:
        """Seconds for so many rollouts over all engines, how many one holds, its tokens/s."""
        share = -(-rollouts // self.layout.engines)
        played = min(share, 640)  # more are more of the same
        lengths = draw_lengths(played, load, self.assume)
        sampled = [round(n * (1 - self.assume.tool_share)) for n in lengths]
        held = self.held(load)
        if self.simulated:
            seconds = self._simulated_s(lengths, load.max_length) * share / played
            return seconds, held, sum(sampled) * share / played / seconds
        seconds = self.decoding(sampled, held) * share / played
        read = self.assume.prompt_tokens / 8 + self.assume.tool_share * load.mean_completion
        flops = 2.0 * self.shape.parameters * read * share
        gpu = self.cluster.gpu
        speed = gpu.tflops * 1e12 * self.assume.prefill_mfu * self.layout.tensor_parallel
        seconds += flops / speed
        return seconds, held, sum(sampled) * share / played / seconds

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
        """Play one engine through: all that it holds advance a token at a time."""
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
        """Seconds of one decoding step over `batch` rollouts that hold `context` tokens."""
        gpu, parallel = self.cluster.gpu, self.layout.tensor_parallel
        moved = 2.0 * self.shape.parameters + 2.0 * self.shape.kv_numbers * context
        memory = moved / (gpu.bandwidth_tb * 1e12 * self.assume.decode_bandwidth * parallel)
        arithmetic = 2.0 * self.shape.parameters * batch
        return self.assume.step_overhead_s + max(
            memory, arithmetic / (gpu.tflops * 1e12 * COMPUTE_SHARE * parallel)
        )

    def learning(self, load: StageLoad) -> float:
        """Seconds of one learner step."""
        length = self.assume.prompt_tokens + load.mean_completion
        passes = 1 if self.recipe.rl.minibatches == 1 else 2  # old logprobs of later mini-batches
        seconds = self._training_s(load.kept * length, length, passes - 1)
        return seconds + self.assume.learn_fixed_s

    def sft(self) -> float:
        """Seconds of the whole SFT stage."""
        sft = self.recipe.sft
        if sft is None:
            return 0.0
        count = sft.steps * sft.batch or sft.epochs * self.assume.conversations
        length = min(self.assume.conversation_tokens, sft.max_length)
        return self._training_s(count * length, length, 0)

    def _training_s(self, tokens: float, length: float, extra_forwards: int) -> float:
        """Arithmetic, or moving the shards where that takes longer."""
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

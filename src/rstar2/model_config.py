"""A model's shape and settings, read from the config.json of its transformers directory.

The embedded engine, the checks before a run and the planner all use this reader. It does not import
transformers, whose configuration classes take longer to import than an engine worker takes to
start. Missing values have the defaults of the architecture's transformers class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rstar2.errors import UserError

CONFIG_FILE = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3 = "gemma3_text"
GEMMA3_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
"""Defaults of Gemma3TextConfig that differ from those of the other architectures."""


def unreadable_weights(where: Path | str, error: Exception) -> str:
    """The message for weights that are damaged."""
    return (
        f"model: the weights in {where} cannot be read ({error}): the file is damaged or "
        "incomplete. Copy or download it again"
    )


class UndescribedModelError(UserError):
    """A config.json without the sizes of a decoder: the architecture uses other names."""

    def __init__(self, message: str, architecture: str) -> None:
        super().__init__(message)
        self.architecture = architecture


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with grouped-query attention and a gated feed-forward network."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    """Whether the output layer shares the weights of the embedding."""

    @property
    def parameters(self) -> int:
        """Number of parameters of all matrices; norms are not counted."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_numbers(self) -> int:
        """Number of values in the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Number of parameters of LoRA adapters: rank x (inputs + outputs) of every target."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            "gate_proj": self.hidden + self.intermediate,
            "up_proj": self.hidden + self.intermediate,
            "down_proj": self.intermediate + self.hidden,
        }
        return self.layers * rank * sum(sizes.get(name, 0) for name in targets or sizes)

    def attention_flops(self, context: float) -> float:
        """FLOPs of attention for one token with `context` tokens before it."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its type, base, and the share of a head that it rotates."""

    kind: str = "default"
    theta: float = 10_000.0
    rotated_share: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The settings of a config.json that rstar2 uses."""

    directory: Path
    architecture: str
    """`model_type` of the file; empty if it has none."""
    shape: ModelShape
    norm_eps: float
    rope: RopeConfig
    activation: str
    max_length: int | None
    """Maximum number of positions; None if the file does not say."""
    dtype: str | None
    """Type of the saved weights; None if the file does not say."""
    layer_types: tuple[str, ...] = ()
    """The kind of attention of each layer; empty if all of them attend to everything."""
    sliding_window: int | None = None
    """Keys that a query of a `sliding_attention` layer sees, its own included."""
    sliding_rope: RopeConfig | None = None
    """RoPE of `sliding_attention` layers where it differs from the others'."""
    query_scale: int | None = None
    """Attention scores are divided by the square root of this; None: of the head dimension."""
    softcap: float | None = None
    """Bound of logits that are soft-capped."""


_QWEN = 151_936
KNOWN_SHAPES = {
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, _QWEN, tied=True),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 128, 6144, _QWEN, tied=True),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 128, 9728, _QWEN, tied=True),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12288, _QWEN),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 128, 17408, _QWEN),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25600, _QWEN),
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152_064),
    "smollm2": ModelShape(576, 30, 9, 3, 64, 1536, 49_152, tied=True),
    "gemma3-270m": ModelShape(640, 18, 4, 1, 256, 2048, 262_144, tied=True),
    "tiny": ModelShape(128, 3, 4, 2, 32, 256, 768, tied=True),
}
"""Shapes of known models, for which no config.json is needed."""


def find_shape(path: str) -> ModelShape:
    """The shape of `model.path`: from its config.json, or of a known model of that name."""
    directory = Path(path).expanduser()
    if (directory / CONFIG_FILE).is_file():
        return read_model_config(directory).shape
    name = path.rpartition("/")[2].lower()
    matches = [known for known in KNOWN_SHAPES if name.startswith(known)]
    if not matches:
        raise UserError(
            f"model.path = {path} is neither a directory with a config.json nor one of the models "
            f"whose shape is known: {', '.join(KNOWN_SHAPES)}"
        )
    return KNOWN_SHAPES[max(matches, key=len)]


def read_model_config(directory: Path) -> DecoderConfig:
    """Read a directory's config.json; UndescribedModelError if sizes are missing."""
    file, fields = directory / CONFIG_FILE, read_config_fields(directory)
    if fields.get("model_type") == GEMMA3:
        fields = GEMMA3_DEFAULTS | fields
    shape, types = _shape(file, fields), _layer_types(fields)
    return DecoderConfig(
        directory=directory,
        architecture=fields.get("model_type") or "",
        shape=shape,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        activation=fields.get("hidden_activation") or fields.get("hidden_act") or "silu",
        max_length=fields.get("max_position_embeddings"),
        dtype=fields.get("dtype") or fields.get("torch_dtype"),
        layer_types=types,
        sliding_window=fields.get("sliding_window") if SLIDING in types else None,
        sliding_rope=_sliding_rope(fields) if SLIDING in types else None,
        query_scale=fields.get("query_pre_attn_scalar"),
        softcap=fields.get("final_logit_softcapping") or fields.get("attn_logit_softcapping"),
    )


def _layer_types(fields: dict[str, Any]) -> tuple[str, ...]:
    """From `layer_types`, or from the settings of older files; empty if all are full."""
    count = int(fields["num_hidden_layers"])
    types = tuple(fields.get("layer_types") or ())
    if not types and fields.get("model_type") == GEMMA3:
        period = fields["sliding_window_pattern"]
        types = tuple(SLIDING if (i + 1) % period else FULL for i in range(count))
    elif not types and fields.get("use_sliding_window"):
        first = fields.get("max_window_layers", 28)  # the default of Qwen2Config and Qwen3Config
        types = (FULL,) * min(first, count) + (SLIDING,) * max(0, count - first)
    return types if set(types) - {FULL} else ()


def read_config_fields(directory: Path) -> dict[str, Any]:
    """All fields of a directory's config.json, also of an architecture with other sizes."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise UserError(
            f"model: {directory} is not a transformers directory (it has no {CONFIG_FILE})"
        )
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UserError(f"model: {file} cannot be read: {error}") from error


def _shape(file: Path, fields: dict[str, Any]) -> ModelShape:
    architecture = fields.get("model_type") or ""
    try:
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        # Qwen2Config and Qwen3Config have 32 KV heads unless the file gives a number; null means
        # as many as heads. Only Qwen3Config does not derive head_dim from the hidden size.
        default_kv_heads = 32 if architecture in ("qwen2", "qwen3") else heads
        default_head_dim = 128 if architecture == "qwen3" else hidden // heads
        return ModelShape(
            hidden=hidden,
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads", default_kv_heads) or heads),
            head_dim=int(fields.get("head_dim") or default_head_dim),
            intermediate=int(fields["intermediate_size"]),
            vocabulary=int(fields["vocab_size"]),
            tied=bool(fields.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UndescribedModelError(
            f"{file} does not describe a decoder: {reason}", architecture
        ) from error


def _rope(fields: dict[str, Any]) -> RopeConfig:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta` of older files."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return _one_rope(rope.get(FULL, rope), fields)


def _sliding_rope(fields: dict[str, Any]) -> RopeConfig | None:
    """RoPE of sliding layers, which Gemma 3 gives them; None if theirs is that of all layers."""
    by_type = (fields.get("rope_parameters") or {}).get(SLIDING)
    if by_type is not None:
        return _one_rope(by_type, fields)
    theta = fields.get("rope_local_base_freq")
    return None if theta is None else RopeConfig(theta=theta)


def _one_rope(rope: dict[str, Any], fields: dict[str, Any]) -> RopeConfig:
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return RopeConfig(
        kind=rope.get("rope_type", rope.get("type", "default")),
        theta=rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0,
        rotated_share=share,
    )

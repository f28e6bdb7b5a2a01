"""The shape of a model: from its configuration where that is on this machine, else by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rstar2.errors import UserError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped attention and a gated feed-forward part."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Of all weight matrices; norms are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, context: float) -> float:
        """Of one token that looks back at `context` others, beyond the weight matrices."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


QWEN = 151_936
KNOWN = {
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, QWEN, tied=True),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 128, 6144, QWEN, tied=True),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 128, 9728, QWEN, tied=True),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12288, QWEN),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 128, 17408, QWEN),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25600, QWEN),
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152_064),
    "smollm2": ModelShape(576, 30, 9, 3, 64, 1536, 49_152, tied=True),
    "tiny": ModelShape(128, 3, 4, 2, 32, 384, 768, tied=True),
}


def find_shape(path: str) -> ModelShape:
    """The shape of `model.path`: a directory's config.json, else a known model of that name."""
    config = Path(path).expanduser() / "config.json"
    if config.is_file():
        return _read(config)
    name = path.rpartition("/")[2].lower()
    found = [known for known in KNOWN if name.startswith(known)]
    if not found:
        raise UserError(
            f"model.path = {path} is neither a directory with a config.json nor one of the models "
            f"whose shape is known: {', '.join(KNOWN)}"
        )
    return KNOWN[max(found, key=len)]


def _read(file: Path) -> ModelShape:
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not describe a decoder: {error}") from error

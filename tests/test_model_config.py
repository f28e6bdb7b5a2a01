"""The reader of config.json agrees with the configuration classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rstar2.errors import UserError
from rstar2.model_config import (
    KNOWN_SHAPES,
    DecoderConfig,
    RopeConfig,
    UndescribedModelError,
    find_shape,
    read_model_config,
)

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "vocab_size": 100,
}


def read(directory: Path, architecture: str, **fields: Any) -> DecoderConfig:
    text = json.dumps({"model_type": architecture, **SIZES, **fields})
    (directory / "config.json").write_text(text)
    return read_model_config(directory)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 32, "num_key_value_heads": 4},
        {"num_key_value_heads": None, "tie_word_embeddings": True},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=["defaults", "given", "null", "old rope", "new rope"],
)
def test_it_reads_what_transformers_reads(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    ours = read(tmp_path, architecture, **fields)
    theirs = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.shape.head_dim == head_dim
    assert ours.shape.kv_heads == theirs.num_key_value_heads
    assert ours.shape.tied == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]


def test_a_qwen3_without_head_dim_has_128_and_a_llama_derives_it(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3").shape.head_dim == 128
    assert read(tmp_path, "llama").shape.head_dim == 64
    assert read(tmp_path, "llama", head_dim=32).shape.head_dim == 32


def test_rope_in_old_and_new_form(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert read(tmp_path, "qwen3", rope_scaling=yarn, rope_theta=1e6).rope == RopeConfig(
        "yarn", 1e6
    )
    new = {"rope_type": "llama3", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert read(tmp_path, "llama", rope_parameters=new).rope == RopeConfig("llama3", 5e5, 0.5)
    assert read(tmp_path, "llama").rope == RopeConfig()


def test_the_rest_of_the_file(tmp_path: Path) -> None:
    plain = read(tmp_path, "llama")
    assert (plain.max_length, plain.dtype, plain.activation) == (None, None, "silu")
    assert not plain.sliding_window
    full = read(
        tmp_path,
        "qwen2",
        max_position_embeddings=512,
        torch_dtype="bfloat16",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=64,
    )
    assert (full.max_length, full.dtype, full.sliding_window) == (512, "bfloat16", 64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 64, "query_pre_attn_scalar": 128, "num_hidden_layers": 7},
        {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 32},
    ],
    ids=["defaults", "seven layers", "given"],
)
def test_a_gemma3_is_read_as_transformers_reads_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    ours = read(tmp_path, "gemma3_text", **fields)
    theirs = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert ours.shape.head_dim == theirs.head_dim
    assert ours.shape.kv_heads == theirs.num_key_value_heads
    assert ours.shape.tied == theirs.tie_word_embeddings
    assert ours.layer_types == tuple(theirs.layer_types)
    assert ours.sliding_window == theirs.sliding_window
    assert ours.query_scale == theirs.query_pre_attn_scalar
    assert ours.activation == theirs.hidden_activation
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes["full_attention"]["rope_theta"]
    assert ours.sliding_rope is not None
    assert ours.sliding_rope.theta == ropes["sliding_attention"]["rope_theta"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}')
    with pytest.raises(UndescribedModelError, match="it has no 'hidden_size'"):
        read_model_config(tmp_path)


def test_the_tiny_model_has_the_shape_that_is_known(tiny_dir: Path) -> None:
    assert read_model_config(tiny_dir).shape == KNOWN_SHAPES["tiny"]


def test_known_models_are_found_by_name() -> None:
    assert find_shape("Qwen/Qwen3-1.7B-Base") == KNOWN_SHAPES["qwen3-1.7b"]

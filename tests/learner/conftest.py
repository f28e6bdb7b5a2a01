"""Small models with random weights, and random ragged samples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # its classes are imported when they are used
from transformers.utils import logging

from rstar2.types import Batch

logging.disable_progress_bar()

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with tied embeddings."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with an untied head, as the paper's base model."""
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(1)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def batch() -> Batch:
    from tests.learner.learner_helpers import random_batch

    return random_batch(random.Random(0))

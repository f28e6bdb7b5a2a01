"""The embedded model: the same from the same seed, loadable as any transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rstar2.agent.template import CHAT_TEMPLATE
from rstar2.learner.tiny import TAGS, VOCABULARY, make_tiny, make_tokenizer
from rstar2.problems.arithmetic import (
    ANSWER_HEAD,
    ANSWER_TAIL,
    CALL_HEAD,
    CALL_TAIL,
    make_problems,
    sft_conversations,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=7)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerFast:
    loaded: Any = AutoTokenizer.from_pretrained(tiny)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_directory_is_a_function_of_the_seed(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "same", seed=7)
    make_tiny(tmp_path / "other", seed=8)
    for name in sorted(path.name for path in tiny.iterdir()):
        assert (tmp_path / "same" / name).read_bytes() == (tiny / name).read_bytes(), name
    weights, words = "model.safetensors", "tokenizer.json"
    assert (tmp_path / "other" / weights).read_bytes() != (tiny / weights).read_bytes()
    assert (tmp_path / "other" / words).read_bytes() == (tiny / words).read_bytes()


def test_making_it_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    make_tiny(tmp_path, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_suits_vllm_and_stays_under_a_million(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 32
    assert config["vocab_size"] == VOCABULARY
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    std = model.model.layers[0].mlp.up_proj.weight.std().item()
    assert 0.045 < std < 0.055


def test_all_task_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [p.prompt for p in make_problems("heldout", 80, seed=1)]
    texts += [m.content for c in sft_conversations(200, seed=9) for m in c.messages]
    texts += ["Überraschung: 你好, {}\n\t<|im_end|>"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tags_and_call_frame_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    phrases = (*TAGS, CALL_HEAD, CALL_TAIL, ANSWER_HEAD, ANSWER_TAIL)
    for phrase in (*phrases, "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(phrase)) == 1, phrase
    assert tokenizer.eos_token == "<|im_end|>"
    assert set(tokenizer.all_special_tokens) == {"<|im_start|>", "<|im_end|>", "<|pad|>"}


@pytest.mark.parametrize("around", ["{}", " {},", "({})", "x = {}\n", "\\boxed{{{}}}"])
def test_numbers_are_cut_the_same_wherever_they_stand(
    tokenizer: PreTrainedTokenizerFast, around: str
) -> None:
    for number in ("7", "40", "905", "1234", "98765"):
        expected = tokenizer.convert_ids_to_tokens(tokenizer.encode(number))
        assert expected == [number[i : i + 2] for i in range(0, len(number), 2)]
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(around.format(number)))
        assert [t for t in tokens if t.isdigit()] == expected


def test_two_trainings_of_the_tokenizer_agree() -> None:
    first, second = (make_tokenizer().backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_chat_template_travels_with_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE

"""The embedded model: a tokenizer and a small Llama, made from a seed in seconds.

The tokenizer is a byte-level BPE trained on the embedded task's own text; it is the same for
every seed, so that runs differ in weights only. Numbers are split into chunks of up to two digits
and never merged with the text around them: copying a number means copying its chunks.

The result is an ordinary transformers directory (config, safetensors, tokenizer, chat template).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rstar2.agent.template import CHAT_TEMPLATE
from rstar2.problems.arithmetic import (
    ANSWER_HEAD,
    ANSWER_TAIL,
    CALL_HEAD,
    CALL_TAIL,
    sft_conversations,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 768
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TAGS = tuple(
    mark.format(name)
    for name in ("reason", "answer", "tool_call", "tool_response")
    for mark in ("<{}>", "</{}>")
)
CORPUS = 2000
"""Conversations that the tokenizer is trained on."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer; equal on every call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, START, END]
    phrases = [CALL_HEAD, CALL_TAIL, ANSWER_HEAD, ANSWER_TAIL, *TAGS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(phrases),
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(phrases), trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _corpus(phrases: list[str]) -> Iterator[str]:
    """Training text with the added phrases cut out: they never reach the merges."""
    for conversation in sft_conversations(CORPUS, seed=0):
        for message in conversation.messages:
            text = message.content
            for phrase in phrases:
                text = text.replace(phrase, "\0")
            yield from filter(None, text.split("\0"))
    for pair in range(100):  # all two-digit chunks, however rare in the sample
        yield from [f"{pair:02d}"] * CORPUS


def make_model(seed: int, vocabulary: int, eos: int, pad: int) -> LlamaForCausalLM:
    """A small Llama with random weights drawn from the seed alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM(config).float()
    return model


def make_tiny(directory: Path, seed: int) -> None:
    """Write the tokenizer and a freshly initialised model to a directory."""
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    write_model(directory, tokenizer, model)


def write_model(
    directory: Path, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    """Write a transformers directory without the progress bar that `save_pretrained` shows."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tensors = {name: value.contiguous() for name, value in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

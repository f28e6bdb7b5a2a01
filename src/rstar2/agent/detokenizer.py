"""Decodes token ids one by one, for display: the texts join to the text of all ids.

Byte-level tokenizers may split a character over several tokens; the character then appears with
the last of them. Needs neither torch nor transformers: `tokenizers` reads tokenizer.json.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def find_tokenizer(run: Path, recipe: dict[str, Any]) -> Path | None:
    """The tokenizer.json of a run; None if the run has none."""
    model = (recipe.get("model") or {}).get("path")
    places = [run / "model", *sorted((run / "exports").glob("[!.]*"))]
    if isinstance(model, str):
        places.append(Path(model))
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place / "tokenizer.json"
    return None


class Detokenizer:
    """Decodes ids one by one; without a tokenizer the text of an id is its number."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self.path is None:
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path))

    @cached_property
    def _byte_level(self) -> bool:
        tokenizer = self._tokenizer
        return tokenizer is not None and "ByteLevel" in str(tokenizer.decoder)

    @cached_property
    def _special(self) -> frozenset[int]:
        tokenizer = self._tokenizer
        return frozenset(tokenizer.get_added_tokens_decoder()) if tokenizer else frozenset()

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text per id."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [f" {token}" for token in ids]
        if self._byte_level:
            return self._from_bytes(tokenizer, ids)
        return self._by_context(tokenizer, ids)

    def _from_bytes(self, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for token in ids:
            spelt = tokenizer.id_to_token(token)
            if spelt is None:
                pieces.append(f"<{token}>")
            elif token in self._special:
                pieces.append(decoder.decode(b"", True) + spelt)
                decoder.reset()
            else:
                pieces.append(decoder.decode(bytes(_BYTES.get(c, 0x3F) for c in spelt)))
        if pieces:
            pieces[-1] += decoder.decode(b"", True)
        return pieces

    def _by_context(self, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        for index, token in enumerate(ids):
            before = list(ids[max(0, index - 1) : index])
            known = tokenizer.decode(before, skip_special_tokens=False)
            whole = tokenizer.decode([*before, token], skip_special_tokens=False)
            pieces.append(whole.removeprefix(known))
        return pieces


def _byte_table() -> dict[str, int]:
    """The inverse of GPT-2's table that maps bytes to printable characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()

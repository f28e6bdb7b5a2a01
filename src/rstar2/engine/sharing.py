"""Equal prompts are computed once: the rollouts of a group start from one prefill.

A fresh request whose prompt another running one has, or is about to have, copies its keys, values
and last hidden state instead of computing them. What is copied is what it would have computed
itself, to the bit, so only requests that start from nothing give and take; a prompt continued
from a cached prefix does neither.
"""

from __future__ import annotations

from rstar2.engine.slots import Ids


class PromptSharing:
    """Who holds which prompt, and who waits for it."""

    def __init__(self) -> None:
        self._holder: dict[bytes, int] = {}  # prompt -> slot that has it or will
        self._prompt: dict[int, bytes] = {}  # fresh slot -> its prompt
        self._source: dict[int, int] = {}  # slot that waits for a copy -> slot it copies from

    def join(self, slot: int, prompt: Ids) -> None:
        """A fresh request took a slot: it copies from the holder of its prompt, or becomes it."""
        key = prompt.tobytes()
        self._prompt[slot] = key
        if key in self._holder:
            self._source[slot] = self._holder[key]
        else:
            self._holder[key] = slot

    def source(self, slot: int) -> int | None:
        """The slot to copy from; None for those that compute for themselves."""
        return self._source.get(slot)

    def copied(self, slot: int) -> None:
        """The slot has its copy."""
        del self._source[slot]

    def leave(self, slot: int) -> None:
        """A slot is freed; if it held its prompt, the oldest other slot with it takes over."""
        key = self._prompt.pop(slot, None)
        self._source.pop(slot, None)
        if key is None or self._holder[key] != slot:
            return
        del self._holder[key]
        heirs = [other for other, held in self._prompt.items() if held == key]
        if heirs:
            heir = self._holder[key] = heirs[0]
            # Others wait only for a prompt that nobody has yet: the heir was one of them.
            self._source.pop(heir, None)
            self._source |= {other: heir for other in heirs if other in self._source}
